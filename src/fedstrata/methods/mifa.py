"""The method MIFA (Gu et al. 2021)."""

from __future__ import annotations

from typing_extensions import override

from fedstrata.aggregation.memory import LastUpdates
from fedstrata.methods.recipe import Parts, Recipe


class MIFA(Recipe):
    """FedAvg that replaces the missing update of an absent client with the client's last update.

    The new model is w ← w_t + (1/N) Σ_k y_k over all N clients, where y_k is the last update that client k sent. The
    stored updates take as much memory as N models.
    """

    paper = "Gu et al. 2021, Fast Federated Learning in the Presence of Arbitrary Device Unavailability (NeurIPS)"

    @override
    def parts(self) -> Parts:
        return {"aggregator": LastUpdates()}
