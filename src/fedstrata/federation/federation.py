"""The interface through which a method on the server communicates with clients.

A method uses a ``Federation``: ``ask`` sends requests and collects the replies, and ``relay`` sends the model from
client to client. The federation determines which clients it can reach, counts bytes, refuses unusable replies, and
records why clients are absent. An ``Engine`` runs the clients. Clients that answer a request at the same time can
compute sums of their tensors (``all_reduce_sum``).
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
from fedstrata.federation.attacks import Attack
from fedstrata.federation.availability import Availability
from fedstrata.federation.engine import Engine, Failure, FederationConfig, RelaySession
from fedstrata.federation.exchanges import Exchanges, Replies, RoundLog
from fedstrata.federation.messages import ClientId, Request, Requests, Weights, Work
from fedstrata.federation.reply_checks import Check, defect_of
from fedstrata.federation.secure.fit import ModelForm
from fedstrata.federation.secure.ring import Ring, Total

Listener = Callable[[int, Mapping[ClientId, Any]], None]


@dataclass(frozen=True)
class Relayed:
    """The result of a relay, in which a model travelled from client to client.

    Args:
        weights: The model after the last successful hop.
        replies: A mapping from each task's index in the relay to the client's reply. Failed tasks are left out.
    """

    weights: Weights
    replies: dict[int, Any]


@dataclass(frozen=True)
class Summed:
    """The sum of several replies, and the clients that sent them.

    Args:
        reply: The sum.
        clients: The clients.
        scaled: Number of vectors that clients scaled down for a secure sum because an element was out of range.
    """

    reply: Any
    clients: list[ClientId]
    scaled: int = 0


@dataclass(frozen=True)
class Leg:
    """One exchange of requests and replies. With some codecs, a call of ``Federation.ask`` makes several exchanges.

    Args:
        requests: The requests as they are sent, possibly encoded.
        check: A check of the replies in addition to ``Request.check``; None for no further check.
    """

    requests: Requests
    check: Check | None


Legs = Callable[["Federation", Requests, Check | None], Generator[Leg, Replies, Replies]]
"""A generator function that divides a call of ``Federation.ask`` into exchanges (``Leg`` objects).

The arguments are the federation, the method's requests and the method's check of a reply. The generator yields each
exchange, receives the replies, and finally returns the replies for the method.
"""


@dataclass(frozen=True)
class SummedLeg:
    """One secure sum. With PowerSGD, the sum of the clients' replies requires two secure sums.

    Args:
        request: The request as it is sent, possibly encoded.
        ring: The layout of the replies.
        continues: Whether the sum must be over the same clients as the previous secure sum.
    """

    request: Request
    ring: Ring
    continues: bool = False


SummedLegs = Callable[["Federation", Any, ModelForm], Generator[SummedLeg, Total, Total]]
"""A generator function that divides the sum of the replies to a request into secure sums.

The arguments are the federation, the request and the layout of its replies. The generator yields each secure sum,
receives its result, and finally returns the whole sum in this layout.
"""


def one_summed_leg(federation: Federation, request: Any, form: ModelForm) -> Generator[SummedLeg, Total, Total]:
    """Sum up the replies in one secure sum, without encoding."""
    return (yield SummedLeg(request, form.ring))


def one_leg(federation: Federation, requests: Requests, check: Check | None) -> Generator[Leg, Replies, Replies]:
    """Send the requests in one exchange, without encoding."""
    return (yield Leg(requests, check))


class Federation:
    """The interface through which a method reaches the clients 0 … N−1.

    Args:
        engine: The engine that runs the clients.
        config: The settings that server and clients share.
        availability: The model that simulates which clients are online in a round, and how fast they are.
        method: The method's name, for error messages.
        listener: A function that is called after every ``ask``, with two arguments: the round and the accepted replies.
        legs: A function that splits a call of ``ask`` into one or more exchanges. Default: one exchange without
            encoding. Use ``Compression.legs`` (``fedstrata.federation.communication``) to encode models and updates.
        summed_legs: A function that divides a secure sum of replies into exchanges. Default: one exchange.
        attack: The attack that some clients carry out; None if all clients are honest.
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
        summed_legs: SummedLegs = one_summed_leg,
        attack: Attack | None = None,
    ) -> None:
        self.engine, self.config, self.availability, self.method = engine, config, availability, method
        self.listener, self.legs, self.summed_legs, self.attack = listener, legs, summed_legs, attack
        self.attackers = frozenset(() if attack is None else attack.attackers(config.clients, config.seed))
        """The clients that attack."""
        self.excluded: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        """The clients that the server must not invite again."""
        self.round = 0
        self.exchanges = Exchanges(config, availability, method)
        self.log = self.exchanges.log

    @property
    def events(self) -> list[dict[str, Any]]:
        """The recorded events of this round, such as dropouts and failures."""
        return self.log.events

    def begin(self, round: int) -> None:
        """Begin a round with an empty log.

        Round 0 is the time before the first round; all clients are online then.
        """
        self.round, self.log = round, RoundLog(round, self.method)
        self.exchanges.log = self.log

    def rng(self, purpose: str, client: int = SERVER) -> np.random.Generator:
        """Return a new random generator.

        The generator's seed depends on the purpose, the round and the client (by default the server).
        """
        return rng(self.config.seed, purpose, self.round, client)

    def candidates(self) -> NDArray[np.int64]:
        """Return the clients that may be invited, in ascending order.

        All clients except ``excluded`` may be invited. With ``availability.announced``, offline clients are not
        invited.
        """
        clients = np.delete(np.arange(self.config.clients), self.excluded)
        if not self.availability.announced or self.round == 0:
            return clients
        return clients[self.availability.online(clients, self.round, self.config.seed)]

    def note(self, kind: str, clients: Iterable[ClientId] = (), reason: str = "") -> None:
        """Record an event of this round: its type, its clients (if any) and the reason (if any)."""
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
            clients: The clients that get the request.
            request: One request for all clients, or a mapping from each client to its request.
            quorum: Minimum number of usable replies. With fewer, ``QuorumError`` is raised.
            together: Whether clients run at the same time, and can compute sums of their tensors (``all_reduce_sum``).
                With True, the failure of one client makes all sums invalid, and no reply is used.
            work: Number of per-sample gradients that a client computes for its reply. Pass a mapping from clients to
                numbers, or a function of the client's number of samples. The numbers of gradients determine the
                simulated time and the order in which clients work. Default: zero.
            check: A check of replies in addition to ``Request.check``, such as a check against values that
                only the server knows.

        Returns:
            The replies, sorted by client. Clients without a usable reply are missing. ``events`` contains the reasons:
            dropouts, failures, delays and refused replies.

        Raises:
            QuorumError: Fewer than ``quorum`` clients sent usable replies.
            ClientsFailedError: All clients raised an exception, and no client has ever answered a request of this
                Python class.
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
        """Send a request, and return only the sum of the replies. See ``ask`` for the arguments.

        The log includes the sizes of all clients' requests and replies, even if the engine computes the sum directly.

        Returns:
            The sum over the clients that answered; None if no client answered.
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
        """Send requests as ``ask`` does, and return the ``Replies``.

        With ``at_once``, the engine may compute the sum of the replies in one pass, and the result is then a
        ``Summed``.
        """
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
                raise QuorumError(f"round {self.round} of {self.method}: {answered}, but the method needs {quorum}.")
            self.engine.commit(answers)
            try:
                leg, work = legs.send(answers), None
            except StopIteration as end:
                replies: Replies = end.value
                break
        if self.attack is not None:
            self._falsify(self.attack, requests, replies, check)
        if replies and self.listener is not None:
            self.listener(self.round, replies)
        return replies

    def _falsify(self, attack: Attack, requests: Requests, replies: Replies, check: Check | None) -> None:
        """Falsify the attackers' replies, and remove the false replies that the server would refuse."""
        false = attack.altered(self.round, self.config.seed, self.attackers, requests, replies)
        for client, reply in false.items():
            if defect := defect_of(reply, requests[client].check_reply, check):
                del replies[client]
                self.log.returned.discard(client)
                self.log.fail(client, Failure(defect, refused=True))
            else:
                replies[client] = reply

    def _sum(self, reached: Requests, check: Check | None) -> Summed | None:
        """Return the sum of the replies, if the engine can compute a usable sum in one pass; otherwise None."""
        clock, deadline = self.exchanges.clock, self.availability.deadline
        # With a simulated network and a deadline, a large reply can be late, so each client must reply separately.
        alone = clock is not None and self.availability.network and deadline is not None
        if not reached or self.config.training.execution != "fused" or alone:
            return None
        total = self.engine.ask_sum(reached)
        first = next(iter(reached.values()))
        if total is None or defect_of(total, first.check_reply, check) is not None:
            # The caller then asks for separate replies, to find the client whose reply is unusable.
            return None
        self.engine.commit(reached)
        size = records.size(total)
        if clock is not None:
            clock.arrive(dict.fromkeys(reached, size), self.log)
        self.log.returned.update(reached)
        self.log.bytes_up += size * len(reached)
        self.exchanges.answered.add(type(first))
        return Summed(total, list(reached))

    def measure(self, request: Request, *, check: Check | None = None) -> tuple[dict[ClientId, Any], int]:
        """Send all clients a request that measures a model.

        The request does not change the states of clients, and its bytes are not part of the round's log. The
        request goes to all clients, because availability and simulated time apply only to training.

        Args:
            request: The request.
            check: See ``ask``.

        Returns:
            The usable replies, sorted by client, and the total size in bytes of all requests and of these replies.
            Events show which clients are missing, and why.
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
        """Send the model from client to client. Each client works on the model and passes it on.

        One client's work is a *hop*. A hop is skipped if it fails, or if its client is offline. The next client then
        gets the model of the last successful hop.

        Args:
            tasks: Pairs of a client and its task; all tasks have the same Python class. The next pair
                is read after each hop, so a generator can choose the pair based on earlier replies.
            weights: The model that the first client gets.
            on_reply: A function that is called after each hop with two arguments: the index of the task in ``tasks``,
                and the reply (None if the hop was skipped). An engine that computes the relay in one pass may notice a
                failure only at the end. The function is then called again for the failed hop, with None as the reply.
            work: A function that returns the number of per-sample gradients, given a task and the client's number of
                samples.
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
                # At least one client completed all its tasks, so clients can answer such requests. A single reply would
                # not show this, because a task without work always succeeds.
                self.exchanges.answered |= kinds
            else:
                self.exchanges.raise_if_hopeless(reached, kinds, failures)
        return Relayed(weights, replies)
