"""The method MOON (Li, He and Song 2021)."""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveFloat
from typing_extensions import override

from fedstrata.methods.recipe import Parts, Recipe
from fedstrata.objectives.moon import Contrastive


class MOON(Recipe):
    """FedAvg with a contrastive loss on the features of a client's model.

    The loss pulls the features towards the features of the global model, and pushes them away from the features of the
    client's previous model.
    """

    paper = "Li, He and Song 2021, Model-Contrastive Federated Learning (CVPR)"

    mu: NonNegativeFloat = 1.0
    temperature: PositiveFloat = 0.5

    @override
    def parts(self) -> Parts:
        return {"objective": Contrastive(mu=self.mu, temperature=self.temperature)}
