"""FedDyn (Acar et al. 2021)."""

from __future__ import annotations

from fedstrata.aggregation.base import Mean
from fedstrata.methods.base import Recipe, setting_of
from fedstrata.objectives.feddyn import Dynamic


class FedDyn(Recipe):
    """Uniform clients whose objective is regularised dynamically; the plain mean of their models, less h/α."""

    paper = "Acar et al. 2021, Federated Learning Based on Dynamic Regularization (ICLR)"

    objective = Dynamic()
    alpha: float = setting_of("objective")
    aggregator = Mean()
