"""The method FedNTD (Lee et al. 2022)."""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveFloat
from typing_extensions import override

from fedstrata.methods.recipe import Parts, Recipe
from fedstrata.objectives.fedntd import NotTrue


class FedNTD(Recipe):
    """FedAvg with a loss that preserves the global model's predictions for all classes except the true class."""

    paper = (
        "Lee et al. 2022, Preservation of the Global Knowledge by Not-True Distillation in Federated Learning (NeurIPS)"
    )

    beta: NonNegativeFloat = 1.0
    temperature: PositiveFloat = 1.0

    @override
    def parts(self) -> Parts:
        return {"objective": NotTrue(beta=self.beta, temperature=self.temperature)}
