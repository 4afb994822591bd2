"""MOON (Li, He and Song 2021)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import NonNegativeFloat, PositiveFloat

from fedstrata.methods.base import Recipe
from fedstrata.objectives.base import Objective
from fedstrata.objectives.moon import Contrastive


class MOON(Recipe):
    """FedAvg whose clients stay near the global model's features and leave their own last ones.

    Args:
        mu: μ, the weight of the contrastive loss; 0 is FedAvg.
        temperature: τ.
    """

    paper: ClassVar[str] = "Li, He and Song 2021, Model-Contrastive Federated Learning (CVPR)"

    mu: NonNegativeFloat = 1.0
    temperature: PositiveFloat = 0.5

    def default_objective(self) -> Objective:
        """Cross-entropy with the contrastive loss."""
        return Contrastive(mu=self.mu, temperature=self.temperature)
