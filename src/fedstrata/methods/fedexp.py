"""The method FedExP (Jhunjhunwala et al. 2023)."""

from __future__ import annotations

from pydantic import PositiveFloat
from typing_extensions import override

from fedstrata.aggregation.scaled import Extrapolated
from fedstrata.methods.recipe import Parts, Recipe


class FedExP(Recipe):
    """FedAvg whose server takes longer steps if the clients' updates point in different directions.

    As in the paper, the average of the last two models is evaluated and saved, because models can oscillate. Training
    continues from the latest model. The aggregator ``fedexp`` defines the step.

    Args:
        eps: Constant ε in the denominator of the step length. This constant limits the step length if the mean update
            is near zero.
    """

    paper = "Jhunjhunwala et al. 2023, FedExP: Speeding Up Federated Averaging via Extrapolation (ICLR)"

    eps: PositiveFloat = 1e-3

    @override
    def parts(self) -> Parts:
        return {"aggregator": Extrapolated(eps=self.eps)}
