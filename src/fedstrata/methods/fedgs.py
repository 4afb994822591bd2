"""The method FedGS (Wang et al. 2023)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat
from typing_extensions import override

from fedstrata.methods.recipe import Parts, Recipe
from fedstrata.sampling.graph import Graph


class FedGS(Recipe):
    """FedAvg with clients that are chosen to differ in their labels. Over time, all clients are invited equally often.

    The clients of a round are far apart in a graph of label similarity, and were rarely invited before. A larger
    ``alpha`` gives the distances more weight relative to earlier invitations (arXiv:2211.13975).
    """

    paper = "Wang et al. 2023, FedGS: Federated Graph-based Sampling with Arbitrary Client Availability (AAAI)"

    alpha: NonNegativeFloat = 0.1
    epsilon: Annotated[float, Field(ge=0, lt=1)] = 0.01
    sigma: PositiveFloat = 0.1

    @override
    def parts(self) -> Parts:
        return {"client_sampler": Graph(alpha=self.alpha, epsilon=self.epsilon, sigma=self.sigma)}
