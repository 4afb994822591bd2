"""SCAFFOLD's control variates (Karimireddy et al. 2020, Algorithm 1, option II)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import override

from fedstrata.base.errors import SpecError
from fedstrata.base.records import Tree
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import Extra, FitReply, Params, Weights
from fedstrata.federation.secure.fit import Bounds, Numbers, Summands, Sums
from fedstrata.models.model import Model
from fedstrata.objectives.base import Context, Objective, Trained


class Scaffold(Objective):
    """The task's loss. Client k adds c − c_k (the server's minus the client's control variate) to each gradient.

    The control variate c belongs to the server, and c_k belongs to client k. A step with gradient g is w ← w − η (g −
    c_k + c). After K steps from w_t, the client sets c_k⁺ = c_k − c + (w_t − w) / (K η) and sends Δc_k = c_k⁺ − c_k.
    The server then sets c ← c + (1/N) Σ_{k∈S} Δc_k. The set S contains the clients that replied, and N is the number of
    all clients. The formula for c_k⁺ holds only for plain SGD, so momentum, clipping and other optimisers are not
    allowed.
    """

    single_samples = True
    needs_sgd = "SCAFFOLD's control variates are mean gradients only if every step is a plain SGD step"
    additive = frozenset({"delta_c"})
    needs_replies = ""

    def check(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` for momentum or clipping, because the formula for c_k⁺ would be wrong."""
        training = config.training
        if training.momentum > 0:
            problem = "SCAFFOLD's control variates require plain SGD. Set training.momentum = 0."
            raise SpecError("training.momentum", problem, training.momentum)
        if training.clip is not None:
            raise SpecError(
                "training.clip",
                "SCAFFOLD's control variates require unclipped gradients. Remove the key.",
                training.clip,
            )

    @property
    def sends(self) -> str:
        """A description of the message Δc_k, the change of the client's control variate."""
        return "the change of its control variate, a mean of gradients over its samples"

    def tells_counts(self, config: FederationConfig) -> bool:
        """Return True if the number of local steps K depends on a client's number of samples.

        The server can compute K from the client's model and Δc_k, and then the number of samples from K.
        """
        return config.training.local_steps is None

    def init(self, weights: Weights, config: FederationConfig) -> Tree:
        """Return the server's initial control variate, c = 0."""
        return {name: torch.zeros_like(w) for name, w in weights.params.items()}

    def message(self, state: Tree) -> Extra:
        """Return the server's control variate c."""
        return {"c": state}

    def expected(self, weights: Weights, config: FederationConfig) -> Extra:
        """Return an example of a client's message: Δc_k has the names, shapes and dtypes of the parameters."""
        return {"delta_c": weights.params}

    def server_update(
        self, state: Tree, before: Weights, after: Weights, replies: Sequence[FitReply], clients: int
    ) -> tuple[Tree, Weights]:
        """Add the clients' changes Δc_k, divided by the number of all clients, to the control variate c."""
        c = dict(state)
        for reply in replies:
            for name, delta in reply.message["delta_c"].items():
                c[name] = c[name] + delta / clients
        return c, after

    @override
    def summands(self, bounds: Bounds) -> Summands:
        return {"delta_c": Numbers(_change, bounds.params, bounds.config.privacy.message_range)}

    @override
    def server_update_sums(
        self, state: Tree, before: Weights, after: Weights, sums: Sums, clients: int
    ) -> tuple[Tree, Weights]:
        changes = sums.of("delta_c", clients)
        return {name: c + changes[name] if name in changes else c for name, c in state.items()}, after

    def client_init(self, model: Model, context: Context) -> Context:
        """Put the client's control variate c_k and the correction c − c_k into ``derived``."""
        c = context.received["c"]
        c_k = context.kept or {name: torch.zeros_like(tensor) for name, tensor in c.items()}
        return context.deriving(c_k=c_k, correction={name: c[name] - c_k[name] for name in c})

    def correction(self, params: Params, context: Context) -> Params | None:
        """Return the difference c − c_k of the control variates, which is constant during training."""
        correction: Params = context.derived["correction"]
        return correction

    def client_final(self, trained: Trained, context: Context) -> tuple[Extra, Tree]:
        """Return the change of the client's control variate (the message), and the new control variate (the state)."""
        c_k: Params = context.derived["c_k"]
        if trained.steps == 0:
            return {"delta_c": {name: torch.zeros_like(tensor) for name, tensor in c_k.items()}}, c_k
        scale = 1 / (trained.steps * context.lr)
        correction: Params = context.derived["correction"]
        new = {n: (context.start[n] - w) * scale - correction[n] for n, w in trained.params.items()}
        return {"delta_c": {name: new[name] - c_k[name] for name in new}}, new


def _change(sent: Weights, reply: FitReply) -> Params:
    return reply.message["delta_c"]
