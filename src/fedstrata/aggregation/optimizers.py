"""Update the global model with the server's optimiser, which gets the clients' combined update or gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator
from torch import Tensor

from fedstrata.base.config import Setting, from_word
from fedstrata.base.errors import SpecError
from fedstrata.base.records import Tree
from fedstrata.federation.messages import Params
from fedstrata.federation.settings import scheduled

Beta = Annotated[float, Field(ge=0, lt=1)]
BETAS = (0.9, 0.99)


class ServerOptimizer(Setting):
    """The server's optimiser: SGD with momentum, or an adaptive optimiser (Reddi et al. 2021).

    The gradient g is the negative update. An adaptive optimiser starts with m = 0 and v = τ². Each step computes m ← β₁
    m + (1 − β₁) g, then the new v, and then w ← w − η m / (√v + τ). Adam sets v ← β₂ v + (1 − β₂) g². Yogi sets v ← v −
    (1 − β₂) g² sign(v − g²). Adagrad sets v ← v + g², and has β₁ = 0. Unlike PyTorch's Adam, fedstrata's adaptive
    optimisers have no bias correction.

    Args:
        optimizer: Type of optimiser: ``sgd`` (FedAvgM if ``momentum`` is set), ``adam`` (FedAdam), ``yogi`` (FedYogi)
            or ``adagrad`` (FedAdagrad).
        lr: Learning rate of the server optimiser. Default: 1 for ``sgd``, otherwise 0.01.
        schedule: Schedule of the server's learning rate: ``inverse`` or ``cosine``, as in ``training.schedule``.
            Default: constant.
        momentum: Momentum of ``sgd``.
        betas: Decay rates β₁ (first moment) and β₂ (second moment) of ``adam`` and ``yogi``.
        eps: Constant τ that ``adam``, ``adagrad`` and ``yogi`` add to the denominator of each step.
        weight_decay: Factor of the L2 penalty on the global model's parameters.
    """

    optimizer: Literal["sgd", "adam", "adagrad", "yogi"] = "sgd"
    lr: PositiveFloat | None = None
    schedule: Literal["inverse", "cosine"] | None = None
    momentum: float = Field(default=0.0, ge=0, lt=1)
    betas: tuple[Beta, Beta] = BETAS
    eps: PositiveFloat = 1e-3
    weight_decay: NonNegativeFloat = 0.0

    @model_validator(mode="after")
    def _refuse_settings_without_effect(self) -> Self:
        if self.momentum and self.optimizer != "sgd":
            problem = f"has an effect only with optimizer = 'sgd', not with {self.optimizer!r}. Remove the key."
            raise SpecError("momentum", problem, self.momentum)
        if self.betas != BETAS and self.optimizer not in ("adam", "yogi"):
            problem = (
                f"has an effect only with optimizer = 'adam' or 'yogi', not with {self.optimizer!r}. Remove the key."
            )
            raise SpecError("betas", problem, self.betas)
        return self

    @property
    def rate(self) -> float:
        """The server's learning rate η."""
        return self.lr or (1.0 if self.optimizer == "sgd" else 0.01)

    def apply(
        self, params: Params, update: Params, state: Tree, round: int = 1, rounds: int = 1
    ) -> tuple[Params, Tree]:
        """Take one step with ``update`` as the negative gradient, and return the new parameters and the new state.

        If a schedule is set, the learning rate depends on ``round`` (counted from 1) and ``rounds`` (the total number
        of rounds).
        """
        lr = None if self.schedule is None else scheduled(self.rate, self.schedule, round, rounds)
        if self.optimizer == "sgd" and self.momentum == 0 and self.weight_decay == 0:
            alpha = (self.lr or 1.0) if lr is None else lr
            return {name: w.add(update[name], alpha=alpha) for name, w in params.items()}, None
        stepper = Stepper(self, params, state, lr)
        stepper.step({name: -delta for name, delta in update.items()})
        return stepper.params, stepper.state()


AnyServer = Annotated[ServerOptimizer, from_word(ServerOptimizer, "optimizer")]


class Stepper:
    """A server optimiser that changes its own copy of the parameters step by step.

    This class does not use PyTorch's optimisers, which take seconds to import and differ from the paper's optimisers.

    Args:
        settings: The optimiser's settings.
        params: The initial parameters, which are copied.
        state: A state that ``Stepper.state`` returned earlier; None to start without a state.
        lr: The learning rate. Default: the learning rate in ``settings``.
    """

    def __init__(self, settings: ServerOptimizer, params: Params, state: Tree, lr: float | None = None) -> None:
        self.settings, self._lr = settings, settings.rate if lr is None else lr
        self.params: Params = {name: w.detach().clone() for name, w in params.items()}
        """The current parameters. Each step changes these parameters in place."""
        state = state or {}
        self._first: list[Tensor] = [tensor.clone() for tensor in state.get("first", ())]
        self._second: list[Tensor] = [tensor.clone() for tensor in state.get("second", ())]

    @torch.no_grad()
    def step(self, gradient: Params, samples: float = 1) -> None:
        """Take one step with the gradient g = ``gradient / samples``. The argument ``gradient`` is a sum over samples.

        A step of SGD is v ← momentum · v + g and w ← w − η v. To save a pass over memory, the division by
        ``samples`` is part of the last operation, if possible.
        """
        weights, total, n = list(self.params.values()), [gradient[name] for name in self.params], float(samples)
        if self.settings.weight_decay:
            total, n = list(torch._foreach_div(total, n)), 1.0
            torch._foreach_add_(total, weights, alpha=self.settings.weight_decay)
        if self.settings.optimizer != "sgd":
            self._adaptive(weights, torch._foreach_div(total, n))
            return
        if self.settings.momentum:
            if self._first:
                torch._foreach_mul_(self._first, self.settings.momentum)
                torch._foreach_add_(self._first, total, alpha=1 / n)
            else:
                self._first = list(torch._foreach_div(total, n))
            total, n = self._first, 1.0
        torch._foreach_add_(weights, total, alpha=-self._lr / n)

    def _adaptive(self, weights: list[Tensor], gradient: Sequence[Tensor]) -> None:
        rule, tau = self.settings.optimizer, self.settings.eps
        beta1, beta2 = (0.0, 1.0) if rule == "adagrad" else self.settings.betas
        if not self._second:
            self._first = [torch.zeros_like(w) for w in weights]
            self._second = [torch.full_like(w, tau**2) for w in weights]
        for w, m, v, g in zip(weights, self._first, self._second, gradient, strict=True):
            m.mul_(beta1).add_(g, alpha=1 - beta1)
            square = g.square()
            if rule == "yogi":
                v.sub_((1 - beta2) * square * torch.sign(v - square))
            elif rule == "adam":
                v.mul_(beta2).add_(square, alpha=1 - beta2)
            else:
                v.add_(square)
            w.sub_(self._lr * m / (v.sqrt() + tau))

    def state(self) -> Tree:
        """Return the state for a later stepper: two lists of tensors in the order of the parameters.

        The list ``first`` contains the velocity of ``sgd``, or m of an adaptive optimiser. The list ``second`` contains
        v of an adaptive optimiser, and is empty for ``sgd``.
        """
        return {"first": [m.clone() for m in self._first], "second": [v.clone() for v in self._second]}
