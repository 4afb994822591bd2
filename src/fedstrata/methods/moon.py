"""MOON (Li, He and Song 2021)."""

from __future__ import annotations

from fedstrata.methods.base import Recipe, setting_of
from fedstrata.objectives.moon import Contrastive


class MOON(Recipe):
    """FedAvg whose clients stay near the global model's features and leave their own last ones."""

    paper = "Li, He and Song 2021, Model-Contrastive Federated Learning (CVPR)"

    objective = Contrastive()
    mu: float = setting_of("objective")
    temperature: float = setting_of("objective")
