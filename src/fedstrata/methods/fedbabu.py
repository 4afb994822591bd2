"""FedBABU (Oh, Kim and Yun 2022)."""

from __future__ import annotations

from typing import ClassVar

from fedstrata.methods.base import Recipe
from fedstrata.objectives.base import Objective
from fedstrata.objectives.fedbabu import BodyOnly


class FedBABU(Recipe):
    """FedAvg of the body; the head keeps its initial values, and the global model is evaluated with it."""

    paper: ClassVar[str] = "Oh, Kim and Yun 2022, FedBABU: Toward Enhanced Representation (ICLR)"

    def default_objective(self) -> Objective:
        """Cross-entropy that trains the body."""
        return BodyOnly()
