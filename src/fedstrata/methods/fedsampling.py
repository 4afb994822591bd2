"""The method FedSampling (Qi et al. 2023)."""

from __future__ import annotations

from pydantic import Field, PositiveInt
from typing_extensions import override

from fedstrata.methods.recipe import Parts, Recipe
from fedstrata.sampling.client_sizes import Epsilon
from fedstrata.sampling.fedsampling import Everyone, FedSamplingData


class FedSampling(Recipe):
    """FedAvg in which all clients take part. Each client trains on a uniformly drawn subset of its samples."""

    paper = "Qi et al. 2023, FedSampling: A Better Sampling Strategy for FL (IJCAI)"

    samples: PositiveInt = 1000
    epsilon: Epsilon | None = None
    bound: int = Field(default=100, gt=1)
    reuse: bool = True

    @override
    def parts(self) -> Parts:
        data = FedSamplingData(samples=self.samples, epsilon=self.epsilon, bound=self.bound, reuse=self.reuse)
        return {"client_sampler": Everyone(), "data_sampler": data}
