"""FedDyn (Acar et al. 2021)."""

from __future__ import annotations

from pydantic import PositiveFloat
from typing_extensions import override

from fedstrata.aggregation.base import Mean
from fedstrata.methods.base import Parts, Recipe
from fedstrata.objectives.feddyn import Dynamic


class FedDyn(Recipe):
    """Uniform clients with a dynamically regularised objective; the mean of their models, minus h/α."""

    paper = "Acar et al. 2021, Federated Learning Based on Dynamic Regularization (ICLR)"

    alpha: PositiveFloat = 0.01

    @override
    def parts(self) -> Parts:
        return {"objective": Dynamic(alpha=self.alpha), "aggregator": Mean()}
