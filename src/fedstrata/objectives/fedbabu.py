"""FedBABU's local objectives (Oh, Kim and Yun 2022): body only for training, head only for personalisation."""

from __future__ import annotations

from fedstrata.base.errors import SpecError
from fedstrata.federation.engine import FederationConfig
from fedstrata.models.model import Model
from fedstrata.objectives.base import CrossEntropy


class BodyOnly(CrossEntropy):
    """Cross-entropy whose steps leave the head as it was initialised.

    The head is still sent, and its bytes count, although clients do not change it.
    """

    def check(self, config: FederationConfig) -> None:
        """Require parameters outside the head."""
        if config.model.head_names.issuperset(config.model.params()):
            problem = "the model has only a head, and FedBABU trains the layers before it. Use a deeper model"
            raise SpecError("model", problem, config.model.head_name)

    def trains(self, name: str, model: Model) -> bool:
        """Return True for parameters outside the head."""
        return name not in model.head_names


class HeadOnly(CrossEntropy):
    """Cross-entropy whose steps change only the head, for personalisation."""

    def trains(self, name: str, model: Model) -> bool:
        """Return True for parameters of the head."""
        return name in model.head_names
