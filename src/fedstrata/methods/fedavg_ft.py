"""FedAvg-FT: after each round, the server trains the head on a small class-balanced data set (ReBaFL §3.3)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedstrata.federation.allowed import Agreed, Allowed
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.methods.head_tuning import HeadTuning
from fedstrata.methods.recipe import Recipe, RecipeState


class FedAvgFT(Recipe, HeadTuning):
    """FedAvg in which the server also trains the head on samples that no client has (an upper bound for other methods).

    The partition must leave enough unassigned samples of every class for the server.
    """

    needs_replies = ""
    paper = "Xu et al. (ReBaFL §3.3): FedAvg with server-side fine-tuning, an upper-bound reference"

    def check(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` if the server has too few samples of a class."""
        super().check(config)
        self.require_samples(config, "method")

    def allowed(self, agreed: Agreed) -> list[Allowed] | None:
        """Return the requests that the recipe may send. The server trains the head without a request to clients."""
        return super().allowed(agreed)

    def run_round(self, federation: Federation, state: RecipeState) -> tuple[RecipeState, dict[str, Any]]:
        """Run a round of FedAvg, and train the head on the server if at least one client trained."""
        state, metrics = super().run_round(federation, state)
        if not metrics["clients_trained"]:
            return state, metrics
        weights, loss = self.tuned(federation.config, state.weights)
        return replace(state, weights=weights), {**metrics, "server_loss": loss}
