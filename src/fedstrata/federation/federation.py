"""How a method on the server speaks to clients, wherever they live.

``ask`` puts typed questions, ``relay`` sends the model from client to client, and inside a client ``all_reduce_sum``
adds tensors over everybody who answers the same question. An ``Engine`` knows where clients live. ``Federation`` is
what a method sees: it decides who can be reached, counts the bytes, refuses what cannot be used, and records why
somebody is absent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial, reduce
from typing import Any, Protocol, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from fedstrata.base import records
from fedstrata.base.errors import ClientsFailedError, QuorumError
from fedstrata.base.rng import SERVER, rng
from fedstrata.federation.accounting import Accounting, Relayed, Summed
from fedstrata.federation.availability import Availability
from fedstrata.federation.engine import Engine, Failure, FederationConfig, RelaySession
from fedstrata.federation.messages import ClientId, Reply, Request, Requests, Weights, Work
from fedstrata.federation.reply_checks import Check, defect_of

Listener = Callable[[int, Mapping[ClientId, Any]], None]


class AskOptions(TypedDict, total=False):
    """How a question is put: the settings of ``Federation.ask``, by their names there."""

    deadline: float | None
    quorum: int
    together: bool
    work: Work | None
    check: Check | None


class Channel(Protocol):
    """What carries questions about a model, and their answers, in another form; see ``federation.communication``."""

    def takes(self, requests: Requests) -> bool:
        """Whether these questions go through it."""

    def ask(self, federation: Federation, requests: Requests, **options: Unpack[AskOptions]) -> dict[ClientId, Any]:
        """See ``Federation.ask``; what travels goes through ``Federation.exchange``."""

    def ask_sum(self, federation: Federation, requests: Requests, **options: Unpack[AskOptions]) -> Summed | None:
        """See ``Federation.ask_sum``."""


class Federation:
    """Clients 0 … N−1 as a method sees them.

    Args:
        engine: Where they live.
        config: What was agreed.
        availability: Who is there, and how fast.
        method: The method's name, for messages.
        listener: Called with the round and the replies that count, after every ``ask``.
        channel: What carries questions about a model; None where they travel as they are.
    """

    def __init__(
        self,
        engine: Engine,
        config: FederationConfig,
        availability: Availability,
        method: str = "",
        *,
        listener: Listener | None = None,
        channel: Channel | None = None,
    ) -> None:
        self.engine, self.config, self.availability, self.method = engine, config, availability, method
        self.listener, self.channel = listener, channel
        self.round = 0
        self.accounting = Accounting()
        self.events: list[dict[str, Any]] = []
        self._online: dict[ClientId, bool] = {}
        self._clock: dict[ClientId, float] = {}
        self._deadline: float | None = None
        self._answered: set[type[Request]] = set()
        self.resumed = False
        """Whether earlier rounds ran in another process: what clients answered then is not known any more."""

    def begin(self, round: int) -> None:
        """Start the books of a round; in round 0, when clients enrol, everybody is there."""
        self.round, self.accounting, self.events, self._online = round, Accounting(), [], {}

    def rng(self, purpose: str, client: int = SERVER) -> np.random.Generator:
        """A fresh generator for this round."""
        return rng(self.config.seed, purpose, self.round, client)

    def candidates(self) -> NDArray[np.int64]:
        """The clients that may be invited, ascending: all, or those online where availability is announced."""
        everybody = np.arange(self.config.clients)
        if not self.availability.announced or self.round == 0:
            return everybody
        return everybody[self.availability.online(everybody, self.round, self.config.seed)]

    def note(self, kind: str, clients: Iterable[ClientId] = (), reason: str = "") -> None:
        """Record an event of this round."""
        event: dict[str, Any] = {"round": self.round, "kind": kind}
        if listed := [int(client) for client in clients]:
            event["clients"] = listed
        if reason:
            event["reason"] = reason
        self.events.append(event)

    def ask(
        self,
        clients: Iterable[ClientId],
        request: Request | Mapping[ClientId, Request],
        *,
        deadline: float | None = None,
        quorum: int = 0,
        together: bool = False,
        work: Work | None = None,
        check: Check | None = None,
    ) -> dict[ClientId, Any]:
        """Put a question to clients and collect the answers that can be used.

        Args:
            clients: The clients to ask.
            request: The same for all, or one for each client by a mapping.
            deadline: Simulated seconds; the availability's unless given.
            quorum: Fewest answers that will do.
            together: Let the clients run at the same time as one group for ``all_reduce_sum``. The sum is void when
                one of them fails, so that nobody's answer counts then.
            work: Sample-gradients that an answer takes: of a client with so many samples, or of each client.
            check: Refuses a reply by what only the server knows, beside ``Request.check``.

        Returns:
            The replies, sorted by client. Who dropped out, failed, was late or was refused is absent; ``events`` says
            why.

        Raises:
            QuorumError: Fewer than ``quorum`` answered.
            ClientsFailedError: All clients raised an exception and none ever answered such a request.
        """
        requests = Requests.of(clients, request)
        options: AskOptions = {
            "deadline": deadline,
            "quorum": quorum,
            "together": together,
            "work": work,
            "check": check,
        }
        if self.channel is not None and self.channel.takes(requests):
            replies = self.channel.ask(self, requests, **options)
        else:
            replies = self.exchange(requests, requests, **options)
        self._tell(replies)
        return replies

    def exchange(
        self,
        clients: Iterable[ClientId],
        request: Request | Mapping[ClientId, Request],
        *,
        deadline: float | None = None,
        quorum: int = 0,
        together: bool = False,
        work: Work | None = None,
        check: Check | None = None,
    ) -> dict[ClientId, Any]:
        """``ask`` with these very messages, whatever channel there is."""
        reached = self._reach(Requests.of(clients, request), deadline, work)
        outcomes = self.engine.ask(reached, together=together) if reached else {}
        return self._collect(reached, outcomes, quorum, together, check)

    def _tell(self, replies: Mapping[ClientId, Any]) -> None:
        if replies and self.listener is not None:
            self.listener(self.round, replies)

    def measure(self, request: Request, *, check: Check | None = None) -> tuple[dict[ClientId, Any], int]:
        """Put a question to every client that changes nothing and counts for nothing: to measure a model.

        All clients are reached: availability, time and accounting concern training only. ``check`` refuses a
        reply as in ``ask``.

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

    def ask_sum(
        self,
        clients: Iterable[ClientId],
        request: Request | Mapping[ClientId, Request],
        *,
        deadline: float | None = None,
        together: bool = False,
        work: Work | None = None,
        check: Check | None = None,
    ) -> Summed | None:
        """Like ``ask``, where only the sum of the replies matters.

        An engine may then compute all parts in one pass. The books are the same: every client's request and reply
        count with their full size.

        Returns:
            The sum over those who answered; None when nobody did.
        """
        requests = Requests.of(clients, request)
        if self.channel is not None and self.channel.takes(requests):
            return self.channel.ask_sum(self, requests, deadline=deadline, together=together, work=work, check=check)
        reached = self._reach(requests, deadline, work)
        if not reached:
            return None
        # Whose part is late shows only where each has its own.
        if self.config.training.execution == "fused" and not (self.availability.network and self._deadline is not None):
            total = self.engine.ask_sum(reached)
            first = next(iter(reached.values()))
            if total is not None and defect_of(total, first.check_reply, check) is None:
                self.engine.commit(reached)
                self._arrive(dict.fromkeys(reached, records.size(total)))
                self._count_up(reached, records.size(total) * len(reached))
                self._answered.add(type(first))
                return Summed(total, list(reached))
            # Something in the sum cannot be used: ask one by one to learn whose part it is.
        replies = self._collect(reached, self.engine.ask(reached, together=together), 0, together, check)
        self._tell(replies)
        if not replies:
            return None
        return Summed(reduce(records.add, replies.values()), list(replies))

    def relay(
        self,
        tasks: Iterable[tuple[ClientId, Request]],
        weights: Weights,
        *,
        heard: Callable[[int, Any], None] = lambda position, reply: None,
        work: Callable[[Any, int], float] = lambda task, samples: 0.0,
    ) -> Relayed:
        """Send the model from client to client; each works on it and passes it on.

        A hop that fails, or whose client is not there, is skipped: the next client gets the last good model.

        Args:
            tasks: Clients and their tasks, all of one kind. Each is taken only when the hop before it is over, so that
                a generator may decide what comes next by what it ``heard``.
            weights: The model that sets out.
            heard: Called after each hop with its position and its reply, None where there is none. An engine that
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

        def fail(client: ClientId, failure: Failure) -> None:
            self._fail(client, failure)
            if not failure.refused:
                failures.append((client, failure))

        for position, (client, task) in enumerate(tasks):
            if not self._present(client, task, size, work):
                heard(position, None)
                continue
            reached.add(client)
            if session is None:
                kinds = {type(task)}
                session = self.engine.relay(type(task), weights)
            self.accounting.hops += 1
            outcome = session.hop(client, task)
            if not isinstance(outcome, Failure):
                defect = defect_of(outcome, task.check_reply)
                session.keep(defect is None)
                outcome = outcome if defect is None else Failure(defect, refused=True)
            if isinstance(outcome, Failure):
                fail(client, outcome)
                heard(position, None)
            else:
                done.append((position, client))
                heard(position, outcome)
        if session is not None:
            weights, outcomes = session.finish()
            for (position, client), outcome in zip(done, outcomes, strict=True):
                if isinstance(outcome, Failure):
                    fail(client, outcome)
                    heard(position, None)
                else:
                    replies[position] = outcome
                    self._count_up([client], records.size(outcome))
            self._refuse_total_failure(kinds, reached, failures)
        return Relayed(weights, replies)

    def _refuse_total_failure(
        self, kinds: set[type[Request]], reached: set[ClientId], failures: list[tuple[ClientId, Failure]]
    ) -> None:
        """Raise where each client of a relay raised an exception and nobody ever got such tasks done."""
        raised = {client for client, failure in failures if failure.error is not None}
        if raised < reached:
            # A task that asks for nothing may succeed and prove nothing, so that replies alone do not count.
            self._answered |= kinds
        else:
            self._raise_if_hopeless(reached, len(raised), kinds, failures)

    def _present(self, client: ClientId, task: Request, model: int, work: Callable[[Any, int], float]) -> bool:
        """Whether a hop with a model of so many bytes reaches its client; cheap for one that was reached before."""
        if (
            not self.availability.simulates_time
            and client in self.accounting.invited
            and self._online.get(client, False)
        ):
            self.accounting.bytes_down += records.size(task) + model
            return True
        return bool(self._reach(Requests([task], {client: 0}), None, partial(work, task), model))

    def _reach(
        self,
        requests: Requests,
        deadline: float | None,
        work: Work | None,
        model: int | None = None,
    ) -> Requests:
        """Those of the requests that reach their client and will be answered in time.

        What is sent to clients that turn out to be late counts too. With each request of a relay goes a ``model`` of so
        many bytes; None for an exchange.
        """
        clients = sorted(requests)
        if not clients:
            return requests
        if clients[0] < 0 or clients[-1] >= self.config.clients:
            raise ValueError(f"clients {clients[0]} … {clients[-1]} asked; there are 0 … {self.config.clients - 1}")
        self.accounting.invited.update(clients)
        clients = self._online_of(clients)
        distinct = [records.size(request) + (model or 0) for request in requests.distinct]
        sizes = {client: distinct[requests.which[client]] for client in clients}
        self.accounting.bytes_down += sum(sizes.values())
        self.accounting.exchanges += model is None
        taken = self._work(clients, work)
        clients = self._in_time(clients, taken, deadline, sizes)
        if model is not None:
            self._pass_time()  # the model goes on to the next client, and comes back but once
        return requests.among(clients, taken)

    def _online_of(self, clients: list[ClientId]) -> list[ClientId]:
        """Those of some clients who are there; each is drawn once a round."""
        if self.round == 0:
            return clients
        online = self._online
        if new := [client for client in clients if client not in online]:
            drawn = self.availability.online(np.array(new, dtype=np.int64), self.round, self.config.seed)
            online.update(zip(new, drawn.tolist(), strict=True))
        self._miss("dropped", [client for client in clients if not online[client]], self.accounting.dropped)
        return [client for client in clients if online[client]]

    def _work(self, clients: list[ClientId], work: Work | None) -> Mapping[ClientId, float]:
        """Sample-gradients of each client's answer; none where nobody says, or the sizes are not known."""
        if isinstance(work, Mapping):
            return work
        sizes = self.config.sizes
        if work is None or sizes is None:
            return {}
        return {client: work(int(sizes[client])) for client in clients}

    def _in_time(
        self,
        clients: list[ClientId],
        work: Mapping[ClientId, float],
        deadline: float | None,
        sizes: Mapping[int, int],
    ) -> list[ClientId]:
        """Those of some clients who have the request and have done its work before the deadline."""
        availability = self.availability
        self._clock = {}
        if self.config.sizes is None or self.round == 0 or not clients:
            return clients
        self._deadline = availability.deadline if deadline is None else deadline
        if self._deadline is None and not availability.simulates_time:
            return clients
        done = [work.get(client, 0.0) for client in clients]
        asked = np.array(clients, dtype=np.int64)
        seconds = availability.seconds(asked, np.array(done, dtype=np.float64), self.config.seed)
        if availability.network:
            down = availability.bandwidth_down
            seconds = seconds + [availability.transfer(sizes[client], down) for client in clients]
        late = seconds > (math.inf if self._deadline is None else self._deadline)
        # A client that is too late is not simulated: its work would be thrown away, and its state stays as it was.
        self._miss("late", asked[late].tolist(), self.accounting.late)
        self._clock = dict(zip(clients, seconds.tolist(), strict=True))
        if not availability.network or late.all():
            self._pass_time()
        in_time: list[ClientId] = asked[~late].tolist()
        return in_time

    def _arrive(self, answers: Mapping[ClientId, int]) -> set[ClientId]:
        """Let answers of so many bytes be on their way; those of them that come too late."""
        availability = self.availability
        if not self._clock or not availability.network:
            return set()
        for client, size in answers.items():
            self._clock[client] += availability.transfer(size, availability.bandwidth_up)
        late = [c for c in answers if self._deadline is not None and self._clock[c] > self._deadline]
        self._miss("late", late, self.accounting.late)
        self._pass_time()
        return set(late)

    def _pass_time(self) -> None:
        """Wait for the last of an exchange, or up to the deadline."""
        if not self._clock:
            return
        last = max(self._clock.values())
        self.accounting.simulated_seconds += last if self._deadline is None else min(last, self._deadline)
        self._clock = {}

    def _miss(self, kind: str, clients: list[ClientId], seen: set[ClientId]) -> None:
        fresh = [client for client in clients if client not in seen]
        if fresh:
            seen.update(fresh)
            self.note(kind, fresh)

    def _collect(
        self,
        asked: Mapping[ClientId, Request],
        outcomes: Mapping[ClientId, Reply | Failure],
        quorum: int = 0,
        together: bool = False,
        check: Check | None = None,
    ) -> dict[ClientId, Any]:
        good: dict[ClientId, Any] = {}
        failures: dict[ClientId, Failure] = {}
        refused = False
        for client in sorted(outcomes):
            outcome = outcomes[client]
            if isinstance(outcome, Failure):
                failures[client] = outcome
            elif defect := defect_of(outcome, asked[client].check_reply, check):
                refused = True
                self._fail(client, Failure(defect, refused=True))
            else:
                good[client] = outcome
        sizes = {client: records.size(reply) for client, reply in good.items()}
        for client in self._arrive(sizes):
            refused = True
            del good[client], sizes[client]
        kinds = {type(request) for request in asked.values()}
        raised = sum(failure.error is not None for failure in failures.values())
        self._raise_if_hopeless(set(asked), raised, kinds, list(failures.items()))
        if together and len(good) < len(outcomes):
            # Everybody's answer holds parts of sums to which a reply that does not count has added.
            void = Failure("the group's sums are void: another of its clients did not count", bystander=True)
            failures |= dict.fromkeys(good, void)
            good = {}
        nobodys = all(failure.bystander for failure in failures.values()) and not refused
        for client, failure in failures.items():
            # Who only waited for somebody that failed has not; but a group may also break without anybody's doing.
            if nobodys or not failure.bystander:
                self._fail(client, failure)
        if len(good) < quorum:
            self.engine.commit([])
            answered = f"{len(good)} of {len(asked)} clients answered"
            raise QuorumError(f"round {self.round} of {self.method}: {answered}, {quorum} are needed")
        self.engine.commit(good)
        if good:
            self._answered |= kinds
        self._count_up(good, sum(sizes[client] for client in good))
        return good

    def _raise_if_hopeless(
        self,
        asked: set[ClientId],
        raised: int,
        kinds: set[type[Request]],
        failures: list[tuple[ClientId, Failure]],
    ) -> None:
        """Raise where the program is at fault: several clients were asked, all raised, and nobody ever answered."""
        several = len(asked) >= min(2, self.config.clients)
        if self.resumed or not several or raised < len(asked) or kinds & self._answered:
            return
        client, failure = failures[0]
        raise ClientsFailedError(
            f"all {len(asked)} clients failed in round {self.round} of {self.method}; client {client}: {failure.reason}"
        ) from failure.error

    def _count_up(self, clients: Iterable[ClientId], size: int) -> None:
        self.accounting.returned.update(clients)
        self.accounting.bytes_up += size

    def _fail(self, client: ClientId, failure: Failure) -> None:
        self.accounting.failed.add(client)
        kind = "refused" if failure.refused else "failed"
        self.note(kind, [client], f"client {client} in round {self.round} of {self.method}: {failure.reason}")
