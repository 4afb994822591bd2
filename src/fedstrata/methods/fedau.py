"""The method FedAU (Wang and Ji 2024)."""

from __future__ import annotations

from pydantic import PositiveInt
from typing_extensions import override

from fedstrata.aggregation.memory import Intervals
from fedstrata.methods.recipe import Parts, Recipe


class FedAU(Recipe):
    """FedAvg that multiplies each client's update by the mean number of rounds between the client's replies.

    Thus, clients that are often absent have the same influence as other clients. See the aggregator ``fedau``.

    Args:
        cutoff: Maximum interval K between two replies of a client, in rounds. A longer absence is divided into several
            intervals.
    """

    paper = "Wang and Ji 2024, Tackling Unknown Participation Statistics in Federated Averaging (arXiv:2306.03401)"

    cutoff: PositiveInt = 50

    @override
    def parts(self) -> Parts:
        return {"aggregator": Intervals(cutoff=self.cutoff)}
