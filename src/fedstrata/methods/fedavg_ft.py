"""FedAvg-FT: the server re-trains the head on a small balanced set (ReBaFL §3.3)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedstrata.federation.allowed import Agreed, Allowed
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.methods.base import Recipe, RecipeState
from fedstrata.methods.head_tuning import HeadTuning


class FedAvgFT(Recipe, HeadTuning):
    """FedAvg whose aggregated head is trained on server data before clients receive it: an upper bound.

    A partition that assigns every sample to a client is refused, because the server then has no samples.
    """

    paper = "Xu et al. (ReBaFL §3.3): FedAvg with server-side fine-tuning, an upper-bound reference"

    def check(self, config: FederationConfig) -> None:
        """Require samples at the server."""
        super().check(config)
        self.require_samples(config, "method")

    def allowed(self, agreed: Agreed) -> list[Allowed] | None:
        """Return the recipe's requests; the head is trained at the server and needs none."""
        return super().allowed(agreed)

    def run_round(self, federation: Federation, state: RecipeState) -> tuple[RecipeState, dict[str, Any]]:
        """Run a recipe's round, then train the head."""
        state, metrics = super().run_round(federation, state)
        if not metrics["clients_trained"]:
            return state, metrics
        weights, loss = self.tuned(federation.config, state.weights)
        return replace(state, weights=weights), {**metrics, "server_loss": loss}
