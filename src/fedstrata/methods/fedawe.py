"""The method FedAWE (Xiang et al. 2024)."""

from __future__ import annotations

from pydantic import PositiveFloat
from typing_extensions import override

from fedstrata.aggregation.memory import Echoes
from fedstrata.methods.recipe import Parts, Recipe


class FedAWE(Recipe):
    """FedAvg in which a client resumes from the global model after its last reply, with larger updates after absences.

    Client k starts at x_k, the global model after the last round in which client k replied. The server stores the
    models x_k. The mean of the models x_k of all clients is evaluated and saved. See the aggregator ``fedawe``.

    Args:
        clip: Largest norm of the mean update. See the aggregator ``fedawe``.
        memory_gb: The largest memory for the models x_k, in GB. See the aggregator ``fedawe``.
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
