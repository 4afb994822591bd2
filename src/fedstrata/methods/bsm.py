"""BSM-FedAvg: balanced softmax in FedAvg (Chen and Chao 2022; ReBaFL §3)."""

from __future__ import annotations

from typing_extensions import override

from fedstrata.methods.recipe import Parts, Recipe
from fedstrata.objectives.calibrated import Balanced


class BSMFedAvg(Recipe):
    """FedAvg with balanced softmax, where the prior of a class is its share of the client's samples."""

    paper = "Chen and Chao 2022, On Bridging Generic and Personalized FL (ICLR)"

    @override
    def parts(self) -> Parts:
        return {"objective": Balanced()}
