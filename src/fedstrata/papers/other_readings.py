"""Define variants of methods that may explain differences between our results and a paper's results.

Some variants do what published code does. A spec selects a variant by its path:
``name = "fedstrata.papers.other_readings:PublishedSCAFFOLD"``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from pydantic import Field
from typing_extensions import override

from fedstrata.base.records import Tree
from fedstrata.federation.availability import Bernoulli
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import FitReply, Weights
from fedstrata.methods.feddyn import FedDyn
from fedstrata.methods.recipe import Parts, Recipe, RecipeState
from fedstrata.methods.scaffold import SCAFFOLD
from fedstrata.objectives.scaffold import Scaffold


class Losing:
    """A wrapper around a federation in which all clients train, but some replies do not reach the server."""

    def __init__(self, federation: Federation, p: float) -> None:
        self._federation, self._p = federation, p

    def __getattr__(self, name: str) -> Any:
        return getattr(self._federation, name)

    def ask(self, clients: Iterable[int], request: Any, **options: Any) -> dict[int, Any]:
        """Send a request, and return the replies that the availability model ``bernoulli`` lets through."""
        replies = self._federation.ask(clients, request, **options)
        answered = np.array(list(replies), dtype=np.int64)
        arrives = Bernoulli(p=self._p).online(answered, self._federation.round, self._federation.config.seed)
        return {client: replies[client] for client in answered[arrives].tolist()}


class Lost(Recipe):
    """A method whose clients can drop out after training: their states change, but their replies are lost.

    Args:
        p: Probability that a client's reply reaches the server.
    """

    p: float = Field(default=0.5, gt=0, le=1)

    @override
    def run_round(self, federation: Federation, state: RecipeState) -> tuple[RecipeState, dict[str, Any]]:
        losing: Any = Losing(federation, self.p)
        return super().run_round(losing, state)


class LostSCAFFOLD(Lost, SCAFFOLD):
    """SCAFFOLD with lost replies. A lost reply changes the client's control variate c_k, but not the server's c."""


class LostFedDyn(Lost, FedDyn):
    """FedDyn with lost replies. A lost reply changes the client's correction λ_k, but not the server's term h."""


class PublishedScaffold(Scaffold):
    """SCAFFOLD's control variates, as the published code of ReBaFL implements them.

    The server's c changes by the mean of Δc_k over the set S of replies. In Algorithm 1 of SCAFFOLD, c changes by only
    ``|S|/N`` times this mean. Momentum and clipping are allowed, although the rule c_k⁺ = c_k − c + (w_t − w) / (K η)
    assumes plain SGD steps. With a momentum of β, steps are up to 1 / (1 − β) times as long.
    """

    def check(self, config: FederationConfig) -> None:
        """Accept all settings, including momentum and gradient clipping, which ``Scaffold`` does not allow."""

    def server_update(
        self, state: Tree, before: Weights, after: Weights, replies: Sequence[FitReply], clients: int
    ) -> tuple[Tree, Weights]:
        """Update the server's control variate: c ← c + (1/|S|) Σ_{k∈S} Δc_k."""
        return super().server_update(state, before, after, replies, max(len(replies), 1))


class PublishedSCAFFOLD(SCAFFOLD):
    """SCAFFOLD as in ReBaFL's published code, which also uses momentum (0.5) and clips gradients (at norm 10)."""

    @override
    def parts(self) -> Parts:
        return {**super().parts(), "objective": PublishedScaffold()}
