"""The method Ditto (Li et al. 2021)."""

from __future__ import annotations

from pydantic import NonNegativeFloat
from typing_extensions import override

from fedstrata.methods.recipe import Parts, Recipe
from fedstrata.objectives.personal import PersonalModel


class Ditto(Recipe):
    """FedAvg in which each client also trains a personal model that is pulled towards the global model.

    To evaluate the personal models, set ``evaluation.fine_tune = 0``. The global model is the same as in FedAvg.
    """

    paper = "Li, Hu, Beirami and Smith 2021, Ditto: Fair and Robust Federated Learning Through Personalization (ICML)"

    strength: NonNegativeFloat = 0.1

    @override
    def parts(self) -> Parts:
        return {"objective": PersonalModel(strength=self.strength)}
