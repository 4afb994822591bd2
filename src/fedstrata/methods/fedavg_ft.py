"""FedAvg-FT: the server re-trains the head on a small balanced set (ReBaFL §3.3)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from fedstrata.federation.seam import Federation, Job
from fedstrata.methods.base import Recipe, RecipeState
from fedstrata.methods.head_tuning import HeadTuning


class FedAvgFT(Recipe):
    """FedAvg whose aggregated head is trained on server data before anybody sees it: a reference, no rival.

    The server holds ``per_class`` training samples of every class **that no client holds**: the same ones in every
    round. A partition that gives every sample to a client leaves it none, and is refused. Features are computed once a
    round in evaluation mode; each step is one of full-batch gradient descent on the head.

    Args:
        per_class: Samples of every class at the server.
        steps: Steps a round.
        lr: Their learning rate.
        momentum: Of them, started anew each round.
        weight_decay: L2 penalty on the head.
    """

    paper: ClassVar[str] = "Xu et al. (ReBaFL §3.3): FedAvg with server-side fine-tuning, an upper-bound reference"

    per_class: PositiveInt = 10
    steps: PositiveInt = 50
    lr: PositiveFloat = 0.1
    momentum: float = Field(default=0.0, ge=0, lt=1)
    weight_decay: NonNegativeFloat = 0.0

    @property
    def tuning(self) -> HeadTuning:
        """What the server does."""
        return HeadTuning(**{key: getattr(self, key) for key in HeadTuning.model_fields})

    def check(self, job: Job) -> None:
        """There must be samples for the server."""
        super().check(job)
        self.tuning.check(job, "method")

    def run_round(self, federation: Federation, state: RecipeState) -> tuple[RecipeState, dict[str, Any]]:
        """A recipe's round, then the head."""
        state, metrics = super().run_round(federation, state)
        if not metrics["clients_trained"]:
            return state, metrics
        weights, loss = self.tuning.tuned(federation.job, state.weights)
        return replace(state, weights=weights), {**metrics, "server_loss": loss}
