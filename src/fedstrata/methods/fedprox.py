"""The method FedProx (Li et al. 2020)."""

from __future__ import annotations

from pydantic import NonNegativeFloat
from typing_extensions import override

from fedstrata.methods.recipe import Parts, Recipe
from fedstrata.objectives.fedprox import Proximal


class FedProx(Recipe):
    """FedAvg with a proximal term in the loss, which keeps each client's model near the global model.

    Client k minimises F_k(w) + (μ/2) ‖w − w_t‖², where F_k is its loss, w is its model, and w_t is the global model.
    """

    paper = "Li et al. 2020, Federated Optimization in Heterogeneous Networks (MLSys)"

    mu: NonNegativeFloat = 0.01

    @override
    def parts(self) -> Parts:
        return {"objective": Proximal(mu=self.mu)}
