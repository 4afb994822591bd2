"""FedBABU's local objective (Oh, Kim and Yun 2022): the body alone is trained."""

from __future__ import annotations

from fedstrata.nn.model import Model
from fedstrata.objectives.base import CrossEntropy


class BodyOnly(CrossEntropy):
    """Cross-entropy whose steps leave the head as it was initialised.

    The head still travels, and its bytes count, although nobody changes it.
    """

    def trains(self, name: str, model: Model) -> bool:
        """Everything but the head."""
        return name not in model.head_names
