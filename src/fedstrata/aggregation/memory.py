"""Aggregate with values that the server stores for each client, for federations whose clients are often absent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from pydantic import PositiveFloat, PositiveInt
from typing_extensions import override

from fedstrata.aggregation.base import Aggregator, squared_norm, weighted_update
from fedstrata.base.arrays import Floats, Ints
from fedstrata.base.errors import SpecError
from fedstrata.base.records import Tree
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import FitReply, Params, Weights
from fedstrata.sampling.base import ClientSampler, Selection


class Remembering(Aggregator):
    """Base class of aggregators that store values for each client. Subclasses override ``init`` and ``combine``."""

    needs_replies = "stores values of individual clients"

    @override
    def coefficients(self, selection: Selection, returned: Ints, samples: Ints) -> Floats:
        """Always raise an error, because the averaging weights cannot be computed without the state.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot compute averaging weights without its state. Call combine() instead."
        )


class Intervals(Remembering):
    """The sum of the updates, each weighted by the mean number of rounds between the client's replies (FedAU).

    With N clients, the weight of client k is ω_k / N. The number ω_k is an estimate of 1 / p_k, where p_k is the
    probability that client k replies in a round. The sum (1/N) Σ_k ω_k Δ_k of the updates Δ_k therefore estimates the
    mean update of all N clients. An interval between replies ends when the client replies, or after ``cutoff`` rounds.
    The estimate ω_k is the mean length of the intervals that ended before the current round. Before the first interval
    ends, ω_k = 1. A client that was not invited counts as absent.

    Args:
        cutoff: Maximum interval K between two replies of a client, in rounds. A smaller K lowers the weights of clients
            that rarely reply, and thus adds bias.
    """

    cutoff: PositiveInt = 50

    @override
    def init(self, config: FederationConfig) -> Tree:
        nothing = np.zeros(config.clients, dtype=np.int64)
        return {"server": None, "waited": nothing, "rounds": nothing, "intervals": nothing}

    @override
    def combine(
        self, weights: Weights, state: Tree, selection: Selection, replies: Mapping[int, FitReply]
    ) -> tuple[Weights, Tree]:
        clients = np.fromiter(replies, dtype=np.int64)
        rounds, intervals, server = state["rounds"], state["intervals"], state["server"]
        omega = np.where(intervals > 0, rounds / np.maximum(intervals, 1), 1.0)
        if replies:
            answers, a = list(replies.values()), omega[clients] / len(omega)
            update = weighted_update(weights.params, [reply.weights.params for reply in answers], a)
            weights, server = self.step(weights, update, server, selection, answers, a)
        waited = state["waited"] + 1
        ended = waited >= self.cutoff
        ended[clients] = True
        return weights, {
            "server": server,
            "waited": np.where(ended, 0, waited),
            "rounds": rounds + np.where(ended, waited, 0),
            "intervals": intervals + ended,
        }


class LastUpdates(Remembering):
    """The mean of the most recent updates of all clients, including absent clients (MIFA).

    The new model is w ← w_t + (1/N) Σ_k y_k. Here, y_k is the last update that client k sent, or zero before its first
    reply. If the clients' learning rate changes, stored updates are not rescaled. The model also changes in rounds in
    which no client replies. BatchNorm's buffers are averaged over the replies of the round.

    Args:
        memory_gb: Maximum memory for stored updates (one per client), in GB.
    """

    memory_gb: PositiveFloat = 4.0

    @override
    def check(self, config: FederationConfig, sampler: ClientSampler) -> None:
        require_memory(config, config.clients, self.memory_gb, f"the last updates of {config.clients:,} clients")

    @override
    def init(self, config: FederationConfig) -> Tree:
        return {"server": None, "clients": config.clients, "updates": {}}

    @override
    def combine(
        self, weights: Weights, state: Tree, selection: Selection, replies: Mapping[int, FitReply]
    ) -> tuple[Weights, Tree]:
        updates, server, answers = state["updates"] | updates_of(weights, replies), state["server"], [*replies.values()]
        if updates:
            update = mean_update(weights.params, updates, state["clients"])
            weights, server = self.step(weights, update, server, selection, answers, np.ones(len(answers)))
        return weights, {**state, "server": server, "updates": updates}


class VarianceReduced(LastUpdates):
    """The mean of the stored updates of all clients, corrected with the new updates of the round (FedVARP).

    The new model is w ← w_t + (1/N) Σ_j y_j + (1/r) Σ_{k∈S} (Δ_k − y_k). S is the set of the r clients that replied in
    this round, and Δ_k is the new update of client k. The value y_k is the client's last update from an earlier round,
    or zero before its first reply. If all clients reply with the same probability, the terms after w_t are an unbiased
    estimate of the mean update of all clients. A round without a reply does not change the model. BatchNorm's buffers
    are averaged over the replies of the round.

    Args:
        memory_gb: Maximum memory for stored updates (one per client), in GB.
    """

    @override
    def combine(
        self, weights: Weights, state: Tree, selection: Selection, replies: Mapping[int, FitReply]
    ) -> tuple[Weights, Tree]:
        if not replies:
            return weights, state
        draws = selection.draws[np.searchsorted(selection.clients, np.fromiter(replies, dtype=np.int64))]
        old, new = state["updates"], updates_of(weights, replies)
        a, answers = draws / draws.sum(), [*replies.values()]
        update = mean_update(weights.params, old, state["clients"])
        for client, factor in zip(replies, a.tolist(), strict=True):
            for name, total in update.items():
                total.add_(new[client][name], alpha=factor)
                if client in old:
                    total.sub_(old[client][name], alpha=factor)
        weights, server = self.step(weights, update, state["server"], selection, answers, a)
        return weights, {**state, "server": server, "updates": old | new}


def updates_of(weights: Weights, replies: Mapping[int, FitReply]) -> dict[int, Params]:
    """Return the update w_k − w_t of each client that replied."""
    return {
        client: {name: reply.weights.params[name] - w for name, w in weights.params.items()}
        for client, reply in replies.items()
    }


def mean_update(params: Params, updates: Mapping[int, Params], clients: int) -> Params:
    """Return the mean update (1/N) Σ_k y_k of each parameter, where y_k is zero for clients without an update.

    Args:
        params: The parameters, which determine the names and shapes of the result.
        updates: A mapping from clients to updates.
        clients: The number N of all clients.
    """
    total = {name: torch.zeros_like(w) for name, w in params.items()}
    for client in sorted(updates):
        torch._foreach_add_([*total.values()], [updates[client][name] for name in total], alpha=1 / clients)
    return total


class Echoes(Remembering):
    """The mean of the clients' updated models; updates after absences have more weight (FedAWE).

    In round t, the new model is the mean of x_k + (t − τ_k) Δ_k over the clients that reply. The previous reply of
    client k was in round τ_k, and x_k is the global model after round τ_k. Before the client's first reply, x_k is the
    initial model, and τ_k = 0. The client's update of x_k is Δ_k. Two mechanisms correct for absences. First, an update
    is multiplied by the number of rounds since the client's previous reply ("adaptive innovation echoing"). Second, the
    average of the models x_k spreads the updates equally among all clients ("implicit gossiping"). A client that was
    not invited counts as absent, and a round without a reply does not change the model. The server optimiser
    (``server``) applies the mean of (t − τ_k) Δ_k to the mean of x_k. BatchNorm's buffers are averaged over the replies
    of the round. As in the authors' program, the mean of all clients' models x_k is evaluated and saved.

    In the paper, the server sends x_k to the client at the end of round τ_k, and the client stores x_k. In this
    implementation, the server stores these models and sends x_k at the beginning of round t. Thus, clients do not need
    a state, and all messages have the same size.

    Args:
        clip: Maximum norm of the mean update. The published algorithm does not limit the norm.
        memory_gb: Maximum memory for stored models (at most one per client), in GB.
    """

    own_starts = True

    clip: PositiveFloat = 0.5
    memory_gb: PositiveFloat = 4.0

    @override
    def check(self, config: FederationConfig, sampler: ClientSampler) -> None:
        models = min(config.clients, config.training.rounds)
        require_memory(config, models, self.memory_gb, f"the {models:,} models that the server may have to store")

    @override
    def init(self, config: FederationConfig) -> Tree:
        return {"server": None, "round": 0, "newest": 0, "last": np.zeros(config.clients, dtype=np.int64), "models": {}}

    @override
    def starts(self, weights: Weights, state: Tree, clients: Sequence[int]) -> dict[int, Weights]:
        return {client: state["models"].get(int(state["last"][client]), weights) for client in clients}

    @override
    def combine(
        self, weights: Weights, state: Tree, selection: Selection, replies: Mapping[int, FitReply]
    ) -> tuple[Weights, Tree]:
        t, newest, last, server = state["round"] + 1, state["newest"], state["last"], state["server"]
        models: dict[int, Weights] = state["models"]
        if replies:
            clients = np.fromiter(replies, dtype=np.int64)
            draws = selection.draws[np.searchsorted(selection.clients, clients)]
            a, answers = draws / draws.sum(), list(replies.values())
            starts = list(self.starts(weights, state, clients.tolist()).values())
            base = weighted_update(weights.params, [start.params for start in starts], a)
            base = {name: w + base[name] for name, w in weights.params.items()}
            update = {name: torch.zeros_like(w) for name, w in base.items()}
            for start, reply, factor in zip(starts, answers, (a * (t - last[clients])).tolist(), strict=True):
                for name, total in update.items():
                    total.add_(reply.weights.params[name] - start.params[name], alpha=factor)
            length = math.sqrt(squared_norm(update))
            if length > self.clip:
                update = {name: total * (self.clip / length) for name, total in update.items()}
            # Store the model of round ``newest`` now, and not when this method returned it, because a recipe may have
            # changed the model since then.
            models, last = {**models, newest: weights}, last.copy()
            last[clients], newest = t, t
            models = {round: model for round, model in models.items() if round in last}
            weights, server = self.step(Weights(base, weights.buffers), update, server, selection, answers, a)
        return weights, {"server": server, "round": t, "newest": newest, "last": last, "models": models}

    @override
    def evaluated(self, weights: Weights, state: Tree) -> Weights:
        """Return the mean of the models x_k of all clients, with the buffers of the global model."""
        rounds, counts = np.unique(state["last"], return_counts=True)
        models = [state["models"].get(int(round), weights).params for round in rounds]
        mean = weighted_update(weights.params, models, counts / counts.sum())
        return Weights({name: w + mean[name] for name, w in weights.params.items()}, weights.buffers)


def require_memory(config: FederationConfig, models: int, limit: float, what: str) -> None:
    """Raise an error if an aggregator's stored tensors could exceed its setting ``memory_gb``.

    Args:
        config: The federation's settings.
        models: The maximum number of stored models or updates.
        limit: The value of ``memory_gb``.
        what: A description of the stored tensors, for the error message.

    Raises:
        SpecError: The tensors could need more than ``limit`` GB.
    """
    needed = models * sum(w.numel() * w.element_size() for w in config.model.params().values()) / 1e9
    if needed > limit:
        problem = f"{what} need up to {needed:.3g} GB. Increase memory_gb, or use the aggregator 'fedau'."
        raise SpecError("method.aggregator.memory_gb", problem, limit)
