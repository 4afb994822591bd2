"""BatchNorm with the statistics of a batch whose samples are spread over several clients (Stratify, section III-E).

Each client normalises its samples of a batch as if one machine had the whole batch. In the forward pass, every layer
adds up Σx, Σx² and the count over the clients. In the backward pass, every layer adds up Σ ∂J/∂x̂ and Σ x̂ ∂J/∂x̂ over
the clients, where x̂ is the normalised input and J is the loss. The sums are divided by the total count m.
``torch.nn.SyncBatchNorm`` does the same across processes. The loss must be a *sum* over samples. The clients' gradients
(also those of the layer's weight and bias) then add up to the gradient of the whole batch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from fedstrata.base.errors import FedstrataError, SpecError


class ReduceGroup:
    """A client's connection to its group: the ``size`` clients that normalise a batch together.

    Args:
        group: The group.
        number: The client's index in the group, counted from 0.
    """

    def __init__(self, group: LocalGroup, number: int) -> None:
        self._group, self._number, self.size = group, number, group.size

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensors that all clients of the group pass to this call.

        A call waits for the calls of all other clients, so all clients must make the same number of calls. All
        clients get exactly the same sum.
        """
        return self._group.add({self._number: tensor})


class GroupBrokenError(FedstrataError):
    """The error that all members of a group raise if one member fails and the batch cannot be finished."""


class _FederatedBatchNorm(_BatchNorm):
    _group: ReduceGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise a batch; in the context manager ``federated``, normalise over all clients of the group.

        The shape does not change.
        """
        group = self._group
        if group is None or not self.training:
            out: Tensor = super().forward(x)
            return out
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            mean, var, count = _union_statistics(x, group)
            self._update_running(mean, var, count)
        mean, var = mean.to(x.dtype), var.to(x.dtype)
        result: Tensor = SharedNorm.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, mean, var, mean, 1.0, count, self.eps, group
        )
        return result

    def _update_running(self, mean: Tensor, var: Tensor, count: int) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:
            momentum = 1.0 / int(self.num_batches_tracked)
        unbiased = var * (count / (count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


class FederatedBatchNorm1d(_FederatedBatchNorm, nn.BatchNorm1d):
    """An ``nn.BatchNorm1d`` layer that, in the context manager ``federated``, normalises over a group of clients."""


class FederatedBatchNorm2d(_FederatedBatchNorm, nn.BatchNorm2d):
    """An ``nn.BatchNorm2d`` layer that, in the context manager ``federated``, normalises over a group of clients."""


def _reduced(x: Tensor) -> list[int]:
    return [axis for axis in range(x.dim()) if axis != 1]


def _by_channel(vector: Tensor, x: Tensor) -> Tensor:
    return vector.reshape([1, -1] + [1] * (x.dim() - 2))


def _union_statistics(x: Tensor, group: ReduceGroup) -> tuple[Tensor, Tensor, int]:
    """Compute the statistics of the batch over all clients.

    Var = Σx²/m − μ² loses precision in float32. Therefore, each client computes its mean and the sum of squared
    distances from this mean. From these two values, the client computes Σx and Σx² in float64. Only vectors with one
    number per channel are cast to float64. The clients communicate only once, whereas the usual algorithm first
    averages over all clients and needs a second exchange.

    Returns:
        The mean and the biased variance, each of shape (C,) and float64, and the number of values per channel.
    """
    channels, count = x.shape[1], x.numel() // max(x.shape[1], 1)
    sums = torch.zeros(2, channels, dtype=torch.float64, device=x.device)
    if count:
        axes = _reduced(x)
        mean = x.mean(axes)
        squares = (x - _by_channel(mean, x)).square_().sum(axes)
        mean = mean.double()
        sums[0] = count * mean
        sums[1] = squares.double() + count * mean.square()
    total = group.all_reduce_sum(torch.cat([sums.flatten(), sums.new_tensor([count])]))
    m = int(total[-1])
    if m <= 1:
        raise ValueError(
            f"BatchNorm needs at least 2 values per channel for training, but all clients together have {m}"
        )
    mean, squares = (total[:-1] / m).view(2, channels)
    return mean, (squares - mean.square()).clamp_(min=0.0), m


class SharedNorm(torch.autograd.Function):
    """The function y = γ x̂ + β with x̂ = (x − μ) / √(σ² + ε). μ and σ² are computed over a group of clients.

    The argument ``x`` is the batch of one client. In the backward pass, each client multiplies its terms of ∂J/∂μ and
    ∂J/∂σ² by ``share``. The products are summed over the group and divided by ``count``. From the quotients, each
    client computes the gradient of its inputs. The backward pass treats σ² as the mean of (x − ``centre``)².
    If the statistics are computed over the whole batch, ``centre`` is μ. If the statistics are averages of the clients'
    statistics, ``centre`` is the client's own mean.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        centre: Tensor,
        share: float,
        count: int,
        eps: float,
        group: ReduceGroup,
    ) -> Tensor:
        """Normalise ``x`` with the statistics ``mean`` and ``var``."""
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(var + eps), centre)
        ctx.share, ctx.count, ctx.group = share, count, group
        return F.batch_norm(x, mean, var, weight, bias, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient ∂J/∂x of the loss J with respect to the inputs x, by the formula of BatchNorm.

        ∂J/∂x = (g − A / m − (x − centre) B / (m √(σ² + ε))) / √(σ² + ε). The gradient for the normalised inputs x̂ is g
        = ∂J/∂x̂. The sum of g is A, and the sum of x̂ g is B. Both sums run over the m values of a channel at all
        clients of the group. The docstring of the class describes ``centre``.
        """
        x, weight, mean, inverse, centre = ctx.saved_tensors
        axes = _reduced(x)
        normal = (x - _by_channel(mean, x)).mul_(_by_channel(inverse, x))
        # ∂J/∂β and ∂J/∂γ are not summed over the group here, because the server sums the clients' gradients.
        local = torch.stack([grad.sum(axes), (grad * normal).sum(axes)])
        grad_x = None
        if ctx.needs_input_grad[0]:
            scale = torch.ones_like(mean) if weight is None else weight
            part = local * scale if ctx.share == 1.0 else local * scale * ctx.share
            of_mean, of_var = (ctx.group.all_reduce_sum(part.double()) / ctx.count).to(x.dtype)
            if centre is not mean:
                normal = (x - _by_channel(centre, x)).mul_(_by_channel(inverse, x))
            grad_x = torch.addcmul(_by_channel(of_mean, x), normal, _by_channel(of_var, x))
            grad_x = (grad * _by_channel(scale, x)).sub_(grad_x).mul_(_by_channel(inverse, x))
        grad_weight = local[1] if ctx.needs_input_grad[1] else None
        grad_bias = local[0] if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, *[None] * 7


_FEDERATED: dict[type[nn.Module], type[_FederatedBatchNorm]] = {
    nn.BatchNorm1d: FederatedBatchNorm1d,
    nn.BatchNorm2d: FederatedBatchNorm2d,
}


def federate_batchnorm(module: nn.Module) -> nn.Module:
    """Convert every BatchNorm layer of ``module`` in place to a layer that can normalise over a group of clients.

    As with ``nn.SyncBatchNorm.convert_sync_batchnorm``, layers keep their parameters, buffers, settings and names. The
    results of the layers change only inside the context manager ``federated``.

    Returns:
        ``module`` itself.

    Raises:
        SpecError: A BatchNorm layer has an unsupported type (three-dimensional, lazy, or the user's own subclass). In
            this case, no layer is converted.

    >>> type(federate_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))[0]).__name__
    'FederatedBatchNorm1d'
    """
    layers = {name: part for name, part in module.named_modules() if isinstance(part, _BatchNorm)}
    layers = {name: part for name, part in layers.items() if not isinstance(part, _FederatedBatchNorm)}
    for name, layer in layers.items():
        if type(layer) not in _FEDERATED:
            problem = f"is a {type(layer).__name__}, which cannot normalise over several clients. Use nn.BatchNorm1d "
            problem += "or nn.BatchNorm2d."
            raise SpecError("model", f"{name or 'the module'} {problem}")
    for layer in layers.values():
        # Only the Python class of the object changes, so that references to the layer and its parameters stay valid.
        layer.__class__ = _FEDERATED[type(layer)]
    return module


@contextmanager
def federated(module: nn.Module, group: ReduceGroup) -> Iterator[None]:
    """Within the ``with`` block, let every BatchNorm in ``module`` normalise over ``group`` in training mode.

    All members must run the same module on their own batches, so that their sums match. Each member runs one forward
    pass and then one backward pass. A client without samples passes an empty batch, shape (0, …), and gets the same
    running statistics as the other clients. A client that fails must call ``LocalGroup.abort``, or else the other
    clients wait until the timeout.

    Args:
        module: A module that ``federate_batchnorm`` converted.
        group: This client's connection to the other clients.

    Raises:
        SpecError: The module has a BatchNorm layer that was not converted.
        RuntimeError: The module already belongs to a group.
    """
    layers = [part for part in module.modules() if isinstance(part, _FederatedBatchNorm)]
    if len(layers) < sum(isinstance(part, _BatchNorm) for part in module.modules()):
        raise SpecError(
            "model", "has a BatchNorm layer that works for a single client only. Call federate_batchnorm(module) first."
        )
    if any(layer._group is not None for layer in layers):
        raise RuntimeError(
            "this module already belongs to a client of a group. Use a copy of the module for another client."
        )
    for layer in layers:
        layer._group = group
    try:
        yield
    finally:
        for layer in layers:
            layer._group = None


class LocalGroup:
    """A group of members that are threads of this process.

    Tensors are added in the order of the members, not in the order in which the tensors arrive. Repeated runs therefore
    give bitwise equal results.

    Args:
        size: The number of members.
        timeout: How many seconds a member waits for the other members before the group breaks. Without a
            limit (None), a member that fails must always call ``abort``.

    >>> alone = LocalGroup(1).member(0)
    >>> alone.all_reduce_sum(torch.ones(2))
    tensor([1., 1.])
    """

    def __init__(self, size: int, timeout: float | None = 60.0) -> None:
        if size < 1:
            raise ValueError(f"size = {size}: a group needs at least one member")
        self.size, self.timeout = size, timeout
        self._changed = threading.Condition()
        self._parts: dict[int, Tensor] = {}
        self._ended: set[int] = set()
        self._turn = 0
        self._total = torch.empty(0)
        self._broken: str | None = None

    def member(self, number: int) -> ReduceGroup:
        """Return the connection of member ``number`` (counted from 0); only one thread may use it."""
        if not 0 <= number < self.size:
            raise ValueError(f"member {number} does not exist: the group has members 0 to {self.size - 1}")
        return ReduceGroup(self, number)

    def abort(self, reason: str = "a member gave up") -> None:
        """Stop the group. Current and later calls of ``add`` then raise ``GroupBrokenError`` with the reason."""
        with self._changed:
            if self._broken is None:
                self._broken = reason
            self._changed.notify_all()

    def leave(self, *members: int) -> None:
        """Record that members have left the group.

        The group stops (see ``abort``) as soon as a remaining member waits for a tensor of a member that has left.
        """
        with self._changed:
            self._ended.update(members)
            self._abort_if_incomplete()

    @property
    def progress(self) -> tuple[int, tuple[int, ...]]:
        """The number of completed sums, and the members that wait for the next sum."""
        with self._changed:
            return self._turn, tuple(sorted(self._parts))

    def add(self, parts: Mapping[int, Tensor]) -> Tensor:
        """Add the tensors of some members, wait for the remaining tensors, and return the sum of all tensors.

        Args:
            parts: A mapping from the index of each member to its tensor.

        Raises:
            GroupBrokenError: A member failed, ended, was too late or added two tensors to one sum. The error is also
                raised if the shapes of the tensors differ.
        """
        with self._changed:
            if again := sorted(self._parts.keys() & parts.keys()):
                self.abort(f"member {again[0]} added two tensors to one sum")
            self._refuse_broken()
            turn = self._turn
            self._parts.update(parts)
            self._abort_if_incomplete()
            if len(self._parts) == self.size:
                self._finish_turn()
            elif not self._changed.wait_for(lambda: self._turn != turn or self._broken is not None, self.timeout):
                missing = ", ".join(str(other) for other in range(self.size) if other not in self._parts)
                self.abort(f"member(s) {missing} did not add a tensor within {self.timeout:g} s")
            # If the turn has changed, the sum is complete. Return the sum even if the group broke in the meantime.
            if self._turn == turn:
                self._refuse_broken()
            return self._total.clone()

    def _finish_turn(self) -> None:
        parts = [self._parts[number] for number in range(self.size)]
        if len({(part.shape, part.dtype) for part in parts}) > 1:
            shapes = ", ".join(f"{tuple(part.shape)} {part.dtype}" for part in parts)
            self.abort(f"the members added tensors of different shapes or dtypes: {shapes}")
            return
        try:
            self._total = self._add_up(parts)
        except GroupBrokenError as error:
            self.abort(str(error))
            return
        self._parts = {}
        self._turn += 1
        self._changed.notify_all()

    def _add_up(self, parts: list[Tensor]) -> Tensor:
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def _abort_if_incomplete(self) -> None:
        if self._parts and (missing := sorted(self._ended - self._parts.keys())):
            self.abort(f"member(s) {', '.join(map(str, missing))} ended before they added a tensor to the sum")

    def _refuse_broken(self) -> None:
        if self._broken is not None:
            raise GroupBrokenError(f"the group of {self.size} clients is broken: {self._broken}")
