"""Clustered sampling (Fraboni et al. 2021)."""

from __future__ import annotations

from fedstrata.methods.base import Recipe, setting_of
from fedstrata.sampling.clustered import Algorithm, Clustered


class ClusteredSampling(Recipe):
    """FedAvg whose draws come from one distribution of similar clients each; unbiased."""

    paper = "Fraboni et al. 2021, Clustered Sampling (ICML)"

    client_sampler = Clustered()
    algorithm: Algorithm = setting_of("client_sampler")
    coordinates: int = setting_of("client_sampler")
