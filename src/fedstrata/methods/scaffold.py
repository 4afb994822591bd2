"""SCAFFOLD (Karimireddy et al. 2020)."""

from __future__ import annotations

from fedstrata.aggregation.base import Mean
from fedstrata.methods.base import Recipe
from fedstrata.objectives.scaffold import Scaffold


class SCAFFOLD(Recipe):
    """Uniform clients whose steps are corrected by control variates; the plain mean of their models."""

    paper = "Karimireddy et al. 2020, SCAFFOLD: Stochastic Controlled Averaging (ICML)"

    objective = Scaffold()
    # Algorithm 1, line 16: x ← x + (η_g / |S|) Σ Δy.
    aggregator = Mean()
