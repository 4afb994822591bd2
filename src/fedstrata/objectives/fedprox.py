"""FedProx's proximal term (Li et al. 2020, Eq. 2)."""

from __future__ import annotations

from pydantic import NonNegativeFloat

from fedstrata.federation.messages import Params
from fedstrata.objectives.base import Context, Objective


class Proximal(Objective):
    """F_k(w) + (μ/2) ‖w − w_t‖², over the parameters, without buffers.

    Args:
        mu: μ, the strength; 0 is plain cross-entropy.
    """

    mu: NonNegativeFloat = 0.01

    def correction(self, params: Params, context: Context) -> Params | None:
        """Return μ (w − w_t)."""
        return {name: self.mu * (w.detach() - context.start[name]) for name, w in params.items()}
