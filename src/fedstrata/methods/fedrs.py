"""The method FedRS (Li and Zhan 2021)."""

from __future__ import annotations

from pydantic import Field
from typing_extensions import override

from fedstrata.methods.recipe import Parts, Recipe
from fedstrata.objectives.calibrated import Restricted


class FedRS(Recipe):
    """FedAvg with restricted softmax: in training, logits of classes that the client lacks are multiplied by α."""

    paper = "Li and Zhan 2021, FedRS: Federated Learning with Restricted Softmax (KDD)"

    alpha: float = Field(default=0.5, ge=0, le=1)

    @override
    def parts(self) -> Parts:
        return {"objective": Restricted(alpha=self.alpha)}
