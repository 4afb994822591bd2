"""Take steps with SGD or PyTorch's optimisers, and keep the state of a client's optimiser between rounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedstrata.base.errors import SpecError
from fedstrata.base.records import Tree, decode, encode
from fedstrata.federation.settings import Training
from fedstrata.models.model import Params

Tensors = list[Tensor] | tuple[Tensor, ...]

OPTIMIZER = "optimizer"
"""The key under which a client's state stores the state of the optimiser."""


class SGD:
    """SGD with momentum: d = clip(g) + λ w; v ← μ v + d; w ← w − η v.

    The gradient g already includes the objective's correction. An ``SGD`` object stores the velocity v, so all steps of
    an object must update the same parameters w.

    Args:
        training: The settings, which contain the momentum μ, the weight decay λ, and the maximum norm of g (``clip``).
        lr: The learning rate η.
    """

    def __init__(self, training: Training, lr: float) -> None:
        self.training, self.lr = training, lr
        self.velocity: list[Tensor] | None = None

    @torch.no_grad()
    def step(self, params: Tensors, gradient: Tensors) -> None:
        """Take one step, which changes the parameters in place.

        Args:
            params: The parameters w.
            gradient: The gradient g, in the shapes of ``params``. The step does not change these tensors, because
                autograd may return one tensor as the gradient of two parameters.
        """
        if self.training.clip is not None:
            gradient = clipped(gradient, self.training.clip)
        if self.training.weight_decay:
            gradient = torch._foreach_add(gradient, params, alpha=self.training.weight_decay)
        if self.training.momentum:
            if self.velocity is None:
                self.velocity = [g.clone() for g in gradient]
            else:
                torch._foreach_mul_(self.velocity, self.training.momentum)
                torch._foreach_add_(self.velocity, gradient)
            gradient = self.velocity
        torch._foreach_add_(params, gradient, alpha=-self.lr)

    def state(self) -> list[Tensor] | None:
        """Return the velocity; None before the first step, or without momentum."""
        return self.velocity


def clipped(gradient: Tensors, limit: float) -> list[Tensor]:
    """Scale down a gradient so that its norm over all tensors is at most ``limit``."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradient)))
    shrinkage = float(torch.clamp(limit / (norm + 1e-12), max=1.0))
    return list(torch._foreach_mul(gradient, shrinkage))


class TorchSteps:
    """Steps of a PyTorch optimiser, with the clipped gradient clip(g).

    The gradient g includes the objective's correction.

    Args:
        training: The settings, which contain the optimiser, its momentum and weight decay, and ``clip``.
        lr: The learning rate η.
        params: The parameters, which the steps change in place.
        kept: An earlier result of ``state``, which is copied; None to start without a state.
    """

    def __init__(self, training: Training, lr: float, params: Tensors, kept: Tree = None) -> None:
        self._clip = training.clip
        self._optimizer = training.optimizer.make(params, lr, training.momentum, training.weight_decay)
        if kept is not None:
            state = {place: _like(params[place], values) for place, values in kept["state"].items()}
            self._optimizer.load_state_dict({**kept, "state": state})
            for group in self._optimizer.param_groups:
                group["lr"] = lr

    @torch.no_grad()
    def step(self, params: Tensors, gradient: Tensors) -> None:
        """Take one step, which changes the parameters in place. See ``SGD.step``."""
        gradient = gradient if self._clip is None else clipped(gradient, self._clip)
        for parameter, part in zip(params, gradient, strict=True):
            parameter.grad = part
        self._optimizer.step()
        self._optimizer.zero_grad()

    def state(self) -> Tree:
        """Return the ``state_dict`` of the PyTorch optimiser."""
        return self._optimizer.state_dict()


def steps_of(training: Training, lr: float, params: Tensors, kept: Tree = None) -> SGD | TorchSteps:
    """Return the optimiser of a client for one round.

    Args:
        training: The settings.
        lr: The learning rate η of the round.
        params: The parameters that the client trains.
        kept: The ``state()`` of the client's optimiser after its previous round; None to begin without a state.
    """
    if not training.optimizer.is_sgd:
        return TorchSteps(training, lr, params, kept)
    sgd = SGD(training, lr)
    if kept is not None:
        sgd.velocity = [_like(w, v) for w, v in zip(params, kept, strict=True)]
    return sgd


def _like(parameter: Tensor, value: Any) -> Any:
    """Copy a value of an optimiser's state to the parameter's device and memory format.

    The memory format affects rounding. When a state is stored or sent, its memory format is lost.
    """
    if isinstance(value, Mapping):
        return {key: _like(parameter, item) for key, item in value.items()}
    if not isinstance(value, Tensor):
        return value
    if value.shape != parameter.shape:
        return value.clone()
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def try_optimizer(training: Training, params: Params) -> None:
    """Take a step on copies of the parameters, to find problems before the first round.

    Args:
        training: The settings.
        params: The parameters that clients train, by name.

    Raises:
        SpecError: The optimiser does not accept its arguments, its step fails, or its state cannot be stored.
    """
    leaves = [w.detach().clone().requires_grad_() for w in params.values()]
    steps = steps_of(training, training.lr, leaves)
    try:
        steps.step(leaves, [torch.ones_like(w) for w in leaves])
    except Exception as error:  # a user's own class may raise any exception
        problem = f"the optimiser's first step fails with {type(error).__name__}: {error}. Use another optimiser."
        raise SpecError("training.optimizer", problem, training.optimizer.label) from error
    if training.optimizer_state == "keep":
        try:
            steps_of(training, training.lr, leaves, decode(encode(steps.state())))
        except Exception as error:
            problem = f"the state of the optimiser {training.optimizer.label} cannot be stored: {error}. Use 'reset'."
            raise SpecError("training.optimizer_state", problem, "keep") from error
