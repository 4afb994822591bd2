"""FedRS (Li and Zhan 2021)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from fedstrata.methods.base import Recipe
from fedstrata.objectives.base import Objective
from fedstrata.objectives.calibrated import Restricted


class FedRS(Recipe):
    """FedAvg with restricted softmax: logits of classes that a client lacks count for less in its training.

    Args:
        alpha: α, what these logits are multiplied with; 1 is FedAvg.
    """

    paper: ClassVar[str] = "Li and Zhan 2021, FedRS: Federated Learning with Restricted Softmax (KDD)"

    alpha: float = Field(default=0.5, ge=0, le=1)

    def default_objective(self) -> Objective:
        """Restricted softmax."""
        return Restricted(alpha=self.alpha)
