"""FedDyn's dynamic regularisation (Acar et al. 2021, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import PositiveFloat
from typing_extensions import override

from fedstrata.base.records import Tree
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import Extra, FitReply, Params, Weights
from fedstrata.federation.secure.fit import EQUAL, Bounds, Summands, Sums
from fedstrata.models.model import Model
from fedstrata.objectives.base import Context, CrossEntropy, Trained


class Dynamic(CrossEntropy):
    """Cross-entropy plus a linear and a quadratic regulariser.

    The loss is F_k(w) − ⟨λ_k, w⟩ + (α/2) ‖w − w_t‖², where F_k is the cross-entropy and w_t is the global model. After
    training, client k updates its state, λ_k ← λ_k − α (w_k − w_t), where w_k is its trained model. The server updates
    state and model: h ← h − (α/N) Σ_{k∈S} (w_k − w_t) and w ← w̄ − h/α. The set S contains the clients that replied, N
    is the number of all clients, and w̄ is the aggregated model. If no client replies, the model does not change.

    Args:
        alpha: Strength α of the regulariser. The paper tries 0.1, 0.01 and 0.001.
    """

    single_samples = True
    needs_replies = ""
    needs_sgd = "FedDyn treats the update of a client as a sum of gradients, which is true only for the optimiser SGD"

    alpha: PositiveFloat = 0.01

    @property
    def sends(self) -> str:
        """An empty string, because clients do not send their states λ_k."""
        return ""

    def init(self, weights: Weights, config: FederationConfig) -> Tree:
        """Return the server's initial state, h = 0."""
        return {name: torch.zeros_like(w) for name, w in weights.params.items()}

    def server_update(
        self, state: Tree, before: Weights, after: Weights, replies: Sequence[FitReply], clients: int
    ) -> tuple[Tree, Weights]:
        """Update the server's state h, and subtract h/α from the aggregated model."""
        if not replies:
            return state, after
        h = dict(state)
        for reply in replies:
            for name, w in reply.weights.params.items():
                h[name] = h[name] - self.alpha / clients * (w - before.params[name])
        return h, self._shifted(h, after)

    def _shifted(self, h: Params, after: Weights) -> Weights:
        return Weights({name: w - h[name] / self.alpha for name, w in after.params.items()}, after.buffers)

    @override
    def summands(self, bounds: Bounds) -> Summands:
        return bounds.updates(EQUAL)

    @override
    def server_update_sums(
        self, state: Tree, before: Weights, after: Weights, sums: Sums, clients: int
    ) -> tuple[Tree, Weights]:
        updates = sums.updates(EQUAL.name, before.params)
        h = {name: value - self.alpha / clients * updates[name] for name, value in state.items()}
        return h, self._shifted(h, after)

    def client_init(self, model: Model, context: Context) -> Context:
        """Put the client's state λ_k into ``derived``. In the client's first round, λ_k is 0."""
        dual = context.kept or {name: torch.zeros_like(w) for name, w in context.start.items()}
        return context.deriving(dual=dual)

    def correction(self, params: Params, context: Context) -> Params | None:
        """Return −λ_k + α (w − w_t), the gradient of the two terms that FedDyn adds to the client's loss."""
        dual: Params = context.derived["dual"]
        return {name: self.alpha * (w.detach() - context.start[name]) - dual[name] for name, w in params.items()}

    def client_final(self, trained: Trained, context: Context) -> tuple[Extra, Tree]:
        """Return an empty message, and the client's new state λ_k."""
        dual: Params = context.derived["dual"]
        return {}, {n: dual[n] - self.alpha * (w - context.start[n]) for n, w in trained.params.items()}
