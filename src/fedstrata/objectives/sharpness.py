"""The sharpness-aware objectives of FedSAM and FedLESAM, which compute gradients at a point near w."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property

import torch
from pydantic import NonNegativeFloat

from fedstrata.base.records import Tree
from fedstrata.federation.messages import Extra, Params
from fedstrata.models.model import Model
from fedstrata.objectives.base import Context, Objective, Trained

TINY = 1e-12
"""A constant that is added to norms, to prevent division by 0."""


def scaled(direction: Mapping[str, torch.Tensor], length: float) -> Params:
    """Scale tensors so that their joint norm is ``length``. Zero tensors stay unchanged.

    >>> scaled({"a": torch.tensor([3.0]), "b": torch.tensor([0.0, 4.0])}, 0.5)
    {'a': tensor([0.3000]), 'b': tensor([0.0000, 0.4000])}
    """
    # Convert all tensors to one memory format. The order of a sum depends on the format, and checkpoints do not store
    # the format, so a resumed run would round differently.
    parts = [part.contiguous() for part in direction.values()]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(parts)))
    return dict(zip(direction, torch._foreach_mul(parts, length / (norm + TINY)), strict=True))


class SharpnessAware(Objective):
    """The task's loss, with gradients at w + ρ g / ‖g‖, where g is the batch's gradient at w.

    The norm includes all parameters that the client trains. A step is w ← w − η ∇F_k(w + ρ g / ‖g‖). Training thus
    prefers flat minima of the client's loss. A client computes two gradients per step.

    Args:
        rho: Distance ρ between the parameters w and the point at which gradients are computed.
    """

    rho: NonNegativeFloat = 0.05

    @cached_property
    def gradients_per_step(self) -> int:
        """The number of gradients that a client computes on the batch of each step: two, or one if ρ is 0."""
        return 2 if self.rho else 1

    def displacement(self, params: Params, gradient: Callable[[], Params], context: Context) -> Params | None:
        """Return δ = ρ g / ‖g‖, the gradient g scaled to the length ρ; None if ρ is 0."""
        return scaled(gradient(), self.rho) if self.rho else None


class GloballySharpnessAware(Objective):
    """The task's loss, with gradients at a point that is shifted towards an earlier global model.

    The gradient for a step from w is computed at w + ρ d / ‖d‖, where d = w_old − w_t and w_t is the current global
    model. The earlier model w_old is from the most recent round in which the server used the client's reply. The
    difference d estimates the direction in which the loss over all clients grows. A client computes one gradient
    per step, and stores w_old. A client's first round is the same as in FedAvg. The norm includes all parameters that
    the client trains.

    This implementation follows the paper. In the authors' program, the server sends the most recent change of the
    global model to all clients. In each tensor of this change, the clients replace all entries by a single number.

    Args:
        rho: Distance ρ between the parameters w and the point at which gradients are computed.
    """

    rho: NonNegativeFloat = 0.05

    @property
    def sends(self) -> str:
        """In subclasses that combine two objectives, the description of the other objective's message."""
        return super().sends

    def client_init(self, model: Model, context: Context) -> Context:
        """Add the displacement, which is the same at every step, to ``derived``."""
        kept = context.kept or {}
        prepared = super().client_init(model, replace(context, kept=kept.get("other")))
        displacement = None
        if "start" in kept and self.rho:
            old = kept["start"]
            change = {name: old[name] - w for name, w in context.start.items() if self.trains(name, model)}
            displacement = scaled(change, self.rho)
        return prepared.deriving(displacement=displacement)

    def displacement(self, params: Params, gradient: Callable[[], Params], context: Context) -> Params | None:
        """Return ρ (w_old − w_t) / ‖w_old − w_t‖; None in the client's first round."""
        displacement: Params | None = context.derived["displacement"]
        return displacement

    def client_final(self, trained: Trained, context: Context) -> tuple[Extra, Tree]:
        """Store w_t in the client's state.

        A subclass that combines two objectives also returns the other objective's message and state.
        """
        message, other = super().client_final(trained, context)
        return message, {"start": context.start, "other": other}
