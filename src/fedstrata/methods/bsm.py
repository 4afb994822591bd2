"""BSM-FedAvg: balanced softmax in FedAvg (Chen and Chao 2022; ReBaFL §3)."""

from __future__ import annotations

from typing import ClassVar

from fedstrata.methods.base import Recipe
from fedstrata.objectives.base import Objective
from fedstrata.objectives.calibrated import Balanced


class BSMFedAvg(Recipe):
    """FedAvg with balanced softmax under each client's own class shares; missing classes have prior 0."""

    paper: ClassVar[str] = "Chen and Chao 2022, On Bridging Generic and Personalized FL (ICLR)"

    def default_objective(self) -> Objective:
        """Balanced softmax."""
        return Balanced()
