"""FedBABU's two local objectives (Oh, Kim and Yun 2022), which train only the body or only the head."""

from __future__ import annotations

from fedstrata.base.errors import SpecError
from fedstrata.federation.engine import FederationConfig
from fedstrata.models.model import Model
from fedstrata.objectives.base import CrossEntropy


class BodyOnly(CrossEntropy):
    """Cross-entropy. Clients train only the body (the layers before the head). The head keeps its initial values.

    Clients also send the unchanged head, whose bytes are included in the reported communication.
    """

    single_samples = True

    def check(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` if the model consists only of a head."""
        if config.model.head_names.issuperset(config.model.params()):
            problem = "the model has only a head, but the objective trains all other layers. Use a deeper model."
            raise SpecError("model", problem, config.model.head_name)

    def trains(self, name: str, model: Model) -> bool:
        """Return True for parameters outside the head."""
        return name not in model.head_names


class HeadOnly(CrossEntropy):
    """Cross-entropy. Clients train only the head, to adapt the global model to their data."""

    def trains(self, name: str, model: Model) -> bool:
        """Return True for parameters of the head."""
        return name in model.head_names
