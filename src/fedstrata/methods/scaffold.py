"""The method SCAFFOLD (Karimireddy et al. 2020)."""

from __future__ import annotations

from typing_extensions import override

from fedstrata.aggregation.base import Mean
from fedstrata.methods.recipe import Parts, Recipe
from fedstrata.objectives.scaffold import Scaffold


class SCAFFOLD(Recipe):
    """FedAvg with control variates, which correct each local step. The server averages models with equal weights.

    The control variate c_k is an estimate of the gradient of client k, and c is an estimate for the whole federation.
    The client adds c − c_k to each gradient, so that its steps follow the federation's gradient.
    """

    paper = "Karimireddy et al. 2020, SCAFFOLD: Stochastic Controlled Averaging (ICML)"

    @override
    def parts(self) -> Parts:
        # The plain mean corresponds to Algorithm 1, line 16: x ← x + (η_g / |S|) Σ Δy.
        return {"objective": Scaffold(), "aggregator": Mean()}
