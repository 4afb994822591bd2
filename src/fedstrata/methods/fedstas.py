"""FedSTS (Gao et al. 2024), and FedSTaS, a variant in which clients train on random subsets of their samples."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt
from typing_extensions import override

from fedstrata.aggregation.base import HorvitzThompson, StratumMean
from fedstrata.methods.recipe import Parts, Recipe
from fedstrata.sampling.allocation import Allocation
from fedstrata.sampling.client_sizes import Epsilon, Estimates, FedSTaSData
from fedstrata.sampling.stratified import Compared, Gradients, Refresh, Start, Stratified


class FedSTS(Recipe):
    """FedAvg with stratified client sampling: clients with similar compressed gradients form a stratum.

    Neyman allocation decides how many clients are drawn from each stratum. Within a stratum, clients with large
    gradients are drawn more often (importance sampling).

    Args:
        aggregation: How the clients' models are averaged. ``paper``: first within each stratum, then over strata
            (biased). ``horvitz-thompson``: clients are drawn with replacement, and the weights are unbiased.
            ``inclusion``: systematic draws, and weights that make the mean update unbiased.
    """

    paper = "Gao et al. 2024, FedSTS: A Stratified Client Selection Framework (IEEE TNNLS)"

    strata: PositiveInt = 10
    centres: int = Field(default=9, ge=0, le=255)
    coordinates: int = Field(default=2048, ge=0)
    refresh: Refresh | None = None
    gradients: Gradients | None = None
    compared: Compared = "restored"
    start: Start | None = None
    allocation: Allocation | None = None
    aggregation: Literal["paper", "horvitz-thompson", "inclusion"] = "paper"

    @override
    def parts(self) -> Parts:
        sampler = Stratified(
            strata=self.strata,
            centres=self.centres,
            coordinates=self.coordinates,
            refresh=self.refresh,
            gradients=self.gradients,
            compared=self.compared,
            start=self.start,
            allocation=self.allocation,
            replacement=self.aggregation == "horvitz-thompson",
            draws="systematic" if self.aggregation == "inclusion" else "sequential",
        )
        return {
            "client_sampler": sampler,
            "aggregator": StratumMean() if self.aggregation == "paper" else HorvitzThompson(),
        }


class FedSTaS(FedSTS):
    """FedSTS, except that each client trains on a random subset of its samples.

    All clients of a round use the same fraction of their samples. The server chooses the fraction so that the total
    number of samples used in training is similar in all rounds.
    """

    paper = "Slessor et al. 2024, FedSTaS: Client Stratification and Client Level Sampling for Efficient FL"

    fraction: float = Field(default=0.1, gt=0, le=1)
    samples: PositiveInt | None = None
    epsilon: Epsilon | None = None
    bound: int = Field(default=100, gt=1)
    share: float | None = Field(default=None, gt=0, le=1)
    estimates: Estimates | None = None
    reuse: bool | None = None

    @override
    def parts(self) -> Parts:
        data = FedSTaSData(
            fraction=self.fraction,
            samples=self.samples,
            epsilon=self.epsilon,
            bound=self.bound,
            share=self.share,
            estimates=self.estimates,
            reuse=self.reuse,
        )
        return {**super().parts(), "data_sampler": data}
