"""FedAvg-FT: the server re-trains the head on a small balanced set (ReBaFL §3.3)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.federation.questions import Agreed, Questions
from fedstrata.methods.base import Recipe, RecipeState
from fedstrata.methods.head_tuning import HeadTuning


class FedAvgFT(Recipe, HeadTuning):
    """FedAvg whose aggregated head is trained on server data before anybody sees it: a reference, no rival.

    A partition that gives every sample to a client leaves the server none, and is refused.
    """

    paper = "Xu et al. (ReBaFL §3.3): FedAvg with server-side fine-tuning, an upper-bound reference"

    def check(self, config: FederationConfig) -> None:
        """There must be samples for the server."""
        super().check(config)
        self.require_samples(config, "method")

    def questions(self, agreed: Agreed) -> Questions | None:
        """No more than the recipe asks: the head is trained at the server."""
        return super().questions(agreed)

    def run_round(self, federation: Federation, state: RecipeState) -> tuple[RecipeState, dict[str, Any]]:
        """A recipe's round, then the head."""
        state, metrics = super().run_round(federation, state)
        if not metrics["clients_trained"]:
            return state, metrics
        weights, loss = self.tuned(federation.config, state.weights)
        return replace(state, weights=weights), {**metrics, "server_loss": loss}
