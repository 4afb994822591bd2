"""The objective of FedDecorr, which decorrelates features (Shi et al. 2023)."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from fedstrata.base.errors import SpecError
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import Params
from fedstrata.models.model import Model
from fedstrata.objectives.base import Batch, Context, Objective

EPSILON = 1e-8
"""A constant that is added to variances, to prevent division by 0 if all samples have the same value of a feature."""


def correlation(features: Tensor) -> Tensor:
    """Return the mean squared correlation ‖K‖²_F / d² of d features over a batch, as a scalar.

    The correlation matrix is K = XᵀX / B, where X contains the standardised features.

    Args:
        features: The features of B samples, shape (B, d).

    >>> correlation(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))  # all correlations are 1
    tensor(1.)
    >>> correlation(torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]]))  # uncorrelated: 1 / d
    tensor(0.5000)
    """
    centred = features - features.mean(dim=0)
    standardised = centred / (centred.square().mean(dim=0) + EPSILON).sqrt()
    return (standardised @ standardised.T / features.numel()).square().sum()


class Decorrelated(Objective):
    """The task's loss plus (β / d²) ‖K‖²_F, where K is the d × d correlation matrix of the features.

    The features are the head's input. The value ‖K‖²_F / d² is 1/d for uncorrelated features, and 1 for perfectly
    correlated features. The term keeps features from collapsing to a few dimensions. For batches of one sample, the
    term is left out. Unlike the paper's formula, the authors' code multiplies the term by the batch size and leaves out
    the diagonal of K. The authors' code also divides variances by B − 1 instead of the batch size B.

    Args:
        beta: Weight β of the decorrelation term.
    """

    tasks: ClassVar[frozenset[str] | None] = None

    beta: NonNegativeFloat = 0.1

    def check(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` if the model has no head, or if samples have several feature vectors."""
        if config.task.name in ("next-token", "segmentation"):
            problem = (
                f"this objective needs one feature vector per sample, but the task {config.task.name!r} has one vector "
                "per target. "
            )
            raise SpecError("method.objective", problem + "Use another objective, such as fedprox.", self.name)
        _ = config.model.head_name  # raises SpecError if the model has no head

    def loss(self, model: Model, params: Params, batch: Batch, context: Context) -> Tensor:
        """Return the mean loss of the task plus β times the mean squared correlation of the features, as a scalar."""
        if not self.beta or len(batch.y) < 2:
            return super().loss(model, params, batch, context)
        features, outputs = model.with_features(params, batch.x)
        # Use float32 even in mixed precision, because sums of squares need more digits than bfloat16 has.
        with torch.autocast(features.device.type, enabled=False):
            second = correlation(features.flatten(1).float())
        return context.task.mean_loss(outputs, batch.y) + self.beta * second
