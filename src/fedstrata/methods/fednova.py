"""FedNova (Wang et al. 2020)."""

from __future__ import annotations

from typing_extensions import override

from fedstrata.aggregation.scaled import Normalised
from fedstrata.methods.recipe import Parts, Recipe


class FedNova(Recipe):
    """FedAvg that divides each client's update by its number of steps, because clients may differ in this number.

    The new model is w ← w_t + τ_eff Σ_k p_k Δ_k / τ_k. The update of client k is Δ_k, its number of steps is τ_k, and
    its share of the samples is p_k. The factor τ_eff is Σ_k p_k τ_k. In FedAvg, clients that take more steps pull the
    model further towards their own minimum. With ``training.momentum``, the weights of the gradients in Δ_k replace
    τ_k.
    """

    paper = "Wang et al. 2020, Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization"

    @override
    def parts(self) -> Parts:
        return {"aggregator": Normalised()}
