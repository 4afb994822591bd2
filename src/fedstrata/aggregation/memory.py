"""Aggregators that store values of each client between rounds, because some clients are often absent."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from pydantic import PositiveFloat, PositiveInt
from typing_extensions import override

from fedstrata.aggregation.base import Aggregator, weighted_update
from fedstrata.base.arrays import Floats, Ints
from fedstrata.base.errors import SpecError
from fedstrata.base.records import Tree
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import FitReply, Params, Weights
from fedstrata.sampling.base import ClientSampler, Selection


class Remembering(Aggregator):
    """Base class of aggregators that store values of each client; subclasses override ``init`` and ``combine``."""

    @override
    def coefficients(self, selection: Selection, returned: Ints, samples: Ints) -> Floats:
        """Raise an error, because the weights depend on the state.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(f"{type(self).__name__} has no weights without a state. Call combine.")


class Intervals(Remembering):
    """Weights a_k = ω_k / N, where ω_k is the mean number of rounds between two replies of client k (FedAU).

    ω_k estimates 1 / p_k, where p_k is the probability that client k replies in a round. With the update Δ_k of client
    k, the sum Σ_k a_k Δ_k is then an estimate of the mean update of all N clients. An interval ends when the client
    replies, or when the interval has lasted ``cutoff`` rounds. ω_k is the mean length of the intervals that ended
    before the current round. Before the first interval ends, ω_k is 1. A client that was not invited counts as absent.

    Args:
        cutoff: Longest interval between two replies, in rounds (K). A smaller value limits the weight of clients that
            reply rarely, but makes ω_k underestimate 1 / p_k.
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
    """The mean of the last updates of all N clients (MIFA): w ← w_t + (1/N) Σ_k y_k.

    y_k is the last update that client k sent. Before the client's first reply, y_k is zero. Stored updates are not
    rescaled if the clients' learning rate changes. The model also changes in rounds in which no client replies.
    BatchNorm's buffers are averaged over the replies of the round.

    Args:
        memory_gb: Largest memory for the stored updates of all clients, in GB. The updates take the bytes of N models,
            on the server and in each checkpoint.
    """

    memory_gb: PositiveFloat = 4.0

    @override
    def check(self, config: FederationConfig, sampler: ClientSampler) -> None:
        needed = config.clients * sum(w.numel() * w.element_size() for w in config.model.params().values()) / 1e9
        if needed > self.memory_gb:
            problem = (
                f"the last updates of {config.clients:,} clients take up to {needed:.1f} GB. Use a larger value, or"
            )
            raise SpecError("method.aggregator.memory_gb", f"{problem} the aggregator 'fedau'.", self.memory_gb)

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
    """The mean of the last updates of all N clients, corrected by the replies (FedVARP).

    The new model is w ← w_t + (1/N) Σ_j y_j + (1/r) Σ_{k∈S} (Δ_k − y_k). S are the r clients that replied in this
    round. Δ_k is the new update of client k. y_k is the last update that client k sent in an earlier round, or zero. If
    all clients reply with the same probability, the sum is an unbiased estimate of the mean update of all clients. A
    round without a reply does not change the model. BatchNorm's buffers are averaged over the replies of the round.

    Args:
        memory_gb: Largest memory for the stored updates of all clients, in GB. The updates take the bytes of N models,
            on the server and in each checkpoint.
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
    """Return the mean update (1/N) Σ_k y_k of each parameter. Clients without an update y_k count as zero.

    Args:
        params: The parameters. The result has the same names and shapes.
        updates: A mapping from clients to updates.
        clients: N, the number of all clients.
    """
    total = {name: torch.zeros_like(w) for name, w in params.items()}
    for client in sorted(updates):
        torch._foreach_add_([*total.values()], [updates[client][name] for name in total], alpha=1 / clients)
    return total
