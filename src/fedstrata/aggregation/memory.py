"""Aggregators that remember the clients of earlier rounds, for clients that are often absent."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from pydantic import PositiveInt
from typing_extensions import override

from fedstrata.aggregation.base import Aggregator, weighted_update
from fedstrata.base.arrays import Floats, Ints
from fedstrata.base.records import Tree
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import FitReply, Weights
from fedstrata.sampling.base import Selection


class Remembering(Aggregator):
    """Base class of aggregators whose state describes each client; they override ``init`` and ``combine``."""

    @override
    def coefficients(self, selection: Selection, returned: Ints, samples: Ints) -> Floats:
        """Raise an error, because the weights depend on earlier rounds.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(f"{type(self).__name__} has no weights without a state. Call combine.")


class Intervals(Remembering):
    """Weights a_k = ω_k / N, where ω_k is the mean number of rounds between two replies of client k (FedAU).

    ω_k estimates 1 / p_k, where p_k is the probability that client k replies in a round. Σ_k a_k Δ_k is then an
    estimate of the mean update of all N clients. An interval ends in the round in which the client replies, or when it
    has lasted ``cutoff`` rounds. ω_k is the mean of the intervals that ended before the current round, and 1 if there
    is none. A client that was not invited counts as absent.

    Args:
        cutoff: The longest interval K, in rounds. A smaller K limits the weight of clients that reply rarely, but then
            ω_k underestimates 1 / p_k.
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
