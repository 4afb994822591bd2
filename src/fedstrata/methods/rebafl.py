"""ReBaFL (Xu et al.): re-balanced local training, for skewed labels and clients that drop out."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat
from typing_extensions import override

from fedstrata.methods.recipe import Parts, Recipe
from fedstrata.objectives.rebafl import Rebalanced


class ReBaFL(Recipe):
    """FedAvg whose clients train with relaxed balanced softmax and augmented features (Algorithm 1).

    The paper has two ablations: only relaxed balanced softmax (R-BSM, ``mu = 0``), and only the augmentation (F-Aug,
    ``relaxed = false``).
    """

    later_settings = ("prototype_momentum",)
    paper = "Xu et al., Stabilizing and Improving FL with Non-IID Data and Client Dropout"

    epsilon: float = Field(default=0.01, ge=0, le=1)
    mu: NonNegativeFloat = 0.1
    transfer: NonNegativeFloat = 1.0
    relaxed: bool = True
    keep_prototypes: bool = True
    prototype_momentum: float = Field(default=0.0, ge=0, lt=1)

    @override
    def parts(self) -> Parts:
        objective = Rebalanced(
            epsilon=self.epsilon,
            mu=self.mu,
            transfer=self.transfer,
            relaxed=self.relaxed,
            keep_prototypes=self.keep_prototypes,
            prototype_momentum=self.prototype_momentum,
        )
        return {"objective": objective}
