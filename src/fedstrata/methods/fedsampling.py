"""FedSampling (Qi et al. 2023)."""

from __future__ import annotations

from fedstrata.methods.base import Recipe, setting_of
from fedstrata.sampling.fedsampling import Everyone, FedSamplingData


class FedSampling(Recipe):
    """Everybody trains on a few samples, kept with one probability everywhere; updates weighted by what was kept."""

    paper = "Qi et al. 2023, FedSampling: A Better Sampling Strategy for FL (IJCAI)"

    client_sampler = Everyone()
    data_sampler = FedSamplingData()
    samples: int = setting_of("data_sampler")
    epsilon: float | None = setting_of("data_sampler")
    bound: int = setting_of("data_sampler")
    reuse: bool = setting_of("data_sampler")
