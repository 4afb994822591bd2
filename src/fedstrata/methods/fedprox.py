"""FedProx (Li et al. 2020)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import NonNegativeFloat

from fedstrata.methods.base import Recipe
from fedstrata.objectives.base import Objective
from fedstrata.objectives.fedprox import Proximal


class FedProx(Recipe):
    """FedAvg whose clients are pulled back to the global model: F_k(w) + (μ/2) ‖w − w_t‖².

    Args:
        mu: μ, the strength; 0 is FedAvg.
    """

    paper: ClassVar[str] = "Li et al. 2020, Federated Optimization in Heterogeneous Networks (MLSys)"

    mu: NonNegativeFloat = 0.01

    def default_objective(self) -> Objective:
        """Cross-entropy with the proximal term."""
        return Proximal(mu=self.mu)
