"""The default task: classification with one class per sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat
from torch import Tensor
from typing_extensions import override

from fedstrata.base.arrays import Ints
from fedstrata.base.errors import SpecError
from fedstrata.data import arrays
from fedstrata.data.tasks.base import Targets, Task


class Classification(Task):
    """Prediction of one class per sample, with the cross-entropy as loss.

    Args:
        class_weights: Weight of each class in the loss, in the order of the classes. The weights are scaled to a mean
            of 1.
        label_smoothing: Fraction of the target probability that is spread evenly over all classes.
    """

    default_metrics = ("accuracy",)
    has_classes = True

    class_weights: Annotated[tuple[PositiveFloat, ...] | None, Field(min_length=2)] = None
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @property
    @override
    def plain(self) -> bool:
        return self.class_weights is None and not self.label_smoothing

    @override
    def targets(self, train: Any, test: Any, names: Sequence[str] | None, sizes: tuple[int, int]) -> Targets:
        y, classes = arrays.encode(arrays.checked_labels(train, test, sizes, "y"), names, "y")
        arrays.check_seen(*y, classes)
        self._check_weights(len(classes))
        return Targets(*y, classes, len(classes))

    def _check_weights(self, n_classes: int) -> None:
        if self.class_weights is not None and len(self.class_weights) != n_classes:
            problem = f"has {len(self.class_weights)} weights for {n_classes} classes. Give one weight per class."
            raise SpecError("task.class_weights", problem, list(self.class_weights))

    @override
    def check_at_sites(self, label: str | None, n_classes: int) -> None:
        self._check_weights(n_classes)

    @override
    def losses(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        losses = F.cross_entropy(outputs, targets, reduction="none", label_smoothing=self.label_smoothing)
        if self.class_weights is not None:
            factors = losses.new_tensor(self.class_weights)
            losses = losses * (factors / factors.mean())[targets]
        return losses, torch.ones_like(losses)

    @override
    def mean_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        # Use PyTorch's own mean if possible, because the mean of ``losses`` would differ in the last bits.
        return F.cross_entropy(outputs, targets) if self.plain else super().mean_loss(outputs, targets)

    @override
    def total_loss(self, outputs: Tensor, targets: Tensor) -> float:
        return (
            float(F.cross_entropy(outputs, targets, reduction="sum"))
            if self.plain
            else super().total_loss(outputs, targets)
        )

    @override
    def rows(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"targets": targets, "predictions": outputs}

    @override
    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        return {"labels": outputs.argmax(dim=1), "probabilities": outputs.softmax(dim=1)}

    @override
    def strata(self, targets: Tensor, names: Sequence[str]) -> Ints:
        classes: Ints = targets.cpu().numpy()
        return classes

    @override
    def stratum_names(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(names)

    @override
    def order(self, targets: Tensor) -> Ints:
        return np.asarray(targets.cpu().numpy())
