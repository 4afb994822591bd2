"""Train a model's head on the server, on a small data set with the same number of samples per class (ReBaFL §3.3)."""

from __future__ import annotations

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from fedstrata.aggregation.optimizers import ServerOptimizer, Stepper
from fedstrata.base.config import Setting
from fedstrata.base.errors import SpecError
from fedstrata.base.rng import rng
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import Params, Weights


class HeadTuning(Setting):
    """Training of the model's head by full-batch gradient descent, on samples **that no client has**.

    The head is always trained on the same samples. The server computes the features (the head's input) once, before the
    first step, in evaluation mode. The clients' optimiser (``training.optimizer``) has no effect.

    Args:
        per_class: Number of samples per class for training the head.
        steps: Number of gradient steps for training the head.
        lr: Learning rate for training the head.
        momentum: Momentum for training the head.
        weight_decay: Factor of the L2 penalty on the head's parameters.
    """

    per_class: PositiveInt = 10
    steps: PositiveInt = 50
    lr: PositiveFloat = 0.1
    momentum: float = Field(default=0.0, ge=0, lt=1)
    weight_decay: NonNegativeFloat = 0.0

    def require_head(self, config: FederationConfig, section: str) -> None:
        """Check that the model has a head, the task has classes, and clients share their BatchNorm statistics.

        Args:
            config: The federation's settings.
            section: The spec section of the head's settings, for error messages.

        Raises:
            SpecError: The model has no head, the task has no classes, or clients keep their own BatchNorm statistics.
        """
        _ = config.model.head_name  # raises SpecError if the model has no head
        if not config.task.has_classes:
            problem = f"the server needs samples of each class, but the task {config.task.name!r} has no classes"
            raise SpecError(section, f"{problem}. Use another method, such as fedavg.")
        if config.training.batch_norm == "local" and config.model.has_batchnorm:
            problem = "the server trains the head with shared BatchNorm statistics. Set batch_norm = 'average'."
            raise SpecError("training.batch_norm", problem, "local")

    def require_samples(self, config: FederationConfig, section: str) -> None:
        """Check the conditions of ``require_head``, and that the server has enough samples.

        Args:
            config: The federation's settings.
            section: The spec section of the head's settings, for error messages.

        Raises:
            SpecError: The server has too few samples, or ``require_head`` refuses the model or the task.
        """
        self.require_head(config, section)
        key = f"{section}.per_class"
        if config.server_data is None:
            problem = "the server trains the head on its own samples, but in a deployment, the server has none. "
            problem += "Use another method."
            raise SpecError(key, problem, self.per_class)
        fewest = int(config.server_data.counts().min())
        if fewest < self.per_class:
            problem = (
                f"clients get so many samples that only {fewest} of the rarest class are left for the server. "
                "Use a smaller value, or give clients fewer samples. For example, set partition.name = 'classes' and "
                "partition.size."
            )
            raise SpecError(key, problem, self.per_class)

    def tuned(self, config: FederationConfig, weights: Weights) -> tuple[Weights, float]:
        """Train the head on the server's samples, and return the model and the loss before the last step."""
        assert config.server_data is not None
        x, y = config.server_data.balanced(self.per_class, rng(config.seed, "server-samples"))
        # Train the head inside ``loaded``, because a head may have buffers, which ``loaded`` sets and restores.
        with config.model.loaded(weights.params, weights.buffers) as params:
            with torch.no_grad():
                features, _ = config.model.with_features(params, x)
            head, loss = self.trained_head(config, weights, features, y)
        return Weights({**weights.params, **head}, weights.buffers), loss

    def trained_head(
        self, config: FederationConfig, weights: Weights, features: Tensor, y: Tensor
    ) -> tuple[Params, float]:
        """Train the head on features, and return its parameters and the loss before the last step.

        Call this method while ``weights`` are loaded into ``config.model``.

        Args:
            config: The federation's settings.
            weights: The model, which contains the initial head.
            features: The inputs of the head, shape (n, …).
            y: The labels, shape (n,).
        """
        head = {name: weights.params[name] for name in config.model.head_names}
        settings = ServerOptimizer(lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        stepper = Stepper(settings, head, None)
        for _ in range(self.steps):
            leaves = {name: w.detach().requires_grad_(True) for name, w in stepper.params.items()}
            loss = config.task.mean_loss(config.model.head(leaves, features), y)
            gradient = torch.autograd.grad(loss, list(leaves.values()))
            stepper.step(dict(zip(leaves, gradient, strict=True)))
        return stepper.params, float(loss.detach())
