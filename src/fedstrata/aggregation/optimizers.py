"""Server optimisers: what the server does with a combined update or gradient."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from fedstrata.config import Setting
from fedstrata.federation.messages import Params
from fedstrata.records import Tree


class ServerOptimizer(Setting):
    """An optimiser of PyTorch's (and Yogi) at the server.

    Args:
        optimizer: ``sgd`` (with ``momentum``: FedAvgM), ``adam`` (FedAdam), ``adagrad`` (FedAdagrad) or ``yogi``
            (FedYogi, Reddi et al. 2021).
        lr: The server's learning rate. 1 with plain SGD applies the update as it is.
        momentum: Of SGD.
        betas: Of Adam and Yogi.
        eps: Of the adaptive ones, τ.
        weight_decay: L2 penalty, added to the gradient.
    """

    optimizer: Literal["sgd", "adam", "adagrad", "yogi"] = "sgd"
    lr: PositiveFloat = 1.0
    momentum: float = Field(default=0.0, ge=0, lt=1)
    betas: tuple[float, float] = (0.9, 0.99)
    eps: PositiveFloat = 1e-3
    weight_decay: NonNegativeFloat = 0.0

    def apply(self, params: Params, update: Params, state: Tree) -> tuple[Params, Tree]:
        """One step along an update (the negative gradient)."""
        if self.optimizer == "sgd" and self.momentum == 0 and self.weight_decay == 0:
            return {name: w.add(update[name], alpha=self.lr) for name, w in params.items()}, None
        stepper = Stepper(self, params, state)
        stepper.step({name: -delta for name, delta in update.items()})
        return stepper.params(), stepper.state()


class Stepper:
    """A server optimiser at work on parameters of its own.

    Args:
        settings: Which optimiser.
        params: Where it starts; they are copied.
        state: What an earlier stepper's ``state()`` gave, or None.
        lr: Learning rate instead of the settings'.
    """

    def __init__(self, settings: ServerOptimizer, params: Params, state: Tree, lr: float | None = None) -> None:
        self.settings, self._lr = settings, settings.lr if lr is None else lr
        self._leaves = {name: w.detach().clone().requires_grad_(True) for name, w in params.items()}
        self._views = {name: leaf.detach() for name, leaf in self._leaves.items()}
        self._velocity: list[Tensor] = []
        self._optimizer: torch.optim.Optimizer | None = None
        if settings.optimizer == "sgd":
            # By hand: PyTorch's own optimisers load its compiler, which takes seconds, and cost more than the sums.
            self._velocity = [tensor.clone() for tensor in state or ()]
            return
        self._optimizer = _make(settings, list(self._leaves.values()), self._lr)
        if state:
            groups = self._optimizer.state_dict()["param_groups"]
            # Copies: PyTorch would go on in the very tensors of the state that it is given.
            own = {place: {key: _copy(value) for key, value in entries.items()} for place, entries in state.items()}
            self._optimizer.load_state_dict({"state": own, "param_groups": groups})

    def step(self, gradient: Params, samples: int = 1) -> None:
        """One step along a gradient, or along a sum of gradients divided by the number of its samples."""
        if self._optimizer is None:
            self._sgd([gradient[name] for name in self._leaves], float(samples))
            return
        for name, leaf in self._leaves.items():
            leaf.grad = gradient[name] if samples == 1 else gradient[name] / samples
        self._optimizer.step()

    @torch.no_grad()
    def _sgd(self, gradient: list[Tensor] | tuple[Tensor, ...], samples: float) -> None:
        """One step: v ← momentum v + g; w ← w − η v. Division is left to the last sum, or costs a pass over memory."""
        leaves = list(self._leaves.values())
        if self.settings.weight_decay:
            gradient, samples = torch._foreach_div(gradient, samples), 1.0
            torch._foreach_add_(gradient, leaves, alpha=self.settings.weight_decay)
        if self.settings.momentum:
            if self._velocity:
                torch._foreach_mul_(self._velocity, self.settings.momentum)
                torch._foreach_add_(self._velocity, gradient, alpha=1 / samples)
            else:
                self._velocity = list(torch._foreach_div(gradient, samples))
            gradient, samples = self._velocity, 1.0
        torch._foreach_add_(leaves, gradient, alpha=-self._lr / samples)

    def params(self) -> Params:
        """The parameters now. They are the stepper's own: later steps change them."""
        return dict(self._views)

    def state(self) -> Tree:
        """The optimiser's memory: SGD's velocities, or PyTorch's state by the parameter's place."""
        if self._optimizer is None:
            return [tensor.clone() for tensor in self._velocity]
        found: dict[int, Any] = self._optimizer.state_dict()["state"]
        return {place: dict(entries) for place, entries in found.items()}


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _make(settings: ServerOptimizer, leaves: list[Tensor], lr: float) -> torch.optim.Optimizer:
    decay = settings.weight_decay
    if settings.optimizer == "adam":
        return torch.optim.Adam(leaves, lr=lr, betas=settings.betas, eps=settings.eps, weight_decay=decay)
    if settings.optimizer == "adagrad":
        return torch.optim.Adagrad(leaves, lr=lr, eps=settings.eps, weight_decay=decay)
    return Yogi(leaves, lr, settings.betas, settings.eps, decay)


class Yogi(torch.optim.Optimizer):
    """Yogi (Zaheer et al. 2018) as FedYogi uses it: v ← v − (1 − β₂) g² sign(v − g²), no bias correction."""

    def __init__(
        self, params: list[Tensor], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step along the gradients."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                g = p.grad + group["weight_decay"] * p
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.full_like(p, group["eps"] ** 2)
                m, v = state["m"], state["v"]
                m.mul_(beta1).add_(g, alpha=1 - beta1)
                v.sub_((1 - beta2) * g.square() * torch.sign(v - g.square()))
                p.sub_(group["lr"] * m / (v.sqrt() + group["eps"]))
