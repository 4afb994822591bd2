"""The method FedAWE (Xiang et al. 2024)."""

from __future__ import annotations

from pydantic import PositiveFloat
from typing_extensions import override

from fedstrata.aggregation.memory import Echoes
from fedstrata.methods.recipe import Parts, Recipe


class FedAWE(Recipe):
    """FedAvg, but each client starts from the result of the round of its last reply. Updates after absences weigh more.

    Client k starts at x_k, the global model after the last round in which client k replied. The server stores the
    models x_k. The mean of the models x_k of all clients is evaluated and saved. See the aggregator ``fedawe``.

    Args:
        clip: Maximum norm of the mean update. A longer mean update is scaled down to this norm.
        memory_gb: Maximum memory for stored models (at most one per client), in GB.
    """

    paper = (
        "Xiang et al. 2024, Efficient Federated Learning against Heterogeneous and Non-stationary Client "
        "Unavailability (NeurIPS)"
    )

    clip: PositiveFloat = 0.5
    memory_gb: PositiveFloat = 4.0

    @override
    def parts(self) -> Parts:
        return {"aggregator": Echoes(clip=self.clip, memory_gb=self.memory_gb)}
