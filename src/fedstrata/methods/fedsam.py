"""The method FedSAM (Qu et al. 2022)."""

from __future__ import annotations

from pydantic import NonNegativeFloat
from typing_extensions import override

from fedstrata.methods.recipe import Parts, Recipe
from fedstrata.objectives.sharpness import SharpnessAware


class FedSAM(Recipe):
    """FedAvg whose clients compute each gradient at a nearby point where the loss of the batch is higher.

    A step is w ← w − η ∇F_k(w + ρ g / ‖g‖), where g is the gradient of the batch at w (Algorithm 1 of
    arXiv:2206.02618). Clients compute two gradients per step.
    """

    paper = "Qu et al. 2022, Generalized Federated Learning via Sharpness Aware Minimization (ICML)"

    rho: NonNegativeFloat = 0.05

    @override
    def parts(self) -> Parts:
        return {"objective": SharpnessAware(rho=self.rho)}
