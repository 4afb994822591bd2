"""The prediction of the next token at each position of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor
from typing_extensions import override

from fedstrata.base.errors import DataError
from fedstrata.data import arrays
from fedstrata.data.tasks.base import Targets, Task


class PerPlace(Task):
    """Base class of tasks that predict a class for each position (token or pixel) of a sample.

    The weight of a sample is the number of its positions with a target other than ``ignore``. Averages over batches,
    clients and test data therefore exclude ignored positions, such as padding.

    Args:
        ignore: Target value of positions that loss and metrics ignore, such as padding.
        outputs: Number of classes. Default: the largest target plus 1.
    """

    weighted = True
    tables = ("counts",)

    axis: ClassVar[int] = -1
    """The axis of the classes in the model's outputs."""

    ignore: int = -100
    outputs: PositiveInt | None = None

    @override
    def targets(self, train: Any, test: Any, names: Sequence[str] | None, sizes: tuple[int, int]) -> Targets:
        pairs = zip((train, test), arrays.SPLITS, sizes, strict=True)
        both = [torch.from_numpy(arrays.checked_places(y, f"y_{part}", n)) for y, part, n in pairs]
        if both[0].shape[1:] != both[1].shape[1:]:
            shapes = f"{tuple(both[1].shape[1:])}, but a sample of y_train has the shape {tuple(both[0].shape[1:])}"
            raise DataError(f"y_test: a sample has the shape {shapes}. Pad all samples to the same shape.")
        largest = max(int(y[y != self.ignore].max()) if bool((y != self.ignore).any()) else -1 for y in both)
        outputs = self.outputs or (len(names) if names is not None else largest + 1)
        for y, part in zip(both, arrays.SPLITS, strict=True):
            counting = y[y != self.ignore]
            if not len(counting):
                raise DataError(
                    f"y_{part}: every target is {self.ignore} (task.ignore). Change the targets or task.ignore."
                )
            wrong = counting[(counting < 0) | (counting >= outputs)]
            if len(wrong):
                accepted = f"Use 0…{outputs - 1}, or task.ignore = {self.ignore} for positions without a target."
                raise DataError(f"y_{part} contains {int(wrong[0])}. {accepted}")
        return Targets(both[0], both[1], tuple(names or ()), outputs)

    @override
    def losses(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits, wanted = self.by_place(outputs), targets.flatten(1)
        losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none", ignore_index=self.ignore)
        return losses.view(wanted.shape).sum(dim=1), (wanted != self.ignore).sum(dim=1).to(losses.dtype)

    @override
    def weights(self, targets: Tensor) -> Tensor:
        return (targets.flatten(1) != self.ignore).sum(dim=1).double()

    def by_place(self, outputs: Tensor) -> Tensor:
        """Return the logits of each position, shape (B, positions, classes)."""
        return outputs

    @override
    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        return {"labels": outputs.argmax(dim=self.axis)}


class NextToken(PerPlace):
    """Prediction of the next token at each position of a sequence.

    Inputs and targets are ids of tokens, shape (N, T). The target of a position is the next token. Sequences are padded
    to the same length, and the target of padding is ``ignore``. The model returns logits (B, T, outputs).

    Args:
        ignore: Target value of positions that loss and metrics ignore, such as padding.
        outputs: Size of the vocabulary. Default: the largest target plus 1.
    """

    default_metrics = ("accuracy", "perplexity")

    @override
    def rows(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        counts = targets != self.ignore
        hits = ((outputs.argmax(dim=-1) == targets) & counts).sum(dim=1)
        tokens = counts.sum(dim=1)
        return {"counts": torch.stack([hits, tokens, tokens], dim=1).double()[:, None]}

    @override
    def check_outputs(self, outputs: Tensor, targets: Tensor, n_outputs: int) -> str:
        needed = (*targets.shape, n_outputs)
        return "" if tuple(outputs.shape) == needed else f"(B, {targets.shape[1]}, {n_outputs})"
