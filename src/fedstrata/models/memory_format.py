"""The memory format of a module of the user's own.

Data sets give images pixel by pixel (channels last), and on a CPU convolutions and above all pooling are fastest so.
The choice follows from the module alone and is not timed: a stopwatch that decides differently on another day would
change the last bits of a result.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


def lay_out(module: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """Put a module that convolves images in channels-last format, in place, unless it cannot run so.

    A module cannot where it takes views that only the usual order has (``x.view(len(x), -1)`` after a convolution;
    ``x.flatten(1)`` takes any). It then keeps that order, and its inputs are put into it.

    Args:
        module: The module.
        shape: Shape of one sample, (channels, height, width) or anything else.
    """
    if len(shape) != 3 or not any(isinstance(part, nn.Conv2d) for part in module.modules()):
        return module
    if _runs(copy.deepcopy(module), shape):
        return module.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
    module.register_forward_pre_hook(_usual_order)
    return module


def _runs(module: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether forward and backward pass succeed in channels-last format and give the logits of the usual order."""
    x = torch.linspace(-1, 1, 2 * torch.Size(shape).numel()).view(2, *shape)
    module.eval()
    with torch.no_grad():
        expected = module(x)
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    try:
        with torch.enable_grad():
            logits = module(x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2))  # as data sets give them
            logits.sum().backward()
    except RuntimeError:
        return False
    return torch.allclose(logits, expected, rtol=1e-3, atol=1e-4)


def _usual_order(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    # Images of one channel are contiguous in both orders, and convolutions go by the strides: these are made anew.
    return tuple(x.flatten(1).view(x.shape) if isinstance(x, Tensor) and x.dim() == 4 else x for x in inputs)
