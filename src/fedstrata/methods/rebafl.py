"""ReBaFL (Xu et al.): re-balanced local training, stable when labels are skewed and clients drop out."""

from __future__ import annotations

from fedstrata.methods.base import Recipe, setting_of
from fedstrata.objectives.rebafl import Rebalanced


class ReBaFL(Recipe):
    """Algorithm 1: FedAvg whose clients train with relaxed balanced softmax and augmented features.

    With μ = 0 it is relaxed balanced softmax alone (R-BSM), without ``relaxed`` the augmentation alone (F-Aug).
    """

    paper = "Xu et al., Stabilizing and Improving FL with Non-IID Data and Client Dropout"

    objective = Rebalanced()
    epsilon: float = setting_of("objective")
    mu: float = setting_of("objective")
    transfer: float = setting_of("objective")
    relaxed: bool = setting_of("objective")
    keep_prototypes: bool = setting_of("objective")
