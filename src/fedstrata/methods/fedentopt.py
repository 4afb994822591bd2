"""The method FedEntOpt (Lutz et al. 2025)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from typing_extensions import override

from fedstrata.methods.recipe import Parts, Recipe
from fedstrata.sampling.entropy import Entropy


class FedEntOpt(Recipe):
    """FedAvg that invites clients whose combined labels are balanced.

    Clients are added one by one, such that the total label counts have the largest possible entropy (Algorithm 1 of
    arXiv:2411.01240).
    """

    paper = "Lutz et al. 2025, Optimizing Federated Learning by Entropy-Based Client Selection (arXiv:2411.01240)"

    buffer: Annotated[float, Field(ge=0, lt=1)] = 0.7

    @override
    def parts(self) -> Parts:
        return {"client_sampler": Entropy(buffer=self.buffer)}
