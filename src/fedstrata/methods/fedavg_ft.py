"""FedAvg-FT: the server re-trains the head on a small balanced set (ReBaFL §3.3)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from fedstrata.aggregation.optimizers import ServerOptimizer, Stepper
from fedstrata.errors import SpecError
from fedstrata.federation.messages import Weights
from fedstrata.federation.seam import Federation, Job
from fedstrata.methods.base import Recipe, RecipeState
from fedstrata.rng import rng


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

    def check(self, job: Job) -> None:
        """There must be samples for the server."""
        super().check(job)
        fewest = 0 if job.spare is None else int(job.spare.counts().min())
        if fewest < self.per_class:
            problem = (
                f"the partition leaves the server {fewest} samples of some class that no client holds: take fewer, or "
                "a partition that does not give out everything, such as classes with a size"
            )
            raise SpecError("method.per_class", problem, self.per_class)

    def run_round(self, federation: Federation, state: RecipeState) -> tuple[RecipeState, dict[str, Any]]:
        """A recipe's round, then the head."""
        state, metrics = super().run_round(federation, state)
        if not metrics["clients_trained"]:
            return state, metrics
        weights, loss = self.tuned(federation.job, state.weights)
        return replace(state, weights=weights), {**metrics, "server_loss": loss}

    def tuned(self, job: Job, weights: Weights) -> tuple[Weights, float]:
        """The model with its head trained on the server's samples, and the loss before the last step."""
        assert job.spare is not None
        x, y = job.spare.balanced(self.per_class, rng(job.seed, "server-samples"))
        # Loaded to the end: a head may have buffers of its own.
        with job.model.loaded(weights.params, weights.buffers) as params:
            with torch.no_grad():
                features, _ = job.model.with_features(params, x)
            stepper, loss = self._head_trained(job, weights, features, y)
        return Weights({**weights.params, **stepper.params()}, weights.buffers), loss

    def _head_trained(self, job: Job, weights: Weights, features: Tensor, y: Tensor) -> tuple[Stepper, float]:
        head = {name: weights.params[name] for name in job.model.head_names}
        settings = ServerOptimizer(lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        stepper, loss = Stepper(settings, head, None), torch.zeros(())
        for _ in range(self.steps):
            leaves = {name: w.detach().requires_grad_(True) for name, w in stepper.params().items()}
            loss = F.cross_entropy(job.model.head(leaves, features), y)
            gradient = torch.autograd.grad(loss, list(leaves.values()))
            stepper.step(dict(zip(leaves, gradient, strict=True)))
        return stepper, float(loss.detach())
