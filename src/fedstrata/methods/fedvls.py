"""The method FedVLS (Guo et al. 2025)."""

from __future__ import annotations

from pydantic import NonNegativeFloat
from typing_extensions import override

from fedstrata.methods.recipe import Parts, Recipe
from fedstrata.objectives.fedvls import Vacant


class FedVLS(Recipe):
    """FedAvg with balanced softmax, distillation for classes that a client lacks, and suppression of wrong logits."""

    paper = "Guo et al. 2025, Exploring Vacant Classes in Label-Skewed Federated Learning (AAAI)"

    distillation: NonNegativeFloat = 1.0
    suppression: NonNegativeFloat = 0.005

    @override
    def parts(self) -> Parts:
        return {"objective": Vacant(distillation=self.distillation, suppression=self.suppression)}
