"""The method FedDyn (Acar et al. 2021)."""

from __future__ import annotations

from pydantic import PositiveFloat
from typing_extensions import override

from fedstrata.aggregation.base import Mean
from fedstrata.methods.recipe import Parts, Recipe
from fedstrata.objectives.feddyn import Dynamic


class FedDyn(Recipe):
    """FedAvg with a dynamic regulariser in the clients' loss, and a correction of the averaged model.

    To compute the new model, the server subtracts h/α from the mean of the clients' models. The server's state h is
    −α/N times the sum of the clients' updates up to the current round, where N is the number of clients.
    """

    paper = "Acar et al. 2021, Federated Learning Based on Dynamic Regularization (ICLR)"

    alpha: PositiveFloat = 0.01

    @override
    def parts(self) -> Parts:
        return {"objective": Dynamic(alpha=self.alpha), "aggregator": Mean()}
