"""How a method on the server speaks to clients, wherever they live.

``ask`` sends typed requests, ``relay`` sends the model from client to client, and inside a client ``all_reduce_sum``
adds tensors over all clients that answer the same request. An ``Engine`` knows where clients live. A method sees the
``Federation``: it decides who can be reached, counts the bytes, refuses what cannot be used, and records why a client
is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstrata.base import records
from fedstrata.base.errors import QuorumError
from fedstrata.base.rng import SERVER, rng
from fedstrata.federation.availability import Availability
from fedstrata.federation.engine import Engine, Failure, FederationConfig, RelaySession
from fedstrata.federation.exchanges import Exchanges, Replies
from fedstrata.federation.messages import ClientId, Request, Requests, Weights, Work
from fedstrata.federation.reply_checks import Check, defect_of

Listener = Callable[[int, Mapping[ClientId, Any]], None]


@dataclass(frozen=True)
class Relayed:
    """What came back from a relay.

    Args:
        weights: The model after the last good hop.
        replies: The reply of every task that was done, by its position; a failed hop is absent.
    """

    weights: Weights
    replies: dict[int, Any]


@dataclass(frozen=True)
class Summed:
    """The sum of replies, and the clients that took part in it."""

    reply: Any
    clients: list[ClientId]


@dataclass(frozen=True)
class Leg:
    """One exchange of an ``ask``.

    Args:
        requests: What travels to the clients.
        check: Refuses a reply, beside ``Request.check``.
    """

    requests: Requests
    check: Check | None


Legs = Callable[["Federation", Requests, Check | None], Generator[Leg, Replies, Replies]]
"""How requests travel: a generator that yields each exchange, is sent its replies, and returns those of the method.

Its arguments are the federation, the method's requests and the method's check of a reply.
"""


def one_leg(federation: Federation, requests: Requests, check: Check | None) -> Generator[Leg, Replies, Replies]:
    """Let requests and replies travel as they are."""
    return (yield Leg(requests, check))


class Federation:
    """Clients 0 … N−1 as a method sees them.

    Args:
        engine: Where they live.
        config: The settings on which server and clients agreed.
        availability: Which clients are there in a round, and how fast they are.
        method: The method's name, for messages.
        listener: Called with the round and the replies that count, after every ``ask``.
        legs: How requests travel; ``fedstrata.federation.communication`` encodes them.
    """

    def __init__(
        self,
        engine: Engine,
        config: FederationConfig,
        availability: Availability,
        method: str = "",
        *,
        listener: Listener | None = None,
        legs: Legs = one_leg,
    ) -> None:
        self.engine, self.config, self.availability, self.method = engine, config, availability, method
        self.listener, self.legs = listener, legs
        self.round = 0
        self.exchanges = Exchanges(config, availability, method)
        self.log = self.exchanges.log

    @property
    def events(self) -> list[dict[str, Any]]:
        """What happened in this round."""
        return self.log.events

    def begin(self, round: int) -> None:
        """Begin a round; in round 0, when clients enrol, all clients are there."""
        self.exchanges.begin(round)
        self.round, self.log = round, self.exchanges.log

    def rng(self, purpose: str, client: int = SERVER) -> np.random.Generator:
        """Return a fresh generator for this round."""
        return rng(self.config.seed, purpose, self.round, client)

    def candidates(self) -> NDArray[np.int64]:
        """Return the clients that may be invited, ascending: all, or those online if availability is announced."""
        clients = np.arange(self.config.clients)
        if not self.availability.announced or self.round == 0:
            return clients
        return clients[self.availability.online(clients, self.round, self.config.seed)]

    def note(self, kind: str, clients: Iterable[ClientId] = (), reason: str = "") -> None:
        """Record an event of this round."""
        self.log.note(kind, clients, reason)

    def ask(
        self,
        clients: Iterable[ClientId],
        request: Request | Mapping[ClientId, Request],
        *,
        quorum: int = 0,
        together: bool = False,
        work: Work | None = None,
        check: Check | None = None,
    ) -> dict[ClientId, Any]:
        """Send a request to clients and collect the replies that can be used.

        Args:
            clients: The clients to ask.
            request: The same request for all, or one for each client by a mapping.
            quorum: Fewest replies that are enough.
            together: Let the clients run at the same time as one group for ``all_reduce_sum``. If one of them fails,
                the sum is void and no reply counts.
            work: Sample-gradients that an answer takes: as a function of a client's samples, or of each client.
            check: Refuses a reply by what only the server knows, beside ``Request.check``.

        Returns:
            The replies, sorted by client. A client that dropped out, failed, was late or was refused is absent;
            ``events`` says why.

        Raises:
            QuorumError: Fewer than ``quorum`` answered.
            ClientsFailedError: All clients raised an exception and none ever answered such a request.
        """
        replies: Replies = self._ask(Requests.of(clients, request), quorum, together, work, check)
        return replies

    def ask_sum(
        self,
        clients: Iterable[ClientId],
        request: Request | Mapping[ClientId, Request],
        *,
        together: bool = False,
        work: Work | None = None,
        check: Check | None = None,
    ) -> Summed | None:
        """Send a request of which only the sum of the replies matters; see ``ask``.

        An engine may compute the sum in one pass. Bytes count all the same: each client's request and reply with their
        full size.

        Returns:
            The sum over the clients that answered; None if no client did.
        """
        replies = self._ask(Requests.of(clients, request), 0, together, work, check, at_once=True)
        if isinstance(replies, Summed):
            return replies
        return Summed(replies.total(), list(replies)) if replies else None

    def _ask(
        self,
        requests: Requests,
        quorum: int,
        together: bool,
        work: Work | None,
        check: Check | None,
        at_once: bool = False,
    ) -> Any:
        """Return ``Replies``; or ``Summed`` if the engine may compute the sum ``at_once`` and does."""
        legs = self.legs(self, requests, check)
        leg = next(legs)
        while True:
            reached = self.exchanges.reach(leg.requests, work)
            if at_once and leg.requests is requests and (summed := self._sum(reached, check)) is not None:
                return summed
            outcomes = self.engine.ask(reached, together=together) if reached else {}
            answers = self.exchanges.collect(reached, outcomes, together, leg.check)
            if len(answers) < quorum:
                self.engine.commit([])
                answered = f"{len(answers)} of {len(reached)} clients answered"
                raise QuorumError(f"round {self.round} of {self.method}: {answered}, {quorum} are needed")
            self.engine.commit(answers)
            try:
                leg, work = legs.send(answers), None
            except StopIteration as end:
                replies: Replies = end.value
                break
        if replies and self.listener is not None:
            self.listener(self.round, replies)
        return replies

    def _sum(self, reached: Requests, check: Check | None) -> Summed | None:
        """Return the sum that the engine computes in one pass; None if it computes none that can be used."""
        clock, deadline = self.exchanges.clock, self.availability.deadline
        # Whether a client is late depends on the size of its own reply if there are a network and a deadline.
        alone = clock is not None and self.availability.network and deadline is not None
        if not reached or self.config.training.execution != "fused" or alone:
            return None
        total = self.engine.ask_sum(reached)
        first = next(iter(reached.values()))
        if total is None or defect_of(total, first.check_reply, check) is not None:
            return None  # asked one by one, the clients show whose part cannot be used
        self.engine.commit(reached)
        size = records.size(total)
        if clock is not None:
            clock.arrive(dict.fromkeys(reached, size), self.log)
        self.log.returned.update(reached)
        self.log.bytes_up += size * len(reached)
        self.exchanges.answered.add(type(first))
        return Summed(total, list(reached))

    def measure(self, request: Request, *, check: Check | None = None) -> tuple[dict[ClientId, Any], int]:
        """Send all clients a request that measures a model: it changes nothing and does not count in the round's log.

        All clients are reached: availability and simulated time concern training only. ``check`` refuses a reply as
        in ``ask``.

        Returns:
            The replies that can be used, sorted by client, and the bytes that went there and back. Events say who is
            missing, and why.
        """
        requests = Requests.of(range(self.config.clients), request)
        outcomes = self.engine.ask(requests, together=False)
        self.engine.commit([])
        replies: dict[ClientId, Any] = {}
        for client in sorted(outcomes):
            outcome = outcomes[client]
            defect = outcome.reason if isinstance(outcome, Failure) else defect_of(outcome, request.check_reply, check)
            if defect is None:
                replies[client] = outcome
            else:
                self.note("not measured", [client], f"client {client} in round {self.round}: {defect}")
        size = records.size(request) * len(requests) + sum(records.size(reply) for reply in replies.values())
        return replies, size

    def relay(
        self,
        tasks: Iterable[tuple[ClientId, Request]],
        weights: Weights,
        *,
        on_reply: Callable[[int, Any], None] = lambda position, reply: None,
        work: Callable[[Any, int], float] = lambda task, samples: 0.0,
    ) -> Relayed:
        """Send the model from client to client; each works on it and passes it on.

        A hop that fails, or whose client is not there, is skipped: the next client gets the last good model.

        Args:
            tasks: Clients and their tasks, all of one kind. Each is taken only when the hop before it is over, so that
                a generator may decide what comes next by the earlier replies.
            weights: The model that sets out.
            on_reply: Called after each hop with its position and its reply, None where there is none. An engine that
                computes the relay in one pass may learn of a failure only at the end, and then calls once more with
                None.
            work: Sample-gradients that a task takes a client with so many samples.
        """
        replies: dict[int, Any] = {}
        failures: list[tuple[ClientId, Failure]] = []
        size = records.size(weights)
        session: RelaySession | None = None
        done: list[tuple[int, ClientId]] = []
        kinds: set[type[Request]] = set()
        reached: set[ClientId] = set()

        def fail(position: int, client: ClientId, failure: Failure) -> None:
            self.log.fail(client, failure)
            if not failure.refused:
                failures.append((client, failure))
            on_reply(position, None)

        for position, (client, task) in enumerate(tasks):
            if not self.exchanges.reach_hop(client, task, size, work):
                on_reply(position, None)
                continue
            reached.add(client)
            if session is None:
                kinds = {type(task)}
                session = self.engine.relay(type(task), weights)
            self.log.hops += 1
            outcome = session.hop(client, task)
            if not isinstance(outcome, Failure):
                defect = defect_of(outcome, task.check_reply)
                session.keep(defect is None)
                outcome = outcome if defect is None else Failure(defect, refused=True)
            if isinstance(outcome, Failure):
                fail(position, client, outcome)
            else:
                done.append((position, client))
                on_reply(position, outcome)
        if session is not None:
            weights, outcomes = session.finish()
            for (position, client), outcome in zip(done, outcomes, strict=True):
                if isinstance(outcome, Failure):
                    fail(position, client, outcome)
                else:
                    replies[position] = outcome
                    self.log.returned.add(client)
                    self.log.bytes_up += records.size(outcome)
            raised = {client for client, failure in failures if failure.error is not None}
            if raised < reached:
                # A task that asks for nothing may succeed and prove nothing, so that replies alone do not count.
                self.exchanges.answered |= kinds
            else:
                self.exchanges.raise_if_hopeless(reached, len(raised), kinds, failures)
        return Relayed(weights, replies)
