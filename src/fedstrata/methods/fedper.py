"""The method FedPer (Arivazhagan et al. 2019)."""

from __future__ import annotations

from typing_extensions import override

from fedstrata.methods.recipe import Parts, Recipe
from fedstrata.objectives.personal import PersonalLayers


class FedPer(Recipe):
    """FedAvg that averages only the body (the layers before the head); each client trains and keeps its own head.

    To evaluate each client's own model, set ``evaluation.fine_tune = 0``. The global model keeps the initial head.
    """

    paper = "Arivazhagan et al. 2019, Federated Learning with Personalization Layers (arXiv:1912.00818)"

    layers: tuple[str, ...] | None = None

    @override
    def parts(self) -> Parts:
        return {"objective": PersonalLayers(layers=self.layers)}
