"""FedSTS (Gao et al. 2024) and FedSTaS, which adds data-level sampling to it."""

from __future__ import annotations

from typing import Literal

from fedstrata.aggregation.base import HorvitzThompson, StratumMean
from fedstrata.base.config import Setting
from fedstrata.methods.base import Choice, Recipe, setting_of
from fedstrata.sampling.allocation import Allocation
from fedstrata.sampling.ldp import FedSTaSData
from fedstrata.sampling.stratified import Compared, Gradients, Refresh, Stratified


class FedSTS(Recipe):
    """Clients in strata of compressed gradients, Neyman allocation, importance sampling.

    Args:
        aggregation: ``paper``, which importance sampling biases, or ``horvitz-thompson``, which is unbiased and draws
            with replacement.
    """

    paper = "Gao et al. 2024, FedSTS: A Stratified Client Selection Framework"

    client_sampler = Stratified()
    strata: int = setting_of("client_sampler")
    centres: int = setting_of("client_sampler")
    coordinates: int = setting_of("client_sampler")
    refresh: Refresh | None = setting_of("client_sampler")
    gradients: Gradients | None = setting_of("client_sampler")
    compared: Compared = setting_of("client_sampler")
    allocation: Allocation | None = setting_of("client_sampler")

    aggregator = StratumMean()
    aggregation: Literal["paper", "horvitz-thompson"] = "paper"

    def own_choices(self) -> dict[Choice, Setting]:
        """With the sampler and the aggregator that go with ``aggregation``."""
        own = super().own_choices()
        if self.aggregation == "horvitz-thompson":
            own["client_sampler"] = own["client_sampler"].model_copy(update={"replacement": True})
            own["aggregator"] = HorvitzThompson()
        return own


class FedSTaS(FedSTS):
    """FedSTS with data-level sampling: the server requests a number of samples a round."""

    paper = "FedSTaS: Client Stratification and Client-Level Sampling for Efficient FL (2024)"

    data_sampler = FedSTaSData()
    fraction: float = setting_of("data_sampler")
    samples: int | None = setting_of("data_sampler")
    epsilon: float | None = setting_of("data_sampler")
    bound: int = setting_of("data_sampler")
