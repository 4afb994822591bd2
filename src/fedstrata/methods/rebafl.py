"""ReBaFL (Xu et al.): re-balanced local training, stable when labels are skewed and clients drop out."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, NonNegativeFloat

from fedstrata.methods.base import Recipe
from fedstrata.objectives.base import Objective
from fedstrata.objectives.rebafl import Rebalanced


class ReBaFL(Recipe):
    """Algorithm 1: FedAvg whose clients train with relaxed balanced softmax and augmented features.

    Args:
        epsilon: ε, how far the client's class prior is moved towards the uniform one.
        mu: μ, the weight of the augmented loss; 0 for relaxed balanced softmax alone (R-BSM). The text has 0.1, the
            authors' own runs 0.5 (with ``training.momentum = 0.5``).
        transfer: λ, how much of a sample's deviation from its prototype goes over to another class.
        relaxed: False for plain softmax: with μ > 0 the augmentation alone (F-Aug), with μ = 0 FedAvg.
        keep_prototypes: Whether clients remember what they sent last, for the leakage audit.
    """

    paper: ClassVar[str] = "Xu et al., Stabilizing and Improving FL with Non-IID Data and Client Dropout"

    epsilon: float = Field(default=0.01, ge=0, le=1)
    mu: NonNegativeFloat = 0.1
    transfer: NonNegativeFloat = 1.0
    relaxed: bool = True
    keep_prototypes: bool = True

    def default_objective(self) -> Objective:
        """Both losses of Eq. 16."""
        return Rebalanced(
            epsilon=self.epsilon,
            mu=self.mu,
            transfer=self.transfer,
            relaxed=self.relaxed,
            keep_prototypes=self.keep_prototypes,
        )
