"""Aggregate with rescaled updates: each client's update, or the combined update, is multiplied by a factor."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from pydantic import PositiveFloat
from typing_extensions import override

from fedstrata.aggregation.base import Mean, MeanBySize, squared_norm, weighted_update
from fedstrata.base.arrays import Floats, Ints
from fedstrata.base.errors import SpecError
from fedstrata.base.records import Tree
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import FitReply, Params, Weights
from fedstrata.federation.secure.fit import EQUAL, Bounds, Numbers, Summands, Sums, Weight
from fedstrata.sampling.base import ClientSampler, Selection

SQUARES = 4096.0
"""Maximum squared norm of an update in secure sums, as a multiple of the square of ``privacy.range``."""


class Normalised(MeanBySize):
    """A weighted mean of the updates that corrects for different numbers of local steps (FedNova).

    Client k, which takes τ_k steps, has the weight p_k (Σ_j p_j τ_j) / τ_k. Here, p_k is the client's weight in the
    aggregator ``size``. With momentum, τ_k is replaced by the total weight of all gradients in the update (see
    ``gradient_weights``). The gradient includes weight decay, and terms that an objective adds to the loss. In the
    authors' program, unlike here, FedProx's term affects how much each gradient counts in the update. BatchNorm's
    buffers are averaged with the weights p_k.
    """

    needs_replies = ""

    @override
    def check(self, config: FederationConfig, sampler: ClientSampler) -> None:
        training = config.training
        if not training.optimizer.is_sgd:
            problem = "the aggregator 'fednova' works only with SGD. Use 'sgd', or another aggregator."
            raise SpecError("training.optimizer", problem, training.optimizer.label)
        if training.optimizer_state == "keep":
            problem = (
                "the aggregator 'fednova' cannot correct for momentum from earlier rounds. Use 'reset', or another "
                "aggregator."
            )
            raise SpecError("training.optimizer_state", problem, "keep")

    @override
    def init(self, config: FederationConfig) -> Tree:
        return {"server": None, "momentum": config.training.momentum}

    @override
    def combine(
        self, weights: Weights, state: Tree, selection: Selection, replies: Mapping[int, FitReply]
    ) -> tuple[Weights, Tree]:
        answers = list(replies.values())
        returned = np.searchsorted(selection.clients, np.fromiter(replies, dtype=np.int64))
        p = self.weigh(selection, returned, answers)
        if not p.any():
            return weights, state
        length = gradient_weights(np.array([reply.steps for reply in answers]), state["momentum"])
        a = p * (p @ length) / np.maximum(length, 1)
        update = weighted_update(weights.params, [reply.weights.params for reply in answers], a)
        weights, server = self.step(weights, update, state["server"], selection, answers, p)
        return weights, {**state, "server": server}

    @override
    def summands(self, bounds: Bounds) -> Summands:
        momentum, weight = bounds.config.training.momentum, bounds.by_size
        longest = max(gradient_weights(np.array([bounds.steps]), momentum).item(), 1.0)

        def length(reply: FitReply) -> float:
            return gradient_weights(np.array([reply.steps]), momentum).item()

        def lengths(sent: Weights, reply: FitReply) -> Params:
            return {"length": torch.tensor([length(reply)], dtype=torch.float64)}

        like = {"length": torch.zeros(1, dtype=torch.float64)}
        per_step = Weight("samples", lambda reply: weight.of(reply) / max(length(reply), 1.0), weight.largest)
        summed = bounds.updates(per_step) | {"length": Numbers(lengths, like, longest, weight, needs_model=False)}
        return super().summands(bounds) | summed

    @override
    def combine_sums(self, weights: Weights, state: Tree, selection: Selection, sums: Sums) -> tuple[Weights, Tree]:
        if not (total := sums.weight(self.share)):
            return weights, state
        # The update is τ_eff Σ (n_k / n) Δ_k / τ_k. Here, ``total`` is n, and ``length`` is τ_eff = Σ (n_k / n) τ_k.
        length = sums.number("length") / total
        update = sums.updates(self.share, weights.params, total / length if length else math.inf)
        weights, server = self.step_sums(weights, update, state["server"], selection, sums)
        return weights, {**state, "server": server}


def gradient_weights(steps: Ints, momentum: float) -> Floats:
    """Return the total weight of all gradients in an update, for SGD with momentum.

    Without momentum, every gradient has the weight 1. With momentum ρ, a gradient also contributes to all later steps,
    with the weights ρ, ρ², and so on.

    >>> gradient_weights(np.array([0, 1, 2, 3]), 0.5).tolist()
    [0.0, 1.0, 2.5, 4.25]
    """
    result: Floats = (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
    return result


class Extrapolated(Mean):
    """The mean update, multiplied by a factor that is larger if the updates differ more (FedExP).

    The factor is η = max(1, Σ_k ‖Δ_k‖² / (2 m (‖Δ̄‖² + ε))), where Δ̄ is the mean of the m updates Δ_k.

    For m orthogonal updates of equal length and ε = 0, η = m / 2. A client that was drawn twice has twice the weight.
    The norms include all parameters, but not BatchNorm's buffers. The model that is evaluated and saved is the average
    of the last two global models. The authors' program also weights updates by numbers of samples, and
    multiplies ε by m and by the square of the clients' learning rate.

    Args:
        eps: Constant ε that limits the factor when the mean update is near zero.
    """

    needs_replies = ""

    eps: PositiveFloat = 1e-3

    @override
    def init(self, config: FederationConfig) -> Tree:
        return {"server": None, "updates": 0, "before": {}}

    @override
    def combine(
        self, weights: Weights, state: Tree, selection: Selection, replies: Mapping[int, FitReply]
    ) -> tuple[Weights, Tree]:
        if not replies:
            return weights, state
        answers = list(replies.values())
        returned = np.searchsorted(selection.clients, np.fromiter(replies, dtype=np.int64))
        a = self.weigh(selection, returned, answers)
        models = [reply.weights.params for reply in answers]
        mean = weighted_update(weights.params, models, a)
        squares = [squared_norm({name: model[name] - w for name, w in weights.params.items()}) for model in models]
        update = self._extrapolated(mean, float(a @ squares))
        after, server = self.step(weights, update, state["server"], selection, answers, a)
        return after, self._next_state(weights, state, server)

    def _extrapolated(self, mean: Params, square: float) -> Params:
        """Return the mean update multiplied by the factor η.

        Args:
            mean: The mean update Δ̄.
            square: The mean of ‖Δ_k‖².
        """
        eta = max(1.0, square / (2 * (squared_norm(mean) + self.eps)))
        return {name: change * eta for name, change in mean.items()}

    def _next_state(self, weights: Weights, state: Tree, server: Tree) -> Tree:
        before = weights.params if state["updates"] else {}
        return {"server": server, "updates": state["updates"] + 1, "before": before}

    @override
    def summands(self, bounds: Bounds) -> Summands:
        (update,) = (each for each in bounds.updates(EQUAL).values() if isinstance(each, Numbers))

        def square(sent: Weights, reply: FitReply) -> Params:
            return {"square": torch.tensor([squared_norm(update.values(sent, reply))], dtype=torch.float64)}

        like = {"square": torch.zeros(1, dtype=torch.float64)}
        return super().summands(bounds) | {"square": Numbers(square, like, SQUARES * update.range**2)}

    @override
    def combine_sums(self, weights: Weights, state: Tree, selection: Selection, sums: Sums) -> tuple[Weights, Tree]:
        mean = sums.updates(self.share, weights.params, sums.clients)
        update = self._extrapolated(mean, sums.number("square") / sums.clients)
        after, server = self.step_sums(weights, update, state["server"], selection, sums)
        return after, self._next_state(weights, state, server)

    @override
    def evaluated(self, weights: Weights, state: Tree) -> Weights:
        """Return the average of the last two models, with the buffers of the last model."""
        if not state["before"]:
            return weights
        return Weights({name: (w + state["before"][name]) / 2 for name, w in weights.params.items()}, weights.buffers)
