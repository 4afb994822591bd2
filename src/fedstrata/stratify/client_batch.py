"""Run Stratify's batch mode on a client: reserve samples of each label, and compute gradients.

A *placeholder* is a number that stands for a label. A client's *part* of a batch consists of the samples that the
client reserved for this batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from fedstrata.base.arrays import Ints
from fedstrata.base.errors import FedstrataError
from fedstrata.base.inputs import joined, split
from fedstrata.base.records import record
from fedstrata.base.rng import SERVER, torch_seeded
from fedstrata.clients.client import Client, ClientContext
from fedstrata.clients.handling import handles, handles_sum
from fedstrata.clients.training.augmenting import augmented
from fedstrata.clients.training.local import manual_sgd_of
from fedstrata.clients.training.sgd import ManualSGD
from fedstrata.federation.messages import ClientId, Params, Reply
from fedstrata.models.batchnorm import federated
from fedstrata.models.model import Model
from fedstrata.objectives.base import Batch, Context, is_plain
from fedstrata.stratify.messages import (
    ALL,
    GatheredReply,
    Gradient,
    GradientReply,
    GradientSteps,
    LabelWeightedGradient,
    Reserve,
    ReserveReply,
    Steps,
    WeightedGradientReply,
)

Q = TypeVar("Q", bound=Gradient)
_NONE: Ints = np.empty(0, dtype=np.int64)
STATE, PLACEHOLDERS = "stratify", "placeholders"
"""Two keys in a client's state: for its samples (used, unused and reserved), and for its placeholders.

A placeholder is a number that stands for a label. The state maps each placeholder to its label.
"""


@record("Pool")
class Pool:
    """A client's samples of one label, which are drawn in random order without replacement.

    Args:
        order: Shuffled indices into the client's samples.
        used: The number of used samples. They are the first entries of ``order``.
        refills: How often all samples were shuffled and marked as unused again in this epoch.
    """

    order: Ints
    used: int
    refills: int


@record("Reserved")
class Reserved:
    """The samples that a client has reserved for the batches of an epoch, and all samples of the client.

    Args:
        round: The epoch, counted from 1.
        pools: A mapping from each placeholder (a number that stands for a label) to the samples of the label.
        batches: For each reserved sample, the index of its batch, in ascending order of the indices, shape (n,).
        places: The index of every reserved sample among the client's samples, shape (n,).
    """

    round: int
    pools: dict[int, Pool]
    batches: Ints
    places: Ints

    @cached_property
    def _bounds(self) -> tuple[dict[int, int], dict[int, int]]:
        """Two mappings from each batch's index: one to the start, and one to the end of its samples in ``places``.

        The values are numbers and not pairs. This saves time, because Python's garbage collector skips dicts of
        numbers.
        """
        batches, begins = np.unique(self.batches, return_index=True)
        numbers, first = batches.tolist(), begins.tolist()
        return dict(zip(numbers, first, strict=True)), dict(zip(numbers, [*first[1:], len(self.batches)], strict=True))

    def part(self, batch: int) -> Ints:
        """Return the samples that are reserved for a batch, as indices into the client's samples (possibly none)."""
        begins, ends = self._bounds
        return self.places[begins.get(batch, 0) : ends.get(batch, 0)]


def opened(
    client: Client, pools: Mapping[int, Pool], request: Reserve | Steps, placeholders: Iterable[int]
) -> dict[int, Pool]:
    """Return a client's pools for a request: shuffled samples of each label, and the number of used samples.

    A pool belongs to a *placeholder*, a number that stands for a label. If the request refills a pool, all samples of
    the pool are unused again. A placeholder without a pool gets a new pool. The pool is empty if the client does not
    know the placeholder, or has fewer than ``privacy.min_samples`` samples of the label. The order of a pool depends on
    the label and not on the placeholder, so that training is the same with and without masking.

    Args:
        client: The client.
        pools: A mapping from each placeholder to its pool, before the request.
        request: The request, which specifies the pools to refill, and the range (``window``) of samples that may be
            used.
        placeholders: The placeholders for which the request needs samples.

    Raises:
        FedstrataError: The request refills more pools than there are classes. Such a request could exhaust the memory.
    """
    if len(request.refill) > client.context.config.strata:
        raise FedstrataError("the request contains more labels than there are classes")
    result = dict(pools)
    known: Mapping[int, int] | None = client.state.get(PLACEHOLDERS)
    labels: Ints | None = None
    new = {p: pools[p].refills + 1 if p in pools else 0 for p in request.refill.tolist()}
    new |= {p: 0 for p in placeholders if p not in pools and p not in new}
    for placeholder, refills in new.items():
        label = placeholder if known is None else known.get(placeholder)
        labels = client.labels if labels is None else labels
        order = np.flatnonzero(labels == label) if label is not None else _NONE
        if len(order) < client.context.privacy.min_samples:
            order = _NONE
        if request.window != ALL:
            # The samples of each label arrive in an order that is drawn once for the whole run.
            arriving = client.rng(f"arrival/{label}", 0).permutation(order)
            # Add a small number, because a floating-point product may fall below the exact integer: 0.29 · 100 < 29.
            first, last = (int(part * len(order) + 1e-9) for part in request.window)
            order = np.sort(arriving[first:last])
        order = client.rng(f"pool/{label}/{refills}", request.round).permutation(order)
        result[placeholder] = Pool(order, 0, refills)
    return result


@handles(Reserve)
def reserve(client: Client, request: Reserve) -> ReserveReply:
    """Reserve one sample for each label in the request's list, as long as there are unused samples of the label."""
    before = client.state.get(STATE)
    if request.fresh or not isinstance(before, Reserved) or before.round != request.round:
        before = Reserved(request.round, {}, _NONE, _NONE)
    batches, wanted = request.batches.numpy(), request.labels.numpy()
    if len(batches) != len(wanted) or bool((np.diff(batches) < 0).any()):
        raise FedstrataError("the request must have one batch index per label, in ascending order of the indices")
    served, held = np.zeros((2, len(wanted)), dtype=bool)
    asked = sorted(set(wanted.tolist()))
    if len(asked) > client.context.config.strata:
        raise FedstrataError("the request contains more distinct placeholders than there are classes")
    pools = opened(client, before.pools, request, asked)
    for p in asked:
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
    if gathers:
        return GatheredReply(missing, empty, torch.from_numpy(batches), torch.from_numpy(held))
    return ReserveReply(missing, empty)


def gathered(batches: Ints, before: Ints, least: int) -> Ints:
    """Move a client's new samples to other batches, so that the client has enough samples in each of its batches.

    The client's samples of one batch are called a *part*. A part that is too small is merged with the client's next
    parts or, at the end, with the previous part. Samples that were reserved earlier stay in their batches. No sample is
    moved to a batch before ``batches[0]``.

    Args:
        batches: The batch index of each new sample, in ascending order, shape (n,).
        before: The batch indices of the samples that were reserved earlier, in ascending order. Each batch
            index that occurs in ``before`` occurs at least ``least`` times.
        least: The minimum number of samples in a part.

    Returns:
        The batch to which each new sample is moved, shape (n,). The value is −1 if no part can be large enough.

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


def reserved(clients: Sequence[Client], request: Gradient) -> Batch:
    """Return the augmented samples that clients reserved for a batch, in the order of the clients.

    Raises:
        WithheldError: A client reserved fewer samples than ``privacy.min_samples``.
    """
    context = clients[0].context
    parts = [client.indices[client.state[STATE].part(request.batch)] for client in clients]
    for client, part in zip(clients, parts, strict=True):
        client.authorize_release(len(part))
    where = torch.from_numpy(np.concatenate(parts))
    x = context.data.inputs(where)
    if context.config.augment is not None:
        pieces = zip(clients, split(x, [len(part) for part in parts]), strict=True)
        at = {"round": request.round, "step": request.batch}
        x = joined([augmented(context, piece, client=client.number, **at) for client, piece in pieces])
    return Batch(x, context.data.y_train[where])


@handles(Gradient)
def gradient(client: Client, request: Gradient) -> GradientReply:
    """Compute the gradient over a client's samples in a batch. BatchNorm uses the statistics of the whole batch."""
    return _part(client, request, summed_gradient)


@handles(GradientSteps)
def gradient_steps(client: Client, request: GradientSteps) -> GradientReply:
    """Take several SGD steps on a client's samples in a batch, and return the sum of the gradients of these steps."""
    return _part(client, request, stepped)


@handles(LabelWeightedGradient)
def label_weighted_gradient(client: Client, request: LabelWeightedGradient) -> GradientReply:
    """Compute the gradient over a client's samples in a batch. The weight of a sample's loss depends on its label.

    Raises:
        FedstrataError: ``privacy.min_samples`` is more than 1.
    """
    return _part(client, request, partial(summed_gradient, factors=_factors([client], request)))


def _factors(clients: Sequence[Client], request: LabelWeightedGradient) -> Tensor:
    """Return the weight of each sample of ``reserved(clients, request)``."""
    if any(client.context.privacy.min_samples > 1 for client in clients):
        raise FedstrataError(
            "with label weights, a gradient could be based on fewer samples than privacy.min_samples. Use "
            "method.label_weights = false."
        )
    factors = []
    for client in clients:
        by_label = torch.ones(client.context.config.strata)
        for placeholder, label in client.state[PLACEHOLDERS].items():
            by_label[label] = request.factors[placeholder]
        factors.append(by_label[torch.from_numpy(client.labels[client.state[STATE].part(request.batch)])])
    return torch.cat(factors)


def _part(
    client: Client, request: Q, compute: Callable[[ClientContext, Model, Params, Q, Batch], GradientReply]
) -> GradientReply:
    batch = reserved([client], request)
    weights, model, group = request.weights, client.model, client.group
    with (
        nullcontext() if group is None else federated(model.module, group),
        model.loaded(weights.params, weights.buffers, train=True) as params,
        _seeded(client.context, request, client.number),
    ):
        return compute(client.context, model, params, request, batch)


def stepped(
    context: ClientContext, model: Model, params: Params, request: GradientSteps, batch: Batch
) -> GradientReply:
    """Take several SGD steps on the client's own samples, and return the sum of the gradients of these steps.

    With n samples and the gradient g of their summed loss, a step is w ← w − (η / n) g. A step of the server with the
    same η then gives the mean of the clients' models, each weighted by the client's number of samples.
    """
    first = reply = summed_gradient(context, model, params, request, batch)
    total = {name: gradient.clone() for name, gradient in first.gradient.items()}
    rate = request.lr / max(first.size, 1)
    for _ in range(request.steps - 1):
        with torch.no_grad():
            torch._foreach_add_(list(params.values()), list(reply.gradient.values()), alpha=-rate)
        reply = summed_gradient(context, model, params, request, batch)
        torch._foreach_add_(list(total.values()), list(reply.gradient.values()))
    return replace(first, gradient=total, buffers=reply.buffers)


@handles_sum(Gradient)
def fused_gradient(clients: Mapping[ClientId, Client], requests: Mapping[ClientId, Gradient]) -> Reply:
    """Compute the sum of all clients' gradients in one pass over the whole batch, if the clients share a process.

    The sum is the same as with one pass per client, and BatchNorm sees the whole batch. For 100 clients and an MLP,
    this function is nine times as fast as one pass per client (``benchmarks/fast_paths.py``).
    """
    first = next(iter(clients.values()))
    context, request = first.context, requests[first.number]
    batch = reserved(list(clients.values()), request)
    model, params = context.cached(_loaded_model)
    model.share(request.weights.params, request.weights.buffers)
    factors = _factors(list(clients.values()), request) if isinstance(request, LabelWeightedGradient) else None
    with _seeded(context, request):
        return summed_gradient(context, model, params, request, batch, factors)


@handles_sum(LabelWeightedGradient)
def fused_label_weighted_gradient(
    clients: Mapping[ClientId, Client], requests: Mapping[ClientId, LabelWeightedGradient]
) -> Reply:
    """Compute the sum of the clients' label-weighted gradients in one pass; see ``fused_gradient``."""
    return fused_gradient(clients, requests)


def _seeded(context: ClientContext, request: Gradient, client: ClientId = SERVER) -> AbstractContextManager[None]:
    """Seed the random numbers of layers such as dropout layers. The seed depends on the batch and on ``client``.

    ``client`` is the server's id if the whole batch is computed in one pass. The seed is set only if a layer of the
    model draws random numbers, because seeding takes a tenth of the time of a small batch.
    """
    if not context.config.random:
        return nullcontext()
    return torch_seeded(context.config.seed, f"layers/{request.batch}", request.round, client)


def _loaded_model(context: ClientContext) -> tuple[Model, Params]:
    """Return a copy of the model in training mode, and its parameters, which stay loaded for all batches."""
    model = context.config.model.clone()
    return model, model.load_for_good(train=True)


def _chain(context: ClientContext) -> ManualSGD | None:
    """Return the model as a chain of layers with handwritten gradients; None if autograd computes the gradients."""
    return manual_sgd_of(context) if is_plain(context.objective, "loss") else None


def summed_gradient(
    shared: ClientContext,
    model: Model,
    params: Params,
    request: Gradient,
    batch: Batch,
    factors: Tensor | None = None,
) -> GradientReply:
    """Return the gradient of the summed loss of a batch with respect to the loaded parameters.

    Args:
        shared: The context that the clients share.
        model: The model.
        params: The loaded parameters.
        request: The request.
        batch: The samples.
        factors: The factor by which the loss of each sample is multiplied, shape (B,); None if all factors are 1.
    """
    task, size = shared.config.task, len(batch.y)
    chain = shared.cached(_chain) if factors is None else None
    if chain is not None:
        mean, gradients = chain.gradient(params, batch)
        torch._foreach_mul_(gradients, size)
        return GradientReply(dict(zip(params, gradients, strict=True)), size, mean.item() * size, {})
    counts, lr = torch.zeros(shared.config.strata), shared.config.training.lr
    context = Context(request.weights.params, counts, {}, None, lr, task=task)
    weight = float(task.weights(batch.y).sum())
    if factors is None:
        loss = shared.objective.loss(model, params, batch, context) * weight
    else:
        losses, _ = task.losses(model(params, batch.x), batch.y)
        loss = (losses * factors.to(losses)).sum()
    parts = torch.autograd.grad(loss, list(params.values()), allow_unused=True, materialize_grads=True)
    gradient = dict(zip(params, parts, strict=True))
    reply = GradientReply(gradient, size, loss.item(), model.current_buffers())
    return WeightedGradientReply(**vars(reply), weight=weight) if task.weighted else reply
