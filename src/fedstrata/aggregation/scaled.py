"""Aggregators that change the length of each client's update, or of the combined update."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from pydantic import PositiveFloat
from typing_extensions import override

from fedstrata.aggregation.base import Mean, MeanBySize, squared_norm, weighted_update
from fedstrata.base.arrays import Floats, Ints
from fedstrata.base.errors import SpecError
from fedstrata.base.records import Tree
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import FitReply, Weights
from fedstrata.sampling.base import ClientSampler, Selection


class Normalised(MeanBySize):
    """Weights a_k = p_k τ_eff / τ_k, where client k took τ_k steps, and τ_eff = Σ p_k τ_k (FedNova).

    The p_k are the weights of the aggregator ``size``. With the momentum ρ of the clients' SGD, τ_k is replaced by the
    sum of the weights that the gradients of all steps have in the update: (τ_k − ρ (1 − ρ^τ_k) / (1 − ρ)) / (1 − ρ).
    Weight decay and terms that an objective adds to the loss count as parts of the gradient. BatchNorm's buffers are
    averaged with p_k.
    """

    @override
    def check(self, config: FederationConfig, sampler: ClientSampler) -> None:
        training = config.training
        if not training.optimizer.is_sgd:
            problem = "the aggregator fednova is defined for steps of SGD. Use 'sgd', or another aggregator."
            raise SpecError("training.optimizer", problem, training.optimizer.label)
        if training.optimizer_state == "keep":
            problem = (
                "the aggregator fednova cannot divide out the momentum of earlier rounds. Use 'reset', or another "
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


def gradient_weights(steps: Ints, momentum: float) -> Floats:
    """Return the sum of the weights that the gradients of all steps have in the update of SGD with momentum.

    Without momentum, every gradient has the weight 1. With momentum ρ, the gradient of a step also counts in each later
    step, with ρ times the weight of the step before.

    >>> gradient_weights(np.array([0, 1, 2, 3]), 0.5).tolist()
    [0.0, 1.0, 2.5, 4.25]
    """
    result: Floats = (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
    return result


class Extrapolated(Mean):
    """The mean update Δ̄, multiplied by η = max(1, Σ_k ‖Δ_k‖² / (2 m (‖Δ̄‖² + ε))) for m replies (FedExP).

    If the updates Δ_k differ more in direction, their mean is shorter, and η is larger. For m orthogonal
    updates of equal length and ε = 0, η = m / 2. A client that was drawn twice counts twice. The norms are over all
    parameters, without BatchNorm's buffers. The average of the last two models is evaluated and saved.

    Args:
        eps: Constant ε that limits η if Δ̄ is short. The authors' program uses 0.001 or 0.1.
    """

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
        eta = max(1.0, float(a @ squares) / (2 * (squared_norm(mean) + self.eps)))
        update = {name: change * eta for name, change in mean.items()}
        after, server = self.step(weights, update, state["server"], selection, answers, a)
        before = weights.params if state["updates"] else {}
        return after, {"server": server, "updates": state["updates"] + 1, "before": before}

    @override
    def evaluated(self, weights: Weights, state: Tree) -> Weights:
        """Return the average of the last two models, with the last one's buffers; after one update, the last model."""
        if not state["before"]:
            return weights
        return Weights({name: (w + state["before"][name]) / 2 for name, w in weights.params.items()}, weights.buffers)
