"""FedBABU (Oh, Kim and Yun 2022)."""

from __future__ import annotations

from typing_extensions import override

from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import Weights
from fedstrata.methods.base import Parts, Recipe, RecipeState
from fedstrata.methods.head_tuning import HeadTuning
from fedstrata.objectives.base import Objective
from fedstrata.objectives.fedbabu import BodyOnly, HeadOnly


class FedBABU(Recipe):
    """FedAvg of the body; the head keeps its initial values, and the global model is evaluated with it.

    With ``fine_tune``, a copy of the head is trained at the server before each evaluation and for the run's final
    model; clients never see it. The paper fine-tunes at each client, on the client's own data, as
    ``evaluation.fine_tune`` does.

    Args:
        fine_tune: How the head is trained for evaluation, such as ``{ per_class = 10 }``, with the keys and defaults of
            FedAvg-FT. Default: the head is not trained.
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
        """Require samples at the server if it trains the head."""
        super().check(config)
        if self.fine_tune:
            self.fine_tune.require_samples(config, "method.fine_tune")

    def evaluated(self, config: FederationConfig, state: RecipeState) -> Weights:
        """Return the model with its head fine-tuned, if ``fine_tune`` is set."""
        return self.fine_tune.tuned(config, state.weights)[0] if self.fine_tune else state.weights
