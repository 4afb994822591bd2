"""BatchNorm with statistics that are averaged over clients, as in FedTAN (Wang et al. 2023).

Each client computes the mean and the variance of its own batch. The layer normalises with the averages of these
statistics over the clients. In the backward pass, the gradients with respect to mean and variance are also averaged.
Unlike in ``models.batchnorm``, the averaged variance does not include the differences between the clients' means.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedstrata.models.batchnorm import ReduceGroup, SharedNorm


@contextmanager
def averaged(module: nn.Module, group: ReduceGroup, weight: float) -> Iterator[None]:
    """Within the ``with`` block, let every BatchNorm in ``module`` normalise with averaged statistics.

    The averages also replace the running statistics. Each member of the group must run the same module on its own
    batch, with one forward and one backward pass.

    Args:
        module: This client's module.
        group: This client's connection to the other clients.
        weight: This client's averaging weight. Only the ratios of the clients' weights matter.
    """
    layers = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    for layer in layers:
        layer.forward = partial(_forward, layer, group, weight)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _forward(layer: _BatchNorm, group: ReduceGroup, weight: float, x: Tensor) -> Tensor:
    layer._check_input_dim(x)  # type: ignore[no-untyped-call]
    axes = [axis for axis in range(x.dim()) if axis != 1]
    with torch.no_grad():
        statistics = _statistics(x, axes)
        share = weight if x.numel() else 0.0
        summed = group.all_reduce_sum(torch.cat([share * statistics.flatten(), statistics.new_tensor([share])]))
        if not summed[-1] > 0:
            return x  # no client of the group has a sample
        mean, var = (summed[:-1] / summed[-1]).view(2, -1).to(x.dtype)
        share /= float(summed[-1])
        if layer.running_mean is not None and layer.running_var is not None:
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(var)
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.add_(1)
    count = max(x.numel() // x.shape[1], 1)
    result: Tensor = SharedNorm.apply(  # type: ignore[no-untyped-call]
        x, layer.weight, layer.bias, mean, var, statistics[0].to(x.dtype), share, count, layer.eps, group
    )
    return result


def _statistics(x: Tensor, axes: list[int]) -> Tensor:
    """Compute the mean and the biased variance of each channel, shape (2, C), float64; zeros for an empty batch."""
    if not x.numel():
        return torch.zeros(2, x.shape[1], dtype=torch.float64)
    var, mean = torch.var_mean(x, axes, correction=0)
    return torch.stack([mean, var]).double()
