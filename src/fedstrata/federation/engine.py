"""Where clients live: what an engine must do, and what server and clients agree on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fedstrata.federation.messages import ClientId, Reply, Request, Weights
from fedstrata.nn.model import Model
from fedstrata.partitions.server_data import ServerData
from fedstrata.settings import Training


@dataclass(frozen=True)
class FederationConfig:
    """What server and clients agree on before the first round.

    Args:
        seed: The experiment's seed.
        training: How clients train.
        model: The architecture, as a pure function of its parameters.
        classes: C.
        clients: N.
        sizes: n_k of every client, shape (N,), where a simulation knows them; a method never uses them to train, only
            to warn and to simulate time.
        server_data: Training samples that no client holds, for a method whose server has data of its own; None where there
            cannot be any.
        weight_diversity: Whether a method that combines models records how far they are from each other.
    """

    seed: int
    training: Training
    model: Model
    classes: int
    clients: int
    sizes: NDArray[np.int64] | None = None
    server_data: ServerData | None = field(default=None, repr=False, compare=False)
    weight_diversity: bool = False


@dataclass(frozen=True)
class Failure:
    """Why a client's answer is missing.

    Args:
        reason: In words.
        error: The exception, where there was one.
        bystander: Whether it answered well and lost its answer because another of its group failed.
    """

    reason: str
    error: BaseException | None = None
    bystander: bool = False


class RelaySession(Protocol):
    """A relay whose model the server does not see on the way; what it cannot use turns out at the end."""

    def hop(self, client: ClientId, task: Request) -> Reply | Failure:
        """Take up one client's part. What the reply says about the model's work may still be missing."""

    def keep(self, accepted: bool) -> None:
        """Whether the last part and what changed in its client's state count."""

    def arrive(self) -> tuple[Weights, list[Reply | Failure]]:
        """The model after all parts that count, and for each of them, in order, the whole reply or why it failed."""


class Engine(Protocol):
    """Where clients live. What a client changed in its own state counts only once ``settle`` accepted its answer."""

    def ask(self, requests: Mapping[ClientId, Request], *, together: bool) -> Mapping[ClientId, Reply | Failure]:
        """Answers in any order; ``together`` runs all clients at once, in a group that can ``all_reduce_sum``."""

    def ask_fused(self, requests: Mapping[ClientId, Request]) -> Reply | None:
        """The sum of all replies computed in one pass, or None where the engine has no such pass."""

    def hop(self, client: ClientId, task: Request, weights: Weights) -> tuple[Weights, Reply] | Failure:
        """Let one client work on the travelling model."""

    def ride(self, kind: type[Request], weights: Weights) -> RelaySession | None:
        """A relay of tasks of one kind whose model stays with the clients, or None: ``hop`` by ``hop`` then."""

    def settle(self, accepted: Iterable[ClientId]) -> None:
        """Keep the new state of these clients, drop that of all others that were just asked."""

    def close(self) -> None:
        """Free what the engine holds."""


Note = tuple[str, list[ClientId], str]
"""An event of an engine's own: its kind, whom it concerns, and why."""


@runtime_checkable
class Noting(Protocol):
    """An engine that has events of its own."""

    def notes(self) -> Iterable[Note]:
        """What happened since it was last asked."""


@runtime_checkable
class Remote(Noting, Protocol):
    """An engine whose clients keep their states themselves, and which has to be told what to remember."""

    def begin(self, round: int) -> None:
        """Before the first exchange: clients go back to their states after ``round``; 0 to start anew."""

    def save(self, round: int) -> None:
        """Before a checkpoint of the server: clients write their states to where they survive."""
