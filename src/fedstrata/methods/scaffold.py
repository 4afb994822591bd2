"""SCAFFOLD (Karimireddy et al. 2020)."""

from __future__ import annotations

from typing import ClassVar

from fedstrata.aggregation.base import Aggregator, Mean
from fedstrata.methods.base import Recipe
from fedstrata.objectives.base import Objective
from fedstrata.objectives.scaffold import Scaffold


class SCAFFOLD(Recipe):
    """Uniform clients whose steps are corrected by control variates; the plain mean of their models."""

    paper: ClassVar[str] = "Karimireddy et al. 2020, SCAFFOLD: Stochastic Controlled Averaging (ICML)"

    def default_objective(self) -> Objective:
        """Cross-entropy with control variates."""
        return Scaffold()

    def default_aggregator(self) -> Aggregator:
        """Algorithm 1, line 16: x ← x + (η_g / |S|) Σ Δy."""
        return Mean()
