"""Where clients live: what an engine must do, and what server and clients agree on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from fedstrata.data.partitions.server_data import ServerData
from fedstrata.federation.messages import ClientId, Reply, Request, Weights
from fedstrata.federation.reply_checks import defect_of
from fedstrata.federation.settings import Privacy, Training
from fedstrata.models.model import Model


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
        server_data: Training samples that no client holds, for a method whose server has data of its own; None where
            there cannot be any.
        weight_diversity: Whether a method that combines models records how far they are from each other.
        random: Whether the model's forward pass draws random numbers while it trains.
        privacy: The fewest samples behind what clients send, as the spec has it; a site may want more.
    """

    seed: int
    training: Training
    model: Model
    classes: int
    clients: int
    sizes: NDArray[np.int64] | None = None
    server_data: ServerData | None = field(default=None, repr=False, compare=False)
    weight_diversity: bool = False
    random: bool = False
    privacy: Privacy = field(default_factory=Privacy)


@dataclass(frozen=True)
class Failure:
    """Why a client's answer is missing.

    Args:
        reason: In words.
        error: The exception, where there was one.
        bystander: Whether it answered well and lost its answer because another of its group failed.
        refused: Whether something came that cannot be used.
    """

    reason: str
    error: BaseException | None = None
    bystander: bool = False
    refused: bool = False


EngineEvent = tuple[str, list[ClientId], str]
"""What happened in an engine: its kind, whom it concerns, and why."""


class RelaySession(Protocol):
    """One relay: the model goes from client to client, in the order of the calls of ``hop``."""

    def hop(self, client: ClientId, task: Request) -> Reply | Failure:
        """One client's part. What the reply says about the model's work may still be missing."""

    def keep(self, accepted: bool) -> None:
        """Whether the last part and what changed in its client's state count; not called after a ``Failure``."""

    def finish(self) -> tuple[Weights, list[Reply | Failure]]:
        """The model after all parts that count, and for each of them, in order, the whole reply or why it failed."""


class Engine(ABC):
    """Where clients live: everything that a federation needs of it.

    - **ask**: every client answers for itself, or all *together* in a group that can ``all_reduce_sum``; **ask_sum**
      is the sum of all answers in one pass, where there is such a pass;
    - **relay**: a model that goes from client to client;
    - **commit**: what a client changed in its own state counts only once its answer was accepted;
    - **state by round**: where clients keep their states themselves (``keeps_states``), they go back to those after a
      round (``restore``) and write them to where they survive (``save``);
    - **events**: what happened that nobody asked about;
    - **close**.
    """

    keeps_states: ClassVar[bool] = False
    """Whether clients keep their states where they live, so that a checkpoint of the server has none."""

    @abstractmethod
    def ask(self, requests: Mapping[ClientId, Request], *, together: bool) -> Mapping[ClientId, Reply | Failure]:
        """Answers in any order; ``together`` runs all clients at once, as a group."""

    def ask_sum(self, requests: Mapping[ClientId, Request]) -> Reply | None:
        """The sum of all replies, computed in one pass; None where the engine has no such pass."""
        return None

    @abstractmethod
    def hop(self, client: ClientId, task: Request, weights: Weights) -> tuple[Weights, Reply] | Failure:
        """Let one client work on a travelling model that comes and goes with the call."""

    def relay(self, kind: type[Request], weights: Weights) -> RelaySession:
        """A relay of tasks of one kind that sets out with ``weights``."""
        return HopByHop(self, weights)

    @abstractmethod
    def commit(self, accepted: Iterable[ClientId]) -> None:
        """Keep the new state of these clients, drop that of all others that were just asked."""

    def restore(self, round: int) -> None:
        """Before the first exchange: clients go back to their states after ``round``; 0 to start anew."""
        return

    def save(self, round: int) -> None:
        """Before a checkpoint of the server: clients write their states to where they survive."""
        return

    def events(self) -> Iterable[EngineEvent]:
        """What happened since it was last asked."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Free what the engine holds."""


class HopByHop:
    """A relay whose model comes back after every hop; see ``RelaySession``.

    Args:
        engine: Where clients live.
        weights: The model that sets out.
    """

    def __init__(self, engine: Engine, weights: Weights) -> None:
        self._engine, self._weights = engine, weights
        self._moved: tuple[ClientId, Weights, Reply] | None = None
        self._replies: list[Reply | Failure] = []

    def hop(self, client: ClientId, task: Request) -> Reply | Failure:
        """Send the model there and back."""
        self._moved = None
        outcome = self._engine.hop(client, task, self._weights)
        if isinstance(outcome, Failure):
            return outcome
        moved, reply = outcome
        if defect := defect_of(moved, lambda moved: moved.require_like(self._weights)):
            self._engine.commit([])
            return Failure(defect, refused=True)
        self._moved = client, moved, reply
        return reply

    def keep(self, accepted: bool) -> None:
        """Go on from where the last hop led to, or from where it began."""
        assert self._moved is not None
        client, moved, reply = self._moved
        self._engine.commit([client] if accepted else [])
        if accepted:
            self._weights = moved
            self._replies.append(reply)

    def finish(self) -> tuple[Weights, list[Reply | Failure]]:
        """The model after the last hop that counts."""
        return self._weights, self._replies
