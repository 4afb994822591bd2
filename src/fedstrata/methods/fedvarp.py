"""FedVARP (Jhunjhunwala et al. 2022)."""

from __future__ import annotations

from typing_extensions import override

from fedstrata.aggregation.memory import VarianceReduced
from fedstrata.methods.recipe import Parts, Recipe


class FedVARP(Recipe):
    """FedAvg that uses the last update of every client to reduce the variance from client sampling.

    The new model is w ← w_t + (1/N) Σ_j y_j + (1/r) Σ_{k∈S} (Δ_k − y_k). The set S contains the r clients that replied.
    The new update of client k is Δ_k, and its last update from an earlier round is y_k. The server stores the last
    update of each of the N clients, which takes as much memory as N models.
    """

    paper = "Jhunjhunwala et al. 2022, FedVARP: Tackling the Variance Due to Partial Client Participation (UAI)"

    @override
    def parts(self) -> Parts:
        return {"aggregator": VarianceReduced()}
