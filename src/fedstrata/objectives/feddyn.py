"""FedDyn's dynamic regularisation (Acar et al. 2021, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import PositiveFloat

from fedstrata.base.records import Tree
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import Extra, FitReply, Params, Weights
from fedstrata.models.model import Model
from fedstrata.objectives.base import Context, CrossEntropy, Trained


class Dynamic(CrossEntropy):
    """F_k(w) − ⟨λ_k, w⟩ + (α/2) ‖w − w_t‖²; then λ_k ← λ_k − α (w_k − w_t).

    At the server h ← h − (α/N) Σ_{k∈S} (w_k − w_t) and w ← w̄ − h/α, with w̄ the aggregated w_k (their mean in FedDyn).
    N counts all clients, also those that did not return. If no client returns, the model does not change.

    Args:
        alpha: α, the strength. The paper's grid is 0.1, 0.01 and 0.001.
    """

    alpha: PositiveFloat = 0.01

    @property
    def sends(self) -> str:
        """Empty: λ_k stays with the client."""
        return ""

    def init(self, weights: Weights, config: FederationConfig) -> Tree:
        """Return the server's h = 0."""
        return {name: torch.zeros_like(w) for name, w in weights.params.items()}

    def server_update(
        self, state: Tree, before: Weights, after: Weights, replies: Sequence[FitReply], clients: int
    ) -> tuple[Tree, Weights]:
        """Update h, and shift the model by it."""
        if not replies:
            return state, after
        h = dict(state)
        for reply in replies:
            for name, w in reply.weights.params.items():
                h[name] = h[name] - self.alpha / clients * (w - before.params[name])
        shifted = {name: w - h[name] / self.alpha for name, w in after.params.items()}
        return h, Weights(shifted, after.buffers)

    def client_init(self, model: Model, context: Context) -> Context:
        """Load the client's λ_k, 0 the first time."""
        mine = context.kept or {name: torch.zeros_like(w) for name, w in context.start.items()}
        return context.deriving(mine=mine)

    def correction(self, params: Params, context: Context) -> Params | None:
        """Return −λ_k + α (w − w_t)."""
        mine: Params = context.derived["mine"]
        return {name: self.alpha * (w.detach() - context.start[name]) - mine[name] for name, w in params.items()}

    def client_final(self, trained: Trained, context: Context) -> tuple[Extra, Tree]:
        """Return no message, and the new λ_k, which stays with the client."""
        mine: Params = context.derived["mine"]
        return {}, {n: mine[n] - self.alpha * (w - context.start[n]) for n, w in trained.params.items()}
