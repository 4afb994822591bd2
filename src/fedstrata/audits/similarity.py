"""Measure the similarity of images with values in [0, 1] by PSNR and SSIM, which scikit-image computes."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fedstrata.base.errors import ExtraMissingError

CEILING = 100.0
"""The maximum PSNR in dB that is reported. The PSNR between an image and itself would be infinite."""


def metrics() -> Any:
    """Import ``skimage.metrics``.

    Raises:
        ExtraMissingError: scikit-image is not installed.
    """
    try:
        return importlib.import_module("skimage.metrics")
    except ImportError:
        raise ExtraMissingError("the leakage audit", "audit") from None


@dataclass(frozen=True)
class Likeness:
    """The similarity between a reconstruction and other images. Larger values mean more similar images.

    Args:
        psnr: The peak signal-to-noise ratio 10 log₁₀(1 / MSE) in dB, at most 100.
        ssim: The structural similarity (Wang et al. 2004) over uniform windows of 7x7 pixels, in [-1, 1].
    """

    psnr: float
    ssim: float


def mean_of(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if all values are None."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def psnr(one: Tensor, other: Tensor) -> float:
    """Return the PSNR of two images (C, H, W).

    >>> import torch
    >>> black, grey = torch.zeros(1, 8, 8), torch.full((1, 8, 8), 0.1)
    >>> round(psnr(black, grey), 4), psnr(black, black)
    (20.0, 100.0)
    """
    if float((one - other).square().mean()) <= 10 ** (-CEILING / 10):
        return CEILING
    return float(metrics().peak_signal_noise_ratio(_array(one), _array(other), data_range=1.0))


def ssim(one: Tensor, other: Tensor) -> float:
    """Return the SSIM of two images (C, H, W), averaged over their channels."""
    return float(metrics().structural_similarity(_array(one), _array(other), data_range=1.0, channel_axis=0))


def likeness(image: Tensor, others: Tensor) -> tuple[Likeness, Likeness]:
    """Compare an image (C, H, W) with n other images (n, C, H, W).

    Returns:
        The mean PSNR and SSIM over the other images, and the largest PSNR and SSIM. The largest PSNR and the largest
        SSIM may belong to different images.
    """
    ratios = [psnr(image, other) for other in others]
    similarities = [ssim(image, other) for other in others]
    mean = Likeness(float(np.mean(ratios)), float(np.mean(similarities)))
    return mean, Likeness(max(ratios), max(similarities))


def _array(image: Tensor) -> np.ndarray[Any, Any]:
    # Double precision is used, so that the result does not depend on PyTorch's default precision.
    return image.detach().double().numpy()
