"""FedSampling (Qi et al. 2023)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, PositiveFloat, PositiveInt

from fedstrata.methods.base import Recipe
from fedstrata.sampling.base import ClientSampler, DataSampler
from fedstrata.sampling.fedsampling import Everyone, FedSamplingData


class FedSampling(Recipe):
    """Everybody trains on a few samples, kept with one probability everywhere; updates weighted by what was kept.

    Args:
        samples: K, samples wanted in a round over all clients.
        epsilon: ε of local differential privacy for the clients' sizes; none by default.
        bound: M, the public bound on a client's size under privacy.
        reuse: Ask each client for its size once instead of every round.
    """

    paper: ClassVar[str] = "Qi et al. 2023, FedSampling: A Better Sampling Strategy for FL (IJCAI)"

    samples: PositiveInt = 1000
    epsilon: PositiveFloat | None = None
    bound: int = Field(default=100, gt=1)
    reuse: bool = True

    def default_client_sampler(self) -> ClientSampler:
        """Everybody."""
        return Everyone()

    def default_data_sampler(self) -> DataSampler:
        """A sample of the data of all clients together."""
        return FedSamplingData(samples=self.samples, epsilon=self.epsilon, bound=self.bound, reuse=self.reuse)
