"""Semantic segmentation: one class per pixel."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from fedstrata.data.tasks.tokens import PerPlace


class Segmentation(PerPlace):
    """Prediction of a class for each pixel of a picture.

    The targets are class numbers, with the shape (N, H, W). The model returns logits (B, outputs, H, W).

    Args:
        ignore: Target value of pixels that loss and metrics ignore, such as borders.
        outputs: Number of classes. Default: the largest target plus 1.
    """

    default_metrics = ("mean-iou", "accuracy")
    axis = 1

    @override
    def by_place(self, outputs: Tensor) -> Tensor:
        return outputs.flatten(2).transpose(1, 2)

    @override
    def rows(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        classes, wanted = outputs.shape[1], targets.flatten(1)
        predicted, counts = outputs.argmax(dim=1).flatten(1), wanted != self.ignore
        sample = torch.arange(len(wanted), device=wanted.device)[:, None].expand_as(wanted) * classes

        def count(which: Tensor, values: Tensor) -> Tensor:
            cells = (sample + values)[which]
            return torch.bincount(cells, minlength=len(wanted) * classes).view(len(wanted), classes)

        hits = count(counts & (predicted == wanted), predicted)
        return {"counts": torch.stack([hits, count(counts, wanted), count(counts, predicted)], dim=2).double()}

    @override
    def check_outputs(self, outputs: Tensor, targets: Tensor, n_outputs: int) -> str:
        batch, *size = targets.shape
        return (
            ""
            if tuple(outputs.shape) == (batch, n_outputs, *size)
            else f"(B, {n_outputs}, {', '.join(map(str, size))})"
        )
