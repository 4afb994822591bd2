"""FedBABU's local objectives (Oh, Kim and Yun 2022): the body alone is trained, and for oneself the head."""

from __future__ import annotations

from fedstrata.base.errors import SpecError
from fedstrata.federation.engine import FederationConfig
from fedstrata.models.model import Model
from fedstrata.objectives.base import CrossEntropy


class BodyOnly(CrossEntropy):
    """Cross-entropy whose steps leave the head as it was initialised.

    The head still travels, and its bytes count, although nobody changes it.
    """

    def check(self, config: FederationConfig) -> None:
        """There must be something before the head."""
        if config.model.head_names.issuperset(config.model.params()):
            raise SpecError(
                "model", "is nothing but a head; FedBABU trains what stands before it", config.model.head_name
            )

    def trains(self, name: str, model: Model) -> bool:
        """Everything but the head."""
        return name not in model.head_names


class HeadOnly(CrossEntropy):
    """Cross-entropy whose steps move the head alone: how a client makes the body its own."""

    def trains(self, name: str, model: Model) -> bool:
        """Only the head."""
        return name in model.head_names
