"""The client's part of Stratify's batch mode: samples set aside by label, and the gradient of their summed loss."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import numpy as np
import torch
from numpy.typing import NDArray

from fedstrata.clients.client import Client, World, answers, answers_fused
from fedstrata.federation.messages import ClientId, Gradient, GradientReply, Reply, Reserve, ReserveReply
from fedstrata.nn.batchnorm import federated
from fedstrata.nn.model import Model
from fedstrata.objectives.base import Batch, Context
from fedstrata.records import record
from fedstrata.rng import torch_seeded

Ints = NDArray[np.int64]
STATE = "stratify"


@record
class Pool:
    """One label's samples, drawn without replacement.

    Args:
        order: Their places among the client's own, shuffled.
        used: How many are gone.
        refills: How often the pool began anew this epoch.
    """

    order: Ints
    used: int
    refills: int


@record
class Reserved:
    """What a client remembers in an epoch.

    Args:
        round: The epoch.
        pools: By label.
        batches: The batch of every sample set aside, ascending.
        places: Where that sample is among the client's own.
    """

    round: int
    pools: dict[int, Pool]
    batches: Ints
    places: Ints


def _pool(client: Client, round: int, label: int, refills: int) -> Pool:
    order = np.flatnonzero(client.labels == label)
    return Pool(client.rng(f"pool/{label}/{refills}", round).permutation(order), 0, refills)


@answers(Reserve)
def reserve(client: Client, request: Reserve) -> ReserveReply:
    """Set one sample aside for every position as long as the label's pool lasts."""
    before = client.state.get(STATE)
    empty = np.empty(0, dtype=np.int64)
    if request.fresh or before is None or before.round != request.round:
        before = Reserved(request.round, {}, empty, empty)
    pools: dict[int, Pool] = dict(before.pools)
    batches, labels = request.batches.numpy(), request.labels.numpy()
    for label in request.refill.tolist():
        pools[label] = _pool(client, request.round, label, pools[label].refills + 1 if label in pools else 0)
    places = np.full(len(labels), -1, dtype=np.int64)
    exhausted = []
    for label in np.unique(labels).tolist():
        pool = pools.get(label) or _pool(client, request.round, label, 0)
        positions = np.flatnonzero(labels == label)
        taken = pool.order[pool.used : pool.used + len(positions)]
        places[positions[: len(taken)]] = taken
        pools[label] = Pool(pool.order, pool.used + len(taken), pool.refills)
        if pools[label].used == len(pool.order):
            exhausted.append(label)
    served = places >= 0
    all_batches = np.concatenate([before.batches, batches[served]])
    all_places = np.concatenate([before.places, places[served]])
    order = np.argsort(all_batches, kind="stable")
    client.state[STATE] = Reserved(request.round, pools, all_batches[order], all_places[order])
    return ReserveReply(torch.from_numpy(~served), torch.tensor(exhausted, dtype=torch.int64))


def set_aside(client: Client, batch: int) -> Ints:
    """The data set's indices that the client keeps for a batch."""
    state = client.state[STATE]
    begin, end = np.searchsorted(state.batches, [batch, batch + 1])
    indices: Ints = client.indices[state.places[begin:end]]
    return indices


@answers(Gradient)
def gradient(client: Client, request: Gradient) -> GradientReply:
    """The client's part of a batch; BatchNorm's statistics are those of all parts together."""
    indices = set_aside(client, request.batch)
    group = client.group
    with nullcontext() if group is None else federated(client.model.module, group):
        return summed_gradient(client.world, client.model, request, indices)


@answers_fused(Gradient)
def fused_gradient(clients: Mapping[ClientId, Client], requests: Mapping[ClientId, Gradient]) -> Reply:
    """All clients' parts in one pass: the sums are the same, and BatchNorm sees the union batch as it is."""
    indices = np.concatenate([set_aside(client, requests[number].batch) for number, client in clients.items()])
    client = next(iter(clients.values()))
    return summed_gradient(client.world, client.model, requests[client.number], indices)


def summed_gradient(world: World, model: Model, request: Gradient, indices: Ints) -> GradientReply:
    """The gradient of the summed loss over some samples."""
    where = torch.from_numpy(indices)
    batch = Batch(world.data.inputs(where), world.data.y_train[where])
    weights = request.weights
    context = Context(weights.params, torch.zeros(world.job.classes), {}, None, world.job.training.lr)
    with (
        torch_seeded(world.job.seed, f"layers/{request.batch}", request.round),
        model.loaded(weights.params, weights.buffers, train=True) as params,
    ):
        loss = world.objective.loss(model, params, batch, context) * len(indices)
        found = torch.autograd.grad(loss, list(params.values()), allow_unused=True, materialize_grads=True)
        gradients = dict(zip(params, found, strict=True))
        return GradientReply(gradients, len(indices), float(loss.detach()), model.current_buffers())
