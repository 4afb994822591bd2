"""The method FedNova (Wang et al. 2020)."""

from __future__ import annotations

from typing_extensions import override

from fedstrata.aggregation.scaled import Normalised
from fedstrata.methods.recipe import Parts, Recipe


class FedNova(Recipe):
    """A variant of FedAvg that divides each client's update by the client's number of steps.

    In FedAvg, clients that take more steps pull the model further towards their own minimum. See the aggregator
    ``fednova``.
    """

    paper = "Wang et al. 2020, Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization"

    @override
    def parts(self) -> Parts:
        return {"aggregator": Normalised()}
