"""FedProx (Li et al. 2020)."""

from __future__ import annotations

from fedstrata.methods.base import Recipe, setting_of
from fedstrata.objectives.fedprox import Proximal


class FedProx(Recipe):
    """FedAvg whose clients are pulled back to the global model: F_k(w) + (μ/2) ‖w − w_t‖²."""

    paper = "Li et al. 2020, Federated Optimization in Heterogeneous Networks (MLSys)"

    objective = Proximal()
    mu: float = setting_of("objective")
