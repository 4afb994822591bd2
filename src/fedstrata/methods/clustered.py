"""The method ``clustered``: FedAvg with clustered sampling (Fraboni et al. 2021)."""

from __future__ import annotations

from pydantic import Field
from typing_extensions import override

from fedstrata.methods.recipe import Parts, Recipe
from fedstrata.sampling.clustered import Algorithm, Clustered


class ClusteredSampling(Recipe):
    """FedAvg with clustered sampling, which is unbiased and draws one client from each group of similar clients."""

    paper = "Fraboni et al. 2021, Clustered Sampling (ICML)"

    algorithm: Algorithm = 2
    coordinates: int = Field(default=2048, ge=0)

    @override
    def parts(self) -> Parts:
        return {"client_sampler": Clustered(algorithm=self.algorithm, coordinates=self.coordinates)}
