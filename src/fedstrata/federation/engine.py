"""The interface of engines, and the settings that server and clients share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from fedstrata.data.augmentation import Augmentation
from fedstrata.data.partitions.server_data import ServerData
from fedstrata.data.tasks.base import Task
from fedstrata.data.tasks.classification import Classification
from fedstrata.federation.messages import ClientId, Reply, Request, Weights
from fedstrata.federation.reply_checks import defect_of
from fedstrata.federation.settings import Privacy, Training
from fedstrata.models.model import Model

if TYPE_CHECKING:
    from fedstrata.federation.secure.requests import SecureSum


@dataclass(frozen=True)
class FederationConfig:
    """The settings that server and clients know before the first round.

    Args:
        seed: The experiment's seed.
        training: The settings of local training.
        model: The model's architecture, without parameters. Parameters are passed to the model in each call.
        outputs: Number of outputs of the model for a sample, such as the number of classes C.
        clients: Number of clients, N.
        sizes: Number of samples n_k of every client, shape (N,); None in a deployment. Methods use the sizes only for
            warnings and for simulated time, never for training.
        most_samples: The maximum number of samples that the server accepts in each client's reply, shape (N,); None if
            the server accepts any number.
        server_data: Training samples at the server, for methods that need such samples; None at clients.
        weight_diversity: Whether to record the distances between clients' models, for methods that combine clients'
            models.
        random: Whether the model's forward pass draws random numbers during training, as a dropout layer does.
        privacy: The privacy settings, such as the minimum number of samples from which a client may compute a reply.
        strata: Number of strata (groups of samples, such as classes); 0 if samples have no strata.
        places: Number of tokens or pixels in a sample's target (the sample's maximum weight); 1 for other targets.
        task: The task, which defines the loss.
        augment: The augmentation of the inputs on which clients train; None if inputs are not augmented.
    """

    seed: int
    training: Training
    model: Model
    outputs: int
    clients: int
    sizes: NDArray[np.int64] | None = None
    most_samples: NDArray[np.int64] | None = field(default=None, repr=False, compare=False)
    server_data: ServerData | None = field(default=None, repr=False, compare=False)
    weight_diversity: bool = False
    random: bool = False
    privacy: Privacy = field(default_factory=Privacy)
    strata: int = 0
    places: int = 1
    task: Task = field(default_factory=Classification)
    augment: Augmentation | None = None


@dataclass(frozen=True)
class Failure:
    """The outcome of a request to which the client did not send a usable reply.

    Args:
        reason: Why the client's reply is missing or cannot be used, in words.
        error: The client's exception; None if the client did not raise an exception.
        bystander: Whether the reply is missing only because it needs tensors of another client that failed.
        refused: True if the server refused the reply as unusable, or if the client withheld it.
    """

    reason: str
    error: BaseException | None = None
    bystander: bool = False
    refused: bool = False


EngineEvent = tuple[str, list[ClientId], str]
"""An event that an engine reports: the type of the event, the clients, and the reason."""


class RelaySession(Protocol):
    """A relay in progress: a model travels from client to client. The training at one client is a *hop*."""

    def hop(self, client: ClientId, task: Request) -> Reply | Failure:
        """Let one client train the model that travels from client to client.

        The reply may lack values that depend on the model, such as the loss. ``finish`` returns the complete reply.
        """

    def keep(self, accepted: bool) -> None:
        """Accept or reject the latest hop and the client's new state. Do not call this method after a ``Failure``."""

    def finish(self) -> tuple[Weights, list[Reply | Failure]]:
        """Return the final model and, for each accepted hop, the complete reply, or a failure if its model was lost."""


class SecureSums(Protocol):
    """What the server does in a deployment to compute secure sums."""

    def ask(
        self, federation: Any, clients: Iterable[ClientId], request: Request, ring: Any, work: Any, continues: bool
    ) -> SecureSum | None:
        """Return the sum of the replies; see ``fedstrata.federation.secure.simulated.ask_sum``."""


class Engine(ABC):
    """Base class of engines, which run the clients in this process, in other processes or at sites.

    - ``ask`` lets clients answer requests, either independently or *together*. Clients that answer together can add up
    their tensors (``all_reduce_sum``). ``ask_sum`` returns the sum of all replies if the engine can compute
    the sum in one pass.

    - ``relay`` sends a model from client to client.

    - ``commit`` makes the new states of clients permanent, after their replies were accepted.

    - ``save`` and ``restore`` are for clients that store their states themselves (``keeps_states``). ``save`` lets the
      clients write their states to disk. ``restore`` resets the clients to their states after a given round.
    """

    keeps_states: ClassVar[bool] = False
    """Whether clients store their own states, so that the server's checkpoints do not contain these states."""
    secure_sums: SecureSums | None = None
    """The server's part in secure sums, in a deployment. With None, secure sums are simulated."""

    events: deque[EngineEvent] | None = None
    """The events that do not belong to a reply, such as a lost connection to a site, in chronological order.

    The training loop removes events that it has recorded. With None, the engine reports no events."""

    secret = False
    """Whether clients compute their noise from the operating system's random numbers, as in a deployment, and not from
    the spec's seed."""

    @abstractmethod
    def ask(self, requests: Mapping[ClientId, Request], *, together: bool) -> Mapping[ClientId, Reply | Failure]:
        """Send requests to clients, and return their replies in any order.

        Args:
            requests: The request to each client.
            together: Whether all clients run at the same time and can add up their tensors (``all_reduce_sum``).
        """

    def ask_sum(self, requests: Mapping[ClientId, Request]) -> Reply | None:
        """Return the sum of all replies if the engine can compute the sum in one pass; otherwise None."""
        return None

    @abstractmethod
    def hop(self, client: ClientId, task: Request, weights: Weights) -> tuple[Weights, Reply] | Failure:
        """Let one client train the model that travels from client to client; return the new model and the reply."""

    def relay(self, kind: type[Request], weights: Weights) -> RelaySession:
        """Begin a relay: a model travels from client to client. All tasks of a relay have the same Python class.

        Args:
            kind: The Python class of the tasks.
            weights: The model that the first client gets.
        """
        return HopByHop(self, weights)

    @abstractmethod
    def commit(self, accepted: Iterable[ClientId]) -> None:
        """Keep the new states of clients whose replies were accepted, and discard all other new states."""

    def restore(self, round: int) -> None:
        """Reset the clients to the states that they had after ``round`` (0 for a new run).

        The training loop calls this method before the first exchange.
        """
        return

    def save(self, round: int) -> None:
        """Let the clients save their states after ``round`` to disk.

        The server calls this method before each checkpoint.
        """
        return

    @abstractmethod
    def close(self) -> None:
        """Free the engine's processes, memory and files."""


class HopByHop:
    """A ``RelaySession`` in which the model returns to the server after the training at each client.

    Args:
        engine: The engine of the clients.
        weights: The model that the first client gets.
    """

    def __init__(self, engine: Engine, weights: Weights) -> None:
        self._engine, self._weights = engine, weights
        self._moved: tuple[ClientId, Weights, Reply] | None = None
        self._replies: list[Reply | Failure] = []

    def hop(self, client: ClientId, task: Request) -> Reply | Failure:
        """Send the model to a client, and receive the model that the client trained."""
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
        """Continue with the model of the latest hop if the hop is accepted, otherwise with the model before the hop."""
        assert self._moved is not None
        client, moved, reply = self._moved
        self._engine.commit([client] if accepted else [])
        if accepted:
            self._weights = moved
            self._replies.append(reply)

    def finish(self) -> tuple[Weights, list[Reply | Failure]]:
        """Return the model after the last accepted hop, and the replies."""
        return self._weights, self._replies
