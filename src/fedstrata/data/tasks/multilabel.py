"""Classification with several labels per sample. Each label is present or absent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from fedstrata.base.arrays import Ints
from fedstrata.base.errors import DataError, SpecError, not_among
from fedstrata.data import arrays
from fedstrata.data.tasks.base import Targets, Task


class MultiLabel(Task):
    """Prediction of several labels per sample, such as diseases in a picture.

    The loss is the mean binary cross-entropy over the labels. A label is predicted if its probability is above one
    half.

    Args:
        stratum: Label that defines two classes for Stratify and for partitions by label: the samples with this label,
            and all other samples.
    """

    default_metrics = ("micro-f1", "macro-f1")
    tables = ("counts",)

    stratum: str | None = None

    @override
    def targets(self, train: Any, test: Any, names: Sequence[str] | None, sizes: tuple[int, int]) -> Targets:
        pairs = zip((train, test), arrays.SPLITS, sizes, strict=True)
        both = [arrays.checked_values(y, f"y_{part}", n) for y, part, n in pairs]
        for values, part in zip(both, arrays.SPLITS, strict=True):
            if len(wrong := values[(values != 0) & (values != 1)]):
                raise DataError(
                    f"y_{part} contains {wrong[0]:g}. Use 1 for each label that a sample has, and 0 for all others."
                )
        width = both[0].shape[1]
        if both[1].shape[1] != width:
            raise DataError(
                f"y_test has {both[1].shape[1]} labels per sample, but y_train has {width}. Use the same number."
            )
        labels = tuple(map(str, range(width))) if names is None else tuple(names)
        if len(labels) != width:
            raise DataError(f"class_names has {len(labels)} names for {width} labels. Give one name for each label.")
        if self.stratum is not None and self.stratum not in labels:
            raise SpecError("task.stratum", not_among("is not a label", self.stratum, labels), self.stratum)
        y, other = (torch.from_numpy(values).float() for values in both)
        return Targets(y, other, labels, width)

    @override
    def losses(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        losses = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(dim=1)
        return losses, torch.ones_like(losses)

    @override
    def rows(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        predicted, true = outputs > 0, targets > 0
        counts = torch.stack([predicted & true, true, predicted], dim=2)
        return {"targets": targets, "predictions": outputs.sigmoid(), "counts": counts.double()}

    @override
    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        return {"labels": (outputs > 0).long(), "probabilities": outputs.sigmoid()}

    @override
    def strata(self, targets: Tensor, names: Sequence[str]) -> Ints | None:
        if self.stratum is None:
            return None
        there: Ints = (targets[:, list(names).index(self.stratum)] > 0).long().cpu().numpy()
        return there

    @override
    def stratum_names(self, names: Sequence[str]) -> tuple[str, ...]:
        return () if self.stratum is None else (f"without {self.stratum}", self.stratum)

    @property
    @override
    def stratum_hint(self) -> str:
        return "Set task.stratum to the name of a label."
