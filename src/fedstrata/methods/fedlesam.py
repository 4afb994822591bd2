"""The method FedLESAM (Fan et al. 2024)."""

from __future__ import annotations

from pydantic import NonNegativeFloat
from typing_extensions import override

from fedstrata.methods.recipe import Parts, Recipe
from fedstrata.objectives.sharpness import GloballySharpnessAware


class FedLESAM(Recipe):
    """FedAvg whose clients compute each gradient at a point that is shifted towards an earlier global model.

    A step is w ← w − η ∇F_k(w + ρ d / ‖d‖), where d = w_old − w_t (arXiv:2405.18890). Here, w_t is the current global
    model, and w_old is the global model at the start of the client's previous training. Each client stores w_old.
    """

    paper = (
        "Fan et al. 2024, Locally Estimated Global Perturbations are Better than Local Perturbations for Federated "
        "Sharpness-aware Minimization (ICML)"
    )

    rho: NonNegativeFloat = 0.05

    @override
    def parts(self) -> Parts:
        return {"objective": GloballySharpnessAware(rho=self.rho)}
