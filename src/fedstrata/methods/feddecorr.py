"""The method FedDecorr (Shi et al. 2023)."""

from __future__ import annotations

from pydantic import NonNegativeFloat
from typing_extensions import override

from fedstrata.methods.recipe import Parts, Recipe
from fedstrata.objectives.feddecorr import Decorrelated


class FedDecorr(Recipe):
    """FedAvg with a loss that reduces the correlation of features. Label skew increases this correlation."""

    paper = "Shi et al. 2023, Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous FL (ICLR)"

    beta: NonNegativeFloat = 0.1

    @override
    def parts(self) -> Parts:
        return {"objective": Decorrelated(beta=self.beta)}
