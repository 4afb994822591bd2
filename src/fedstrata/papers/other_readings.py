"""Variants of methods as in published code, to test whether they explain figures that differ from ours.

A spec names them by path: ``name = "fedstrata.papers.other_readings:PublishedSCAFFOLD"``. Do not use them otherwise.
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
from fedstrata.methods.base import Parts, Recipe, RecipeState
from fedstrata.methods.feddyn import FedDyn
from fedstrata.methods.scaffold import SCAFFOLD
from fedstrata.objectives.scaffold import Scaffold


class Losing:
    """A federation whose clients all train, and some of whose replies are lost on the way to the server."""

    def __init__(self, federation: Federation, p: float) -> None:
        self._federation, self._p = federation, p

    def __getattr__(self, name: str) -> Any:
        return getattr(self._federation, name)

    def ask(self, clients: Iterable[int], request: Any, **options: Any) -> dict[int, Any]:
        """Return the replies that arrive: those of the clients that ``bernoulli`` with the same p has online."""
        replies = self._federation.ask(clients, request, **options)
        answered = np.array(list(replies), dtype=np.int64)
        arrives = Bernoulli(p=self._p).online(answered, self._federation.round, self._federation.config.seed)
        return {client: replies[client] for client in answered[arrives].tolist()}


class Lost(Recipe):
    """A method whose clients drop out after training: their states change, and the server does not learn of it.

    Args:
        p: Probability that a reply arrives.
    """

    p: float = Field(default=0.5, gt=0, le=1)

    @override
    def run_round(self, federation: Federation, state: RecipeState) -> tuple[RecipeState, dict[str, Any]]:
        losing: Any = Losing(federation, self.p)
        return super().run_round(losing, state)


class LostSCAFFOLD(Lost, SCAFFOLD):
    """SCAFFOLD whose control variates c_k change without the server's c."""


class LostFedDyn(Lost, FedDyn):
    """FedDyn whose λ_k change without the server's h."""


class PublishedScaffold(Scaffold):
    """SCAFFOLD's control variates as in the published code of ReBaFL.

    The server's c changes by the mean of Δc_k. In Algorithm 1 of SCAFFOLD it changes by |S|/N times that, which is half
    as much if half of the clients reply. Momentum and clipping are allowed, and c_k⁺ = c_k − c + (w_t − w) / (K η)
    nevertheless assumes plain steps. With a momentum of β steps are up to 1 / (1 − β) times as long.
    """

    def check(self, config: FederationConfig) -> None:
        """Accept all settings."""

    def server_update(
        self, state: Tree, before: Weights, after: Weights, replies: Sequence[FitReply], clients: int
    ) -> tuple[Tree, Weights]:
        """Set c ← c + (1/|S|) Σ_{k∈S} Δc_k."""
        return super().server_update(state, before, after, replies, max(len(replies), 1))


class PublishedSCAFFOLD(SCAFFOLD):
    """SCAFFOLD as in the published code of ReBaFL; the spec adds momentum 0.5 and a clip at 10."""

    @override
    def parts(self) -> Parts:
        return {**super().parts(), "objective": PublishedScaffold()}
