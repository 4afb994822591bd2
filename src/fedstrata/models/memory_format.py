"""Choose the memory format of a user's own module.

Data sets return images in channels-last format, in which convolutions and pooling are fastest on a CPU. The format
affects rounding, and so slightly changes results. To keep results reproducible, the choice depends only on the module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedstrata.models.model import forward
from fedstrata.models.untrained import twin_of


def lay_out(module: nn.Module, shape: tuple[int, ...] | Mapping[str, tuple[int, ...]]) -> nn.Module:
    """Convert a module with convolutions to channels-last format in place, if the module works in this format.

    Some modules do not work in channels-last format, for example because they call ``x.view(len(x), -1)`` after a
    convolution. These modules keep the default format, and their inputs are converted to the default format. Instead of
    ``view``, use ``x.flatten(1)``, which works with both formats.

    Args:
        module: The module to convert.
        shape: The shape of one sample, such as (channels, height, width), or a mapping with a shape for each input.
            Modules are converted only if samples are images (three dimensions).

    Returns:
        ``module`` itself.
    """
    if (
        isinstance(shape, Mapping)
        or len(shape) != 3
        or not any(isinstance(part, nn.Conv2d) for part in module.modules())
    ):
        return module
    if _runs(twin_of(module), shape):
        return module.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
    module.register_forward_pre_hook(_to_default_format)
    return module


def _runs(module: nn.Module, shape: tuple[int, ...]) -> bool:
    """Return True if forward and backward passes work in channels-last format, and the logits stay the same."""
    x = torch.linspace(-1, 1, 2 * torch.Size(shape).numel()).view(2, *shape)
    module.eval()
    try:
        with torch.no_grad():
            expected = forward(module, x)
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        with torch.enable_grad():
            images = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # has the strides of a ``Dataset``'s inputs
            logits = forward(module, images)
            torch.autograd.backward(logits.sum())
    except Exception:
        # A user's own module may raise any exception. If the module cannot be used at all, an error is raised later,
        # when the experiment is prepared.
        return False
    return torch.allclose(logits, expected, rtol=1e-3, atol=1e-4)


def _to_default_format(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    # Images of one channel count as contiguous in both formats, so ``x.contiguous()`` would keep their strides.
    # Convolutions derive the format from the strides, and would use the channels-last format.
    return tuple(x.flatten(1).view(x.shape) if isinstance(x, Tensor) and x.dim() == 4 else x for x in inputs)
