"""FedDyn (Acar et al. 2021)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveFloat

from fedstrata.aggregation.base import Aggregator, Mean
from fedstrata.methods.base import Recipe
from fedstrata.objectives.base import Objective
from fedstrata.objectives.feddyn import Dynamic


class FedDyn(Recipe):
    """Uniform clients whose objective is regularised dynamically; the plain mean of their models, less h/α.

    Args:
        alpha: α, the strength.
    """

    paper: ClassVar[str] = "Acar et al. 2021, Federated Learning Based on Dynamic Regularization (ICLR)"

    alpha: PositiveFloat = 0.01

    def default_objective(self) -> Objective:
        """Cross-entropy with the dynamic regulariser."""
        return Dynamic(alpha=self.alpha)

    def default_aggregator(self) -> Aggregator:
        """Algorithm 1: (1/|S|) Σ w_k."""
        return Mean()
