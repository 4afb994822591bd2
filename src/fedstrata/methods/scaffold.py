"""SCAFFOLD (Karimireddy et al. 2020)."""

from __future__ import annotations

from typing_extensions import override

from fedstrata.aggregation.base import Mean
from fedstrata.methods.base import Parts, Recipe
from fedstrata.objectives.scaffold import Scaffold


class SCAFFOLD(Recipe):
    """Uniform clients whose steps are corrected by control variates; the plain mean of their models."""

    paper = "Karimireddy et al. 2020, SCAFFOLD: Stochastic Controlled Averaging (ICML)"

    @override
    def parts(self) -> Parts:
        # Algorithm 1, line 16: x ← x + (η_g / |S|) Σ Δy.
        return {"objective": Scaffold(), "aggregator": Mean()}
