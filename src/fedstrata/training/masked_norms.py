"""Normalisation layers for clients that are trained side by side under ``torch.func.vmap``.

Batches of several clients are padded to one length. ``BatchNorm`` must not see what was padded, and PyTorch's own
``GroupNorm`` cannot be vectorised; here both are a few plain operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@dataclass
class Mask:
    """Which samples of the batch that a module sees are real.

    Args:
        real: Shape (B,), bool; None for all.
    """

    real: Tensor | None = None


def mask_norms(module: nn.Module) -> Mask:
    """Let every BatchNorm of ``module`` leave padded samples out of account, and every GroupNorm be vectorised.

    For good: the module must be one's own. What is computed without padding is what PyTorch's layers compute.

    Returns:
        Where to say which samples are real.
    """
    mask = Mask()
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            layer.forward = partial(_batch_norm, layer, mask)  # type: ignore[method-assign]
        elif isinstance(layer, nn.GroupNorm):
            layer.forward = partial(_group_norm, layer)  # type: ignore[method-assign]
    return mask


def _batch_norm(layer: _BatchNorm, mask: Mask, x: Tensor) -> Tensor:
    layer._check_input_dim(x)  # type: ignore[no-untyped-call]
    if layer.training or layer.running_mean is None or layer.running_var is None:
        mean, var = _statistics(layer, mask.real, x)
    else:
        mean, var = layer.running_mean, layer.running_var
    normal = (x - _by_channel(mean, x)) * _by_channel(torch.rsqrt(var + layer.eps), x)
    return _scaled(normal, layer.weight, layer.bias)


def _statistics(layer: _BatchNorm, real: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (C,) and biased variance (C,) of the real samples; running statistics take them in."""
    axes = [axis for axis in range(x.dim()) if axis != 1]
    values = x.numel() // x.shape[1]
    count: Tensor | int = values
    if real is None:
        mean = x.mean(axes)
        var = (x - _by_channel(mean, x)).square().mean(axes)
    else:
        weight = real.to(x.dtype).view(-1, *[1] * (x.dim() - 1))
        count = weight.sum() * (values // x.shape[0])
        mean = (x * weight).sum(axes) / count
        var = ((x - _by_channel(mean, x)).square() * weight).sum(axes) / count
    if layer.training and layer.running_mean is not None and layer.running_var is not None:
        momentum: Tensor | float | None = layer.momentum
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / layer.num_batches_tracked.to(x.dtype)
        with torch.no_grad():
            for running, new in ((layer.running_mean, mean), (layer.running_var, var * (count / (count - 1)))):
                running.copy_(running + (new.to(running.dtype) - running) * (0.0 if momentum is None else momentum))
    return mean, var


def _group_norm(layer: nn.GroupNorm, x: Tensor) -> Tensor:
    groups = x.reshape(x.shape[0], layer.num_groups, -1)
    var, mean = torch.var_mean(groups, -1, correction=0, keepdim=True)
    return _scaled(((groups - mean) * torch.rsqrt(var + layer.eps)).reshape(x.shape), layer.weight, layer.bias)


def _scaled(normal: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled = normal if weight is None else normal * _by_channel(weight, normal)
    return scaled if bias is None else scaled + _by_channel(bias, normal)


def _by_channel(vector: Tensor, x: Tensor) -> Tensor:
    return vector.reshape(1, -1, *[1] * (x.dim() - 2))
