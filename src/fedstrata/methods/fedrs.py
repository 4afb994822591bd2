"""FedRS (Li and Zhan 2021)."""

from __future__ import annotations

from fedstrata.methods.base import Recipe, setting_of
from fedstrata.objectives.calibrated import Restricted


class FedRS(Recipe):
    """FedAvg with restricted softmax: logits of classes that a client lacks count for less in its training."""

    paper = "Li and Zhan 2021, FedRS: Federated Learning with Restricted Softmax (KDD)"

    objective = Restricted()
    alpha: float = setting_of("objective")
