"""FedAU (Wang and Ji 2024)."""

from __future__ import annotations

from pydantic import PositiveInt
from typing_extensions import override

from fedstrata.aggregation.memory import Intervals
from fedstrata.methods.recipe import Parts, Recipe


class FedAU(Recipe):
    """FedAvg that weights each client's update by the mean number of rounds between the client's replies.

    The new model is w ← w_t + (1/N) Σ_{k∈S} ω_k Δ_k. The set of clients that replied is S, the update of client k is
    Δ_k, and the number of all clients is N. The weight ω_k estimates 1 / p_k from the rounds so far, where p_k is the
    unknown probability that client k replies. With these weights, clients that are often absent have the same influence
    as other clients.

    Args:
        cutoff: Longest interval between two replies of a client, in rounds (K). A longer absence counts as several
            intervals.
    """

    paper = "Wang and Ji 2024, Tackling Unknown Participation Statistics in Federated Averaging (arXiv:2306.03401)"

    cutoff: PositiveInt = 50

    @override
    def parts(self) -> Parts:
        return {"aggregator": Intervals(cutoff=self.cutoff)}
