"""FedProx (Li et al. 2020)."""

from __future__ import annotations

from pydantic import NonNegativeFloat
from typing_extensions import override

from fedstrata.methods.base import Parts, Recipe
from fedstrata.objectives.fedprox import Proximal


class FedProx(Recipe):
    """FedAvg with the loss F_k(w) + (μ/2) ‖w − w_t‖², which keeps client k's model w near the global model w_t."""

    paper = "Li et al. 2020, Federated Optimization in Heterogeneous Networks (MLSys)"

    mu: NonNegativeFloat = 0.01

    @override
    def parts(self) -> Parts:
        return {"objective": Proximal(mu=self.mu)}
