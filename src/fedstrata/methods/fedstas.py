"""FedSTS (Gao et al. 2024) and FedSTaS, which adds data-level sampling to it."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from fedstrata.aggregation.base import Aggregator, HorvitzThompson, StratumMean
from fedstrata.methods.base import Recipe
from fedstrata.sampling.base import ClientSampler, DataSampler
from fedstrata.sampling.ldp import FedSTaSData
from fedstrata.sampling.stratified import Stratified


class FedSTS(Recipe):
    """Clients in strata of compressed gradients, Neyman allocation, importance sampling.

    Args:
        strata: H.
        centres: d', different values in a compressed gradient.
        coordinates: K_desired, the length a gradient is projected to; 0 for its full length.
        refresh: Whose compressed gradient is renewed each round: ``all`` (up to 1,000 clients unless given) or the
            ``participants`` alone.
        gradients: Whether clients are ``asked`` for it (with ``all``), or ``updates`` of participants stand for it.
        aggregation: ``paper``, which importance sampling biases, or ``horvitz-thompson``, which is unbiased.
    """

    paper: ClassVar[str] = "Gao et al. 2024, FedSTS: A Stratified Client Selection Framework"

    strata: PositiveInt = 10
    centres: int = Field(default=9, ge=1, le=255)
    coordinates: int = Field(default=2048, ge=0)
    refresh: Literal["all", "participants"] | None = None
    gradients: Literal["asked", "updates"] | None = None
    aggregation: Literal["paper", "horvitz-thompson"] = "paper"

    def default_client_sampler(self) -> ClientSampler:
        """Strata; draws with replacement where the weights need them."""
        return Stratified(
            strata=self.strata,
            centres=self.centres,
            coordinates=self.coordinates,
            refresh=self.refresh,
            gradients=self.gradients,
            replacement=self.aggregation == "horvitz-thompson",
        )

    def default_aggregator(self) -> Aggregator:
        """The stratified mean, or its unbiased form."""
        return HorvitzThompson() if self.aggregation == "horvitz-thompson" else StratumMean()


class FedSTaS(FedSTS):
    """FedSTS with data-level sampling: the server requests a number of samples a round.

    Args:
        fraction: q, the part of the participants' data that is requested.
        samples: n*, a fixed number of samples a round instead.
        epsilon: ε of local differential privacy for the clients' sizes; none by default.
        bound: M, the public bound on a client's size under privacy.
    """

    paper: ClassVar[str] = "FedSTaS: Client Stratification and Client-Level Sampling for Efficient FL (2024)"

    fraction: float = Field(default=0.1, gt=0, le=1)
    samples: PositiveInt | None = None
    epsilon: PositiveFloat | None = None
    bound: int = Field(default=100, gt=1)

    def default_data_sampler(self) -> DataSampler:
        """A requested number of samples, privately where ε is given."""
        return FedSTaSData(fraction=self.fraction, samples=self.samples, epsilon=self.epsilon, bound=self.bound)
