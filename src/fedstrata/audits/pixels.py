"""Convert samples to the images that attacks need (with values in [0, 1]), and convert images to model inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedstrata.base.errors import SpecError
from fedstrata.base.inputs import single
from fedstrata.data.dataset import Dataset, Indices, Split

SMALLEST = 7
"""The minimum height and width of an image in pixels, which is the window size of the similarity measure SSIM."""


@dataclass(frozen=True)
class Pixels:
    """The conversion between stored values, values in [0, 1] and a model's inputs.

    Args:
        data: The data set; its samples are images.
        low: The stored value that becomes 0 (black).
        high: The stored value that becomes 1 (white).
    """

    data: Dataset
    low: float
    high: float

    @classmethod
    def of(cls, data: Dataset) -> Pixels:
        """Create the conversion for a data set.

        For bytes, the range of stored values is 0 to 255. For other types, it is the range of the values in the
        training set.

        Raises:
            SpecError: The samples are not images of at least 7x7 pixels.
        """
        shape = data.shape
        if isinstance(shape, Mapping) or len(shape) != 3 or min(shape[1:]) < SMALLEST:
            problem = (
                f"the audit requires images of at least {SMALLEST}x{SMALLEST} pixels, but the samples have the shape "
                f"{shape}. Audit a run with other data."
            )
            raise SpecError("data.name", problem, data.name)
        stored = single(data.x_train)
        if stored.dtype == torch.uint8:
            return cls(data, 0.0, 255.0)
        low, high = float(stored.min()), float(stored.max())
        return cls(data, low, high if high > low else low + 1.0)

    def images(self, indices: Indices, split: Split = "train") -> Tensor:
        """Return the samples with these indices as images with values in [0, 1], shape (B, C, H, W)."""
        stored = single(self.data.x_train if split == "train" else self.data.x_test)
        taken = stored[indices].float()
        return ((taken - self.low) / (self.high - self.low)).clamp(0, 1).permute(0, 3, 1, 2).contiguous()

    def inputs(self, images: Tensor) -> Tensor:
        """Convert images (B, C, H, W) with values in [0, 1] to model inputs, differentiable by autograd."""
        values = images * (self.high - self.low) + self.low
        if self.data.shift is None or self.data.scale is None:
            return values
        return (values - single(self.data.shift)[:, None, None]) * single(self.data.scale)[:, None, None]
