"""The method FedVARP (Jhunjhunwala et al. 2022)."""

from __future__ import annotations

from typing_extensions import override

from fedstrata.aggregation.memory import VarianceReduced
from fedstrata.methods.recipe import Parts, Recipe


class FedVARP(Recipe):
    """FedAvg that uses the last update of every client to reduce the variance from client sampling.

    The last updates of all N clients, which the server stores, take as much memory as N models. See the aggregator
    ``fedvarp``.
    """

    paper = "Jhunjhunwala et al. 2022, FedVARP: Tackling the Variance Due to Partial Client Participation (UAI)"

    @override
    def parts(self) -> Parts:
        return {"aggregator": VarianceReduced()}
