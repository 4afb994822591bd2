"""BSM-FedAvg: balanced softmax in FedAvg (Chen and Chao 2022; ReBaFL §3)."""

from __future__ import annotations

from typing_extensions import override

from fedstrata.methods.base import Parts, Recipe
from fedstrata.objectives.calibrated import Balanced


class BSMFedAvg(Recipe):
    """FedAvg with balanced softmax under each client's own class shares; missing classes have prior 0."""

    paper = "Chen and Chao 2022, On Bridging Generic and Personalized FL (ICLR)"

    @override
    def parts(self) -> Parts:
        return {"objective": Balanced()}
