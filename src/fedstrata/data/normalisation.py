"""The normalisation of inputs: shift and scale, computed from the training samples."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Normalize = Literal["standard", "unit", "none", "keep"]


def shift_and_scale(train: Tensor, normalize: Normalize) -> tuple[Tensor | None, Tensor | None]:
    """Compute shift and scale of the normalisation from the training inputs.

    Args:
        train: The training inputs, in the form in which a ``Dataset`` stores them, shape (N, H, W, C) or (N, F).
        normalize: See ``from_arrays``.

    Returns:
        The shift and the scale of each channel or feature: float32, or float64 if different samples would be equal in
            float32. Shift and scale are None if ``normalize`` is ``"none"``.
    """
    width = train.shape[-1]
    if normalize == "none":
        return None, None
    if normalize == "unit" and train.dtype == torch.uint8:
        return torch.zeros(width), torch.full((width,), 1 / 255)
    flat = train.reshape(-1, width)
    if normalize == "unit":
        low, span = flat.amin(0).double(), flat.amax(0).double() - flat.amin(0).double()
        return precise(train, low, torch.where(span > 0, 1 / span, 1.0), span)
    # Process the rows in chunks to limit memory. Subtract the first row from all rows. Otherwise, if the mean is large,
    # a small deviation would be lost to rounding.
    origin = flat[0].double()
    total, squares = torch.zeros_like(origin), torch.zeros_like(origin)
    # For inputs that are not large, keep the chunk size of earlier versions. Another size would round the sums
    # differently, and so change earlier results.
    large = flat.numel() > 1 << 26
    for chunk in torch.split(flat, min(1 << 20, max(1, (1 << 21) // width)) if large else 1 << 20):
        centred = chunk.double() - origin
        total += centred.sum(0)
        squares += (centred * centred).sum(0)
    mean = total / len(flat)
    deviation = (squares / len(flat) - mean * mean).clamp(min=0).sqrt()
    varies = deviation > 1e-7 * (origin.abs() + mean.abs())
    return precise(train, origin + mean, torch.where(varies, 1 / deviation, 1.0), deviation)


def precise(train: Tensor, shift: Tensor, scale: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """Return shift and scale as float32, or as float64 if inputs would lose too much precision in float32.

    Args:
        train: The training inputs, in the form in which a ``Dataset`` stores them.
        shift: The shift of each channel or feature, float64.
        scale: The scale of each channel or feature, float64.
        spread: The standard deviation or the range of each channel or feature. Float32 suffices if its rounding errors
            are small compared with ``spread``.
    """
    too_coarse = (shift.abs() * 2.0**-24 > 1e-3 * spread) & (spread > 0)
    if too_coarse.any() and train.dtype in (torch.int32, torch.int64, torch.float64):
        return shift, scale
    return shift.float(), scale.float()
