"""FedProx's proximal term (Li et al. 2020, Eq. 2)."""

from __future__ import annotations

from pydantic import NonNegativeFloat

from fedstrata.federation.messages import Params
from fedstrata.objectives.base import Context, Objective


class Proximal(Objective):
    """The task's loss plus the proximal term (μ/2) ‖w − w_t‖², where w_t is the global model.

    Args:
        mu: Strength μ of the proximal term.
    """

    single_samples = True
    mu: NonNegativeFloat = 0.01

    def correction(self, params: Params, context: Context) -> Params | None:
        """Return μ (w − w_t), the gradient of the proximal term."""
        return {name: self.mu * (w.detach() - context.start[name]) for name, w in params.items()}
