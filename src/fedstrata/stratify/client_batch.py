"""The client's part of Stratify's batch mode: samples set aside by label, and the gradient of their summed loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from fedstrata.base.errors import FedstrataError
from fedstrata.base.records import record
from fedstrata.base.rng import SERVER, torch_seeded
from fedstrata.clients.client import Client
from fedstrata.clients.context import ClientContext
from fedstrata.clients.handling import handles, handles_sum
from fedstrata.clients.training.local import is_plain, manual_sgd_of
from fedstrata.federation.messages import ClientId, Params, Reply
from fedstrata.models.batchnorm import federated
from fedstrata.models.model import Model
from fedstrata.objectives.base import Batch, Context
from fedstrata.stratify.messages import (
    GatheredReply,
    Gradient,
    GradientReply,
    GradientSteps,
    Reserve,
    ReserveReply,
    Steps,
)

Ints = NDArray[np.int64]
Q = TypeVar("Q", bound=Gradient)
_NONE: Ints = np.empty(0, dtype=np.int64)
STATE, PLACEHOLDERS = "stratify", "placeholders"
"""Names under which a client keeps its pools, and the label behind each placeholder where labels are masked."""

ALL = (0.0, 1.0)
"""The window in which every sample is there."""


@record("Pool")
class Pool:
    """One placeholder's samples, drawn without replacement.

    Args:
        order: Their places among the client's own, shuffled.
        used: How many are gone.
        refills: How often the pool began anew this epoch.
    """

    order: Ints
    used: int
    refills: int


@record("Reserved")
class Reserved:
    """What a client remembers in an epoch.

    Args:
        round: The epoch.
        pools: By placeholder.
        batches: The batch of every sample set aside, ascending.
        places: Where that sample is among the client's own.
    """

    round: int
    pools: dict[int, Pool]
    batches: Ints
    places: Ints

    @cached_property
    def _bounds(self) -> tuple[dict[int, int], dict[int, int]]:
        """Where the part of each batch begins and ends in ``places``: numbers alone, which no collector counts."""
        batches, begins = np.unique(self.batches, return_index=True)
        numbers, first = batches.tolist(), begins.tolist()
        return dict(zip(numbers, first, strict=True)), dict(zip(numbers, [*first[1:], len(self.batches)], strict=True))

    def part(self, batch: int) -> Ints:
        """The places of a batch's samples; none where nothing was set aside for it."""
        begins, ends = self._bounds
        return self.places[begins.get(batch, 0) : ends.get(batch, 0)]


def places_of(client: Client, placeholder: int) -> Ints:
    """Where the samples of a placeholder are among the client's own, ascending; empty where it holds none.

    Empty too where it holds fewer than ``privacy.min_samples``: what it does not name when it enrols it does not have,
    whoever asks, and whether it was asked to enrol or not.
    """
    label = label_of(client, placeholder)
    places = _NONE if label is None else np.flatnonzero(client.labels == label)
    return places if len(places) >= client.context.privacy.min_samples else _NONE


def label_of(client: Client, placeholder: int) -> int | None:
    """The label behind a placeholder: itself unless labels are masked; None for one that the client does not know."""
    known: Mapping[int, int] | None = client.state.get(PLACEHOLDERS)
    return placeholder if known is None else known.get(placeholder)


def new_pool(client: Client, round: int, placeholder: int, window: tuple[float, float], refills: int = 0) -> Pool:
    """The samples of a placeholder that are there, shuffled.

    Randomness is keyed by the real label, so that masking changes nothing. The samples of each label arrive in an order
    of their own, drawn once for the whole run; those from ``window[0]`` to ``window[1]`` of them are there.
    """
    order, label = places_of(client, placeholder), label_of(client, placeholder)
    if window != ALL:
        arriving = client.rng(f"arrival/{label}", 0).permutation(order)
        # A hair more, for products such as 0.29 · 100 that lie below the whole number that is meant.
        first, last = (int(part * len(order) + 1e-9) for part in window)
        order = np.sort(arriving[first:last])
    return Pool(client.rng(f"pool/{label}/{refills}", round).permutation(order), 0, refills)


def refilled(client: Client, pools: Mapping[int, Pool], request: Reserve | Steps) -> dict[int, Pool]:
    """The pools after those that the request names began anew.

    Raises:
        FedstrataError: It names more than there are classes, which would fill the client's memory.
    """
    if len(request.refill) > client.context.config.classes:
        raise FedstrataError("more pools begin anew than there are classes")
    result = dict(pools)
    for p in request.refill.tolist():
        refills = result[p].refills + 1 if p in result else 0
        result[p] = new_pool(client, request.round, p, request.window, refills)
    return result


@handles(Reserve)
def reserve(client: Client, request: Reserve) -> ReserveReply:
    """Set one sample aside for every position as long as the placeholder's pool lasts."""
    before = client.state.get(STATE)
    if request.fresh or not isinstance(before, Reserved) or before.round != request.round:
        before = Reserved(request.round, {}, _NONE, _NONE)
    pools = refilled(client, before.pools, request)
    batches, wanted = request.batches.numpy(), request.labels.numpy()
    if len(batches) != len(wanted) or bool((np.diff(batches) < 0).any()):
        raise FedstrataError("a reservation needs a batch for every position, ascending")
    served, held = np.zeros((2, len(wanted)), dtype=bool)
    asked = np.unique(wanted).tolist()
    if len(asked) > client.context.config.classes:
        raise FedstrataError("more placeholders than there are classes")
    for p in asked:
        pools[p] = pools.get(p) or new_pool(client, request.round, p, request.window)
        served[np.flatnonzero(wanted == p)[: len(pools[p].order) - pools[p].used]] = True
    if gathers := client.context.privacy.gathers:
        batches = batches.copy()
        batches[served] = gathered(batches[served], before.batches, client.context.privacy.min_samples)
        held = served & (batches < 0)
        served &= ~held
    places = np.full(len(wanted), -1, dtype=np.int64)
    exhausted = []
    for p in asked:
        pool, positions = pools[p], np.flatnonzero(served & (wanted == p))
        places[positions] = pool.order[pool.used : pool.used + len(positions)]
        pools[p] = Pool(pool.order, pool.used + len(positions), pool.refills)
        if pools[p].used == len(pool.order):
            exhausted.append(p)
    all_batches = np.concatenate([before.batches, batches[served]])
    all_places = np.concatenate([before.places, places[served]])
    order = np.argsort(all_batches, kind="stable")
    client.state[STATE] = Reserved(request.round, pools, all_batches[order], all_places[order])
    missing, empty = torch.from_numpy(~served), torch.tensor(exhausted, dtype=torch.int64)
    return (
        GatheredReply(missing, empty, torch.from_numpy(batches), torch.from_numpy(held))
        if gathers
        else ReserveReply(missing, empty)
    )


def gathered(batches: Ints, before: Ints, least: int) -> Ints:
    """Merge parts of batches that are too small: each goes into the client's next part, until there is enough.

    What is left at the end, when no part comes after it, joins the one before it. Parts that were set aside earlier
    stay where they are; batches before the first of the new ones may be over, and nothing is put there.

    Args:
        batches: Of the new samples, ascending, shape (n,).
        before: Of the samples that were set aside earlier, in parts that are large enough, ascending.
        least: Fewest samples of a part.

    Returns:
        The batch in which each new sample goes out, −1 where it cannot: fewer than ``least`` in all. Shape (n,).

    >>> gathered(np.array([0, 2, 2, 3, 5, 5, 8]), np.array([], dtype=int), 2).tolist()
    [2, 2, 2, 5, 5, 5, 5]
    >>> gathered(np.array([1, 6]), np.array([4, 4]), 2).tolist(), gathered(np.array([1]), np.array([0, 0]), 2).tolist()
    ([4, 4], [-1])
    """
    result = np.full(len(batches), -1, dtype=np.int64)
    if len(batches) == 0:
        return result
    theirs, sizes = np.unique(before[before >= batches[0]], return_counts=True)
    there = dict(zip(theirs.tolist(), sizes.tolist(), strict=True))
    values, ends = np.unique(batches, return_index=True)
    end_of = dict(zip(values.tolist(), [*ends[1:].tolist(), len(batches)], strict=True))
    begin = end = 0
    last = -1
    for batch in sorted(there.keys() | end_of.keys()):
        end = end_of.get(batch, end)
        if end - begin + there.get(batch, 0) >= least:
            result[begin:end] = batch
            begin, last = end, batch
    result[begin:] = last
    return result


def set_aside(client: Client, batch: int) -> Ints:
    """The data set's indices that the client keeps for a batch.

    Raises:
        WithheldError: There are fewer than ``privacy.min_samples``.
    """
    state: Reserved = client.state[STATE]
    indices: Ints = client.indices[state.part(batch)]
    client.release(len(indices))
    return indices


@handles(Gradient)
def gradient(client: Client, request: Gradient) -> GradientReply:
    """The client's part of a batch; BatchNorm's statistics are those of all parts together."""
    return _part(client, request, summed_gradient)


@handles(GradientSteps)
def gradient_steps(client: Client, request: GradientSteps) -> GradientReply:
    """The same along some steps."""
    return _part(client, request, stepped)


def _part(
    client: Client, request: Q, compute: Callable[[ClientContext, Model, Params, Q, Ints], GradientReply]
) -> GradientReply:
    indices = set_aside(client, request.batch)
    weights, model, group = request.weights, client.model, client.group
    with (
        nullcontext() if group is None else federated(model.module, group),
        model.loaded(weights.params, weights.buffers, train=True) as params,
        _seeded(client.context, request, client.number),
    ):
        return compute(client.context, model, params, request, indices)


def stepped(
    context: ClientContext, model: Model, params: Params, request: GradientSteps, indices: Ints
) -> GradientReply:
    """The sum of the gradients along some steps on the client's own part.

    With n samples a step is w ← w − (η / n) g. A step of the server with the same η along the sum over clients, divided
    by all samples, then leads to the mean of the clients' models, by their samples.
    """
    first = reply = summed_gradient(context, model, params, request, indices)
    total = {name: gradient.clone() for name, gradient in first.gradient.items()}
    rate = request.lr / max(len(indices), 1)
    for _ in range(request.steps - 1):
        with torch.no_grad():
            torch._foreach_add_(list(params.values()), list(reply.gradient.values()), alpha=-rate)
        reply = summed_gradient(context, model, params, request, indices)
        torch._foreach_add_(list(total.values()), list(reply.gradient.values()))
    return replace(first, gradient=total, buffers=reply.buffers)


@handles_sum(Gradient)
def fused_gradient(clients: Mapping[ClientId, Client], requests: Mapping[ClientId, Gradient]) -> Reply:
    """All clients' parts in one pass: the sums are the same, and BatchNorm sees the union batch as it is.

    Nine times as fast as a pass a client, with 100 clients and an MLP (``benchmarks/fast_paths.py``).
    """
    indices = np.concatenate([set_aside(client, requests[number].batch) for number, client in clients.items()])
    client = next(iter(clients.values()))
    context, request = client.context, requests[client.number]
    model, params = context.once(_standing_model)
    model.share(request.weights.params, request.weights.buffers)
    with _seeded(context, request):
        return summed_gradient(context, model, params, request, indices)


def _seeded(context: ClientContext, request: Gradient, client: ClientId = SERVER) -> AbstractContextManager[None]:
    """Layers that draw numbers draw those of their batch, and of their client where each computes its own part.

    Where none draws, nothing is seeded: that takes a tenth of a small batch's time.
    """
    if not context.config.random:
        return nullcontext()
    return torch_seeded(context.config.seed, f"layers/{request.batch}", request.round, client)


def _standing_model(context: ClientContext) -> tuple[Model, Params]:
    """A model of its own that stays loaded in training mode, because a batch comes after a batch."""
    model = context.config.model.clone()
    return model, model.load_for_good(train=True)


def summed_gradient(
    shared: ClientContext, model: Model, params: Params, request: Gradient, indices: Ints
) -> GradientReply:
    """The gradient of the summed loss over some samples, at what the model has loaded."""
    where = torch.from_numpy(indices)
    batch = Batch(shared.data.inputs(where), shared.data.y_train[where])
    chain = shared.once(manual_sgd_of) if is_plain(shared.objective, "loss") else None
    if chain is not None:
        mean, parts = chain.gradient(params, batch.x, batch.y)
        torch._foreach_mul_(parts, len(indices))
        return GradientReply(dict(zip(params, parts, strict=True)), len(indices), mean.item() * len(indices), {})
    context = Context(request.weights.params, torch.zeros(shared.config.classes), {}, None, shared.config.training.lr)
    loss = shared.objective.loss(model, params, batch, context) * len(indices)
    found = torch.autograd.grad(loss, list(params.values()), allow_unused=True, materialize_grads=True)
    gradient = dict(zip(params, found, strict=True))
    return GradientReply(gradient, len(indices), loss.item(), model.current_buffers())
