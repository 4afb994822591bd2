"""The interface of engines, and the settings that server and clients share."""

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
    """The settings that server and clients share before the first round.

    Args:
        seed: The experiment's seed.
        training: The settings of local training.
        model: The architecture, as a pure function of its parameters.
        classes: Number of classes, C.
        clients: Number of clients, N.
        sizes: Number of samples of every client, n_k, shape (N,); None at real sites. A method uses the sizes only for
            warnings and for simulated time, never for training.
        server_data: Training samples that no client holds, for a method whose server has its own data; None at clients.
        weight_diversity: Whether a method that combines models records how far they are from each other.
        random: Whether the model's forward pass draws random numbers during training.
        privacy: The smallest number of samples that may contribute to an answer; a site may require more.
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
    """The reason for which a client's answer is missing.

    Args:
        reason: The reason in words.
        error: The client's exception, if it raised one.
        bystander: Whether the answer is missing only because another client of the group failed.
        refused: Whether an answer came that cannot be used.
    """

    reason: str
    error: BaseException | None = None
    bystander: bool = False
    refused: bool = False


EngineEvent = tuple[str, list[ClientId], str]
"""An event of an engine: its kind, its clients, and the reason."""


class RelaySession(Protocol):
    """A relay: the model goes from client to client, in the order of the calls of ``hop``."""

    def hop(self, client: ClientId, task: Request) -> Reply | Failure:
        """Let one client do its part. Values in the reply that depend on the model may be missing until ``finish``."""

    def keep(self, accepted: bool) -> None:
        """Accept or reject the last part, with its client's new state; not called after a ``Failure``."""

    def finish(self) -> tuple[Weights, list[Reply | Failure]]:
        """Return the model after all accepted parts, and for each of them, in order, the whole reply or a failure."""


class Engine(ABC):
    """An engine runs the clients, in this process, in others or at sites.

    - **ask**: every client answers for itself, or all *together* as a group that can ``all_reduce_sum``; **ask_sum**
      returns the sum of all answers, if the engine computes it in one pass;
    - **relay**: a model goes from client to client;
    - **commit**: a client's new state becomes valid only when its answer is accepted;
    - **state by round**: if clients keep their states themselves (``keeps_states``), they return to the states after a
      round (``restore``), and write their states to disk (``save``);
    - **events**: events that do not belong to an answer, such as the loss of a site;
    - **close**.
    """

    keeps_states: ClassVar[bool] = False
    """Whether clients keep their states themselves, so that a checkpoint of the server has none."""

    @abstractmethod
    def ask(self, requests: Mapping[ClientId, Request], *, together: bool) -> Mapping[ClientId, Reply | Failure]:
        """Return the answers, in any order; ``together`` runs all clients at the same time, as a group."""

    def ask_sum(self, requests: Mapping[ClientId, Request]) -> Reply | None:
        """Return the sum of all replies if the engine computes it in one pass, otherwise None."""
        return None

    @abstractmethod
    def hop(self, client: ClientId, task: Request, weights: Weights) -> tuple[Weights, Reply] | Failure:
        """Let one client work on a travelling model; return the new model and the reply."""

    def relay(self, kind: type[Request], weights: Weights) -> RelaySession:
        """Begin a relay of tasks of one kind with the model ``weights``."""
        return HopByHop(self, weights)

    @abstractmethod
    def commit(self, accepted: Iterable[ClientId]) -> None:
        """Keep the new states of these clients, and drop those of all others that were just asked."""

    def restore(self, round: int) -> None:
        """Return the clients to their states after ``round``, before the first exchange; 0 for a new run."""
        return

    def save(self, round: int) -> None:
        """Let the clients write their states to disk, before a checkpoint of the server."""
        return

    def events(self) -> Iterable[EngineEvent]:
        """Return the events since the last call."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Free the engine's processes, memory and files."""


class HopByHop:
    """A relay whose model comes back after every hop; see ``RelaySession``.

    Args:
        engine: The engine of the clients.
        weights: The model to start with.
    """

    def __init__(self, engine: Engine, weights: Weights) -> None:
        self._engine, self._weights = engine, weights
        self._moved: tuple[ClientId, Weights, Reply] | None = None
        self._replies: list[Reply | Failure] = []

    def hop(self, client: ClientId, task: Request) -> Reply | Failure:
        """Send the model to a client, and receive the new one."""
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
        """Continue with the model of the last hop if it is accepted, otherwise with the model before it."""
        assert self._moved is not None
        client, moved, reply = self._moved
        self._engine.commit([client] if accepted else [])
        if accepted:
            self._weights = moved
            self._replies.append(reply)

    def finish(self) -> tuple[Weights, list[Reply | Failure]]:
        """Return the model after the last accepted hop, and the replies."""
        return self._weights, self._replies
