"""Compute gradients at a point other than the current parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedstrata.clients.training.steps import Tensors
from fedstrata.federation.messages import Params
from fedstrata.models.model import Model
from fedstrata.objectives.base import Batch, Context, Objective

BatchGradient = Callable[[Batch], tuple[Tensor, Tensors]]
"""A function that returns the mean loss over a batch, and the gradient of this loss for each trained parameter."""


@dataclass(frozen=True)
class DisplacedGradient:
    """The gradient at w + δ, where δ is the objective's ``displacement``.

    The loss is computed at w if the objective needs the gradient at w, and otherwise at w + δ. If a batch passes
    through the model twice, only the first pass updates buffers, such as BatchNorm's statistics.

    Args:
        of_batch: A function that returns the loss and the gradient at the current values of the parameters.
        objective: The objective.
        params: The trained parameters w. The computation of a gradient changes w in place, and then restores w exactly.
        context: The context that the objective gets as an argument.
        model: The model into which w is loaded; None if the gradient is computed without a model (and so without
            buffers).
    """

    of_batch: BatchGradient
    objective: Objective
    params: Params
    context: Context
    model: Model | None

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensors]:
        """Return the mean loss over a batch, and the gradient at w + δ."""
        at_start: list[tuple[Tensor, Tensors]] = []

        def gradient() -> Params:
            if not at_start:
                at_start.append(self.of_batch(batch))
            return dict(zip(self.params, at_start[0][1], strict=True))

        start = {name: w.detach() for name, w in self.params.items()}
        displacement = self.objective.displacement(start, gradient, self.context)
        if displacement is None:
            return at_start[0] if at_start else self.of_batch(batch)
        leaves, kept = list(self.params.values()), [w.clone() for w in start.values()]
        buffers = self.model.current_buffers() if self.model is not None and at_start else {}
        with torch.no_grad():
            torch._foreach_add_(leaves, [displacement[name] for name in self.params])
        loss, displaced = self.of_batch(batch)
        with torch.no_grad():
            torch._foreach_copy_(leaves, kept)
        if self.model is not None and at_start:
            self.model.untrained.restore(buffers)
        return (at_start[0][0] if at_start else loss), displaced
