"""MOON (Li, He and Song 2021)."""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveFloat
from typing_extensions import override

from fedstrata.methods.base import Parts, Recipe
from fedstrata.objectives.moon import Contrastive


class MOON(Recipe):
    """FedAvg whose loss keeps features close to those of the global model, and apart from those of the last model."""

    paper = "Li, He and Song 2021, Model-Contrastive Federated Learning (CVPR)"

    mu: NonNegativeFloat = 1.0
    temperature: PositiveFloat = 0.5

    @override
    def parts(self) -> Parts:
        return {"objective": Contrastive(mu=self.mu, temperature=self.temperature)}
