"""SCAFFOLD's control variates (Karimireddy et al. 2020, Algorithm 1, option II)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedstrata.base.errors import SpecError
from fedstrata.base.records import Tree
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import Extra, FitReply, Params, Weights
from fedstrata.models.model import Model
from fedstrata.objectives.base import Context, Objective, Trained


class Scaffold(Objective):
    """Steps w ← w − η (g − c_k + c); then c_k⁺ = c_k − c + (w_t − w) / (K η) and c ← c + (|S|/N) mean Δc.

    K is the number of steps really taken. The identity behind c_k⁺ holds for plain steps alone, so momentum and
    clipping are refused instead of being silently wrong.
    """

    additive = frozenset({"delta_c"})

    def check(self, config: FederationConfig) -> None:
        """Only plain SGD steps."""
        training = config.training
        if training.momentum > 0:
            raise SpecError("training.momentum", "SCAFFOLD's control variates need plain SGD; use 0", training.momentum)
        if training.clip is not None:
            raise SpecError("training.clip", "SCAFFOLD's control variates need unclipped gradients", training.clip)

    @property
    def sends(self) -> str:
        """Δc."""
        return "the change of its control variate, a mean of gradients over its samples"

    def tells_counts(self, config: FederationConfig) -> bool:
        """The model and Δc_k together give K, which tells the samples where it is not the same for all."""
        return config.training.local_steps is None

    def init(self, weights: Weights, config: FederationConfig) -> Tree:
        """The server's c = 0."""
        return {name: torch.zeros_like(w) for name, w in weights.params.items()}

    def message(self, state: Tree) -> Extra:
        """The server's c."""
        return {"c": state}

    def expected(self, weights: Weights, config: FederationConfig) -> Extra:
        """Δc, shaped like the parameters."""
        return {"delta_c": weights.params}

    def server_update(
        self, state: Tree, before: Weights, after: Weights, replies: Sequence[FitReply], clients: int
    ) -> tuple[Tree, Weights]:
        """Sets c ← c + (1/N) Σ_{k∈S} Δc_k."""
        c = dict(state)
        for reply in replies:
            for name, delta in reply.message["delta_c"].items():
                c[name] = c[name] + delta / clients
        return c, after

    def client_init(self, model: Model, context: Context) -> Context:
        """The correction c − c_k is the same at every step."""
        c = context.received["c"]
        mine = context.kept or {name: torch.zeros_like(tensor) for name, tensor in c.items()}
        return context.deriving(mine=mine, correction={name: c[name] - mine[name] for name in c})

    def correction(self, params: Params, context: Context) -> Params | None:
        """The constant c − c_k."""
        correction: Params = context.derived["correction"]
        return correction

    def client_final(self, trained: Trained, context: Context) -> tuple[Extra, Tree]:
        """Δc_k = c_k⁺ − c_k, and c_k⁺ stays with the client."""
        mine: Params = context.derived["mine"]
        if trained.steps == 0:
            return {"delta_c": {name: torch.zeros_like(tensor) for name, tensor in mine.items()}}, mine
        scale = 1 / (trained.steps * context.lr)
        ahead: Params = context.derived["correction"]
        new = {n: (context.start[n] - w) * scale - ahead[n] for n, w in trained.params.items()}
        return {"delta_c": {name: new[name] - mine[name] for name in new}}, new
