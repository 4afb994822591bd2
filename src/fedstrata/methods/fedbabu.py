"""The method FedBABU (Oh, Kim and Yun 2022)."""

from __future__ import annotations

from typing_extensions import override

from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import Weights
from fedstrata.methods.head_tuning import HeadTuning
from fedstrata.methods.recipe import Parts, Recipe, RecipeState
from fedstrata.objectives.base import Objective
from fedstrata.objectives.fedbabu import BodyOnly, HeadOnly


class FedBABU(Recipe):
    """FedAvg that trains only the body (the layers before the head). The head keeps its initial values.

    With ``fine_tune``, the server trains a copy of the head for each evaluation and for the final model. Clients never
    receive the copy of the head. In the paper, each client instead fine-tunes the model on its own data; to do the
    same, set ``evaluation.fine_tune``.

    Args:
        fine_tune: Settings for training the head on the server, as in ``fedavg-ft``. Default: the head is not trained.
    """

    paper = "Oh, Kim and Yun 2022, FedBABU: Toward Enhanced Representation (ICLR)"

    fine_tune: HeadTuning | None = None

    @override
    def parts(self) -> Parts:
        return {"objective": BodyOnly()}

    def personal_objective(self) -> Objective:
        """Return the objective that trains only the head, as in the paper."""
        return HeadOnly()

    def check(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` if the server trains the head, but has too few samples."""
        super().check(config)
        if self.fine_tune:
            self.fine_tune.require_samples(config, "method.fine_tune")

    def evaluated(self, config: FederationConfig, state: RecipeState) -> Weights:
        """Return the global model. If ``fine_tune`` is set, the server first trains a copy of the head."""
        weights = super().evaluated(config, state)
        return self.fine_tune.tuned(config, weights)[0] if self.fine_tune else weights
