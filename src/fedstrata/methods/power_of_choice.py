"""The method power-of-choice (Cho et al. 2020)."""

from __future__ import annotations

from pydantic import PositiveInt
from typing_extensions import override

from fedstrata.aggregation.base import Mean
from fedstrata.methods.recipe import Parts, Recipe
from fedstrata.sampling import power_of_choice


class PowerOfChoice(Recipe):
    """FedAvg that draws d candidate clients, and selects the m candidates with the largest losses.

    The trained models have equal weights in the average.
    """

    paper = "Cho et al. 2020, Client Selection in Federated Learning (arXiv:2010.01243)"

    candidates: PositiveInt | None = None

    @override
    def parts(self) -> Parts:
        # Models have equal weights, because candidates are drawn in proportion to their numbers of samples.
        return {"client_sampler": power_of_choice.PowerOfChoice(candidates=self.candidates), "aggregator": Mean()}
