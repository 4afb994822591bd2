"""Clustered sampling (Fraboni et al. 2021)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fedstrata.methods.base import Recipe
from fedstrata.sampling.base import ClientSampler
from fedstrata.sampling.clustered import Clustered


class ClusteredSampling(Recipe):
    """FedAvg whose draws come from one distribution of similar clients each; unbiased.

    Args:
        algorithm: 1 groups clients by size, 2 by their last updates.
        coordinates: The length of the sketch that is kept of a client's update; 0 for the whole update.
    """

    paper: ClassVar[str] = "Fraboni et al. 2021, Clustered Sampling (ICML)"

    algorithm: Literal[1, 2] = 2
    coordinates: int = Field(default=2048, ge=0)

    def default_client_sampler(self) -> ClientSampler:
        """One client from each of m distributions."""
        return Clustered(algorithm=self.algorithm, coordinates=self.coordinates)
