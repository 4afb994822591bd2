"""BatchNorm whose statistics are those of the union of the clients' batches (Stratify, section III-E).

Clients that each hold a part of one batch normalise it as a single machine holding all of it would. In the
forward pass every layer adds up Σx, Σx² and the count over the clients, in the backward pass
Σ ∂J/∂x̂ and Σ x̂ ∂J/∂x̂; sums are added first and divided once, by the union count m. It is what
``torch.nn.SyncBatchNorm`` does between processes, with the group of clients for a process group. The loss
must be a *sum* over samples, so that the clients' gradients (those of the layer's own weight and bias among
them) add up to those of the whole batch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from fedstrata.base.errors import FedstrataError, SpecError


class ReduceGroup(Protocol):
    """One client's connection to the clients that hold the other parts of its batch."""

    @property
    def size(self) -> int:
        """Number of clients."""

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum of every client's ``tensor``, the same bits for each; all must call it equally often."""


class GroupBrokenError(FedstrataError):
    """A group that has lost a member: nobody in it can go on with this batch."""


class _FederatedBatchNorm(_BatchNorm):
    _group: ReduceGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The normalised batch, of the shape of ``x``."""
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
    """``nn.BatchNorm1d`` that normalises over the clients of a group inside ``federated``."""


class FederatedBatchNorm2d(_FederatedBatchNorm, nn.BatchNorm2d):
    """``nn.BatchNorm2d`` that normalises over the clients of a group inside ``federated``."""


def _reduced(x: Tensor) -> list[int]:
    return [axis for axis in range(x.dim()) if axis != 1]


def _by_channel(vector: Tensor, x: Tensor) -> Tensor:
    return vector.reshape([1, -1] + [1] * (x.dim() - 2))


def _union_statistics(x: Tensor, group: ReduceGroup) -> tuple[Tensor, Tensor, int]:
    """Mean (C,) and biased variance (C,) in float64, and count, of the union batch.

    Var = Σx²/m − μ² cancels badly in float32. Here each client finds its own mean and the squares about it in
    two passes over its data, in the data's precision, and forms Σx and Σx² from those in float64: only
    vectors of C numbers are ever cast, and one all-reduce is enough where the textbook's two-pass form needs
    two.
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
            f"the clients together hold {m} value(s) per channel, and BatchNorm needs more than 1 to train"
        )
    mean, squares = (total[:-1] / m).view(2, channels)
    return mean, (squares - mean.square()).clamp_(min=0.0), m


class SharedNorm(torch.autograd.Function):
    """y = γ x̂ + β, x̂ = (x − μ) / √(σ² + ε), with μ and σ² that are sums over the group, of which ``x`` has a part.

    In the backward pass each member brings ``share`` times what its part adds to ∂J/∂μ and ∂J/∂σ²; the sums over the
    group, divided by ``count``, go on into its own inputs, whose distance from ``centre`` is what moves its variance.
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
        """Normalise ``x`` with given statistics."""
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(var + eps), centre)
        ctx.share, ctx.count, ctx.group = share, count, group
        return F.batch_norm(x, mean, var, weight, bias, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """∂J/∂x = (∂J/∂x̂ − Σ ∂J/∂x̂ / m − (x − centre) / √(σ² + ε) Σ x̂ ∂J/∂x̂ / m) / √(σ² + ε)."""
        x, weight, mean, inverse, centre = ctx.saved_tensors
        axes = _reduced(x)
        normal = (x - _by_channel(mean, x)).mul_(_by_channel(inverse, x))
        # ∂J/∂β and ∂J/∂γ stay local: the server adds the clients' gradients.
        local = torch.stack([grad.sum(axes), (grad * normal).sum(axes)])
        grad_x = None
        if ctx.needs_input_grad[0]:
            scale = torch.ones_like(mean) if weight is None else weight
            own = local * scale if ctx.share == 1.0 else local * scale * ctx.share
            plain, along = (ctx.group.all_reduce_sum(own.double()) / ctx.count).to(x.dtype)
            if centre is not mean:
                normal = (x - _by_channel(centre, x)).mul_(_by_channel(inverse, x))
            grad_x = torch.addcmul(_by_channel(plain, x), normal, _by_channel(along, x))
            grad_x = (grad * _by_channel(scale, x)).sub_(grad_x).mul_(_by_channel(inverse, x))
        grad_weight = local[1] if ctx.needs_input_grad[1] else None
        grad_bias = local[0] if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, *[None] * 7


_FEDERATED: dict[type[nn.Module], type[_FederatedBatchNorm]] = {
    nn.BatchNorm1d: FederatedBatchNorm1d,
    nn.BatchNorm2d: FederatedBatchNorm2d,
}


def has_batchnorm(module: nn.Module) -> bool:
    """Whether there is a BatchNorm of any kind in ``module``."""
    return any(isinstance(part, _BatchNorm) for part in module.modules())


def federate_batchnorm(module: nn.Module) -> nn.Module:
    """Make every BatchNorm in ``module`` able to normalise over a group of clients.

    The counterpart of ``nn.SyncBatchNorm.convert_sync_batchnorm``: layers change in place, and keep
    their parameters, buffers, settings and names. Outside ``federated`` they compute what they did before.

    Returns:
        ``module`` itself.

    Raises:
        SpecError: A layer is a BatchNorm of another kind (three-dimensional, lazy, a subclass of the user's
            own); nothing is changed then.

    >>> type(federate_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))[0]).__name__
    'FederatedBatchNorm1d'
    """
    layers = {name: part for name, part in module.named_modules() if isinstance(part, _BatchNorm)}
    layers = {name: part for name, part in layers.items() if not isinstance(part, _FederatedBatchNorm)}
    for name, layer in layers.items():
        if type(layer) not in _FEDERATED:
            problem = f"is a {type(layer).__name__}; only nn.BatchNorm1d and nn.BatchNorm2d can be federated"
            raise SpecError("model", f"{name or 'the module'} {problem}")
    for layer in layers.values():
        # The same object under another class: whoever refers to the layer or its parameters keeps them.
        layer.__class__ = _FEDERATED[type(layer)]
    return module


@contextmanager
def federated(module: nn.Module, group: ReduceGroup) -> Iterator[None]:
    """Let every BatchNorm in ``module`` normalise over ``group`` while it trains in the block.

    All members run the same module on batches of their own, one forward pass each and then one backward pass
    each, so that their all-reduces meet in the same order. A client with no sample in the batch is left out
    of the group, or takes part with an empty batch (0, …): it then adds zeros and gets the same running
    statistics as the others. One that fails must break the group (``LocalGroup.abort``), or the others wait
    until their time runs out.

    Args:
        module: A module whose BatchNorms went through ``federate_batchnorm``.
        group: This client's group.

    Raises:
        SpecError: There is a BatchNorm that cannot be federated yet.
        RuntimeError: The module has a group already.
    """
    layers = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    ours = [part for part in layers if isinstance(part, _FederatedBatchNorm)]
    if len(ours) < len(layers):
        raise SpecError("model", "has BatchNorm of one client only; call federate_batchnorm(module) first")
    if any(layer._group is not None for layer in ours):
        raise RuntimeError("this module has a group already; another client needs a copy of the module")
    for layer in ours:
        layer._group = group
    try:
        yield
    finally:
        for layer in ours:
            layer._group = None


class LocalGroup:
    """A group whose members are threads of this process.

    Sums are taken in the order of the members, whoever comes first, so that runs repeat to the bit.

    Args:
        size: Number of members.
        timeout: Seconds that a member waits for the others before it breaks the group; None for as long as it takes,
            where nobody can be lost.

    >>> alone = LocalGroup(1).member(0)
    >>> alone.all_reduce_sum(torch.ones(2))
    tensor([1., 1.])
    """

    def __init__(self, size: int, timeout: float | None = 60.0) -> None:
        if size < 1:
            raise ValueError(f"size = {size}: a group has at least one member")
        self.size, self.timeout = size, timeout
        self._changed = threading.Condition()
        self._given: dict[int, Tensor] = {}
        self._left: set[int] = set()
        self._turn = 0
        self._total = torch.empty(0)
        self._broken: str | None = None

    def member(self, number: int) -> ReduceGroup:
        """The group as member ``number`` (from 0) sees it; one thread each."""
        if not 0 <= number < self.size:
            raise ValueError(f"member {number}: this group has members 0 to {self.size - 1}")
        return _Member(self, number)

    def abort(self, reason: str = "a member gave up") -> None:
        """Break the group: everybody who waits, or comes later, gets ``GroupBrokenError`` with the reason."""
        with self._changed:
            if self._broken is None:
                self._broken = reason
            self._changed.notify_all()

    def leave(self, *members: int) -> None:
        """Say that members have ended: a sum that lacks their parts will never be whole, and breaks the group."""
        with self._changed:
            self._left.update(members)
            self._refuse_to_wait_in_vain()

    @property
    def progress(self) -> tuple[int, tuple[int, ...]]:
        """Sums that were completed, and who waits for the next one."""
        with self._changed:
            return self._turn, tuple(sorted(self._given))

    def add(self, parts: Mapping[int, Tensor]) -> Tensor:
        """Bring the parts of some members and wait for the others'.

        Args:
            parts: By member.

        Raises:
            GroupBrokenError: A member gave up, ended, came twice, brought another shape or did not come in time.
        """
        with self._changed:
            if again := sorted(self._given.keys() & parts.keys()):
                self.abort(f"member {again[0]} came twice to one all-reduce")
            self._refuse_broken()
            turn = self._turn
            self._given.update(parts)
            self._refuse_to_wait_in_vain()
            if len(self._given) == self.size:
                self._finish_turn()
            elif not self._changed.wait_for(lambda: self._turn != turn or self._broken is not None, self.timeout):
                missing = ", ".join(str(other) for other in range(self.size) if other not in self._given)
                self.abort(f"member(s) {missing} did not come within {self.timeout:g} s")
            # A turn that was completed stands, even if the group broke before this member woke up.
            if self._turn == turn:
                self._refuse_broken()
            return self._total.clone()

    def _finish_turn(self) -> None:
        parts = [self._given[number] for number in range(self.size)]
        if len({(part.shape, part.dtype) for part in parts}) > 1:
            shapes = ", ".join(f"{tuple(part.shape)} {part.dtype}" for part in parts)
            self.abort(f"members are out of step, they brought {shapes}")
            return
        try:
            self._total = self._add_up(parts)
        except GroupBrokenError as error:
            self.abort(str(error))
            return
        self._given = {}
        self._turn += 1
        self._changed.notify_all()

    def _add_up(self, parts: list[Tensor]) -> Tensor:
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def _refuse_to_wait_in_vain(self) -> None:
        if self._given and (missing := sorted(self._left - self._given.keys())):
            self.abort(f"member(s) {', '.join(map(str, missing))} ended without coming to this sum")

    def _refuse_broken(self) -> None:
        if self._broken is not None:
            raise GroupBrokenError(f"the group of {self.size} is broken: {self._broken}")


class _Member:
    """A ``ReduceGroup`` that knows its number."""

    def __init__(self, group: LocalGroup, number: int) -> None:
        self._group, self._number, self.size = group, number, group.size

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """See ``ReduceGroup.all_reduce_sum``."""
        return self._group.add({self._number: tensor})
