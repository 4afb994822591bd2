"""Decide which clients a request reaches, and which replies are used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import numpy as np

from fedstrata.base import records
from fedstrata.base.errors import ClientsFailedError
from fedstrata.federation.availability import Availability
from fedstrata.federation.clock import Clock
from fedstrata.federation.engine import Failure, FederationConfig
from fedstrata.federation.messages import (
    ClientId,
    FitReply,
    Reply,
    Request,
    Requests,
    WeightedFitReply,
    Weights,
    Work,
)
from fedstrata.federation.reply_checks import Check, defect_of


class Replies(dict[ClientId, Any]):
    """A mapping from clients, in ascending order, to their replies."""

    def total(self) -> Any:
        """Return the sum of all replies."""
        return reduce(records.add, self.values())


@dataclass(eq=False)
class RoundLog:
    """The log of a round: bytes, simulated seconds, the clients that took part, and events.

    Args:
        round: The round, counted from 1; 0 before the first round.
        method: The method's name, for error messages.
        online: For each client that got a request, whether the client is online in this round.
    """

    round: int = 0
    method: str = ""
    invited: set[ClientId] = field(default_factory=set)
    returned: set[ClientId] = field(default_factory=set)
    dropped: set[ClientId] = field(default_factory=set)
    late: set[ClientId] = field(default_factory=set)
    failed: set[ClientId] = field(default_factory=set)
    exchanges: int = 0
    hops: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    simulated_seconds: float = 0.0
    events: list[dict[str, Any]] = field(default_factory=list)
    online: dict[ClientId, bool] = field(default_factory=dict)

    def note(self, kind: str, clients: Iterable[ClientId] = (), reason: str = "") -> None:
        """Record an event of this round: its type, its clients (if any) and the reason (if any)."""
        event: dict[str, Any] = {"round": self.round, "kind": kind}
        if listed := [int(client) for client in clients]:
            event["clients"] = listed
        if reason:
            event["reason"] = reason
        self.events.append(event)

    def drop(self, clients: Iterable[ClientId]) -> None:
        """Record clients that are offline, each client only once per round."""
        if new := [client for client in clients if client not in self.dropped]:
            self.dropped.update(new)
            self.note("dropped", new)

    def miss_deadline(self, clients: Iterable[ClientId]) -> None:
        """Record clients that miss the deadline, each client only once per round."""
        if new := [client for client in clients if client not in self.late]:
            self.late.update(new)
            self.note("late", new)

    def fail(self, client: ClientId, failure: Failure) -> None:
        """Record that a client's reply is not used, and why."""
        self.failed.add(client)
        kind = "refused" if failure.refused else "failed"
        self.note(kind, [client], f"client {client} in round {self.round} of {self.method}: {failure.reason}")

    def absent(self) -> set[ClientId]:
        """Return the clients that were offline, were late or failed in at least one exchange of the round."""
        return self.dropped | self.late | self.failed

    def metrics(self) -> dict[str, Any]:
        """Return the round's metrics: numbers of clients, exchanges, relay hops and bytes, and the simulated time."""
        taking_part: Mapping[str, Collection[ClientId]] = {
            "clients_invited": self.invited,
            "clients_returned": self.returned,
            "clients_dropped": self.dropped,
            "clients_late": self.late,
            "clients_failed": self.failed,
        }
        return {
            **{name: len(clients) for name, clients in taking_part.items()},
            "exchanges": self.exchanges,
            "hops": self.hops,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "simulated_seconds": self.simulated_seconds,
        }


class Exchanges:
    """The rules that decide which clients a request reaches, which replies are used, and what is logged.

    Args:
        config: The settings that server and clients share.
        availability: The model that simulates which clients are online in a round, and how fast they are.
        method: The method's name, for error messages.
    """

    def __init__(self, config: FederationConfig, availability: Availability, method: str) -> None:
        self._config, self._availability = config, availability
        self.log = RoundLog(0, method)
        """The log of the current round. Each round begins with a new log."""
        self.answered: set[type[Request]] = set()
        """The Python classes of requests that at least one client has answered."""
        self.resumed = False
        """Whether the run was resumed.

        In a resumed run, ``answered`` does not contain the requests of earlier rounds.
        """
        self.clock: Clock | None = None
        """The clock of simulated time; None if the settings do not need it, or if the clients' sizes are unknown."""
        if config.sizes is not None and availability.simulates_time:
            self.clock = Clock(availability, config.seed)

    def reach_hop(self, client: ClientId, task: Request, model: int, work: Callable[[Any, int], float]) -> bool:
        """Return True if a task reaches the next client of a relay. In a relay, a model travels between clients.

        The result is logged.

        Args:
            client: The client.
            task: The client's task.
            model: Size of the travelling model in bytes.
            work: See ``Federation.relay``.
        """
        online = self._availability.always_online or self.log.online.get(client, False)
        if self.clock is None and client in self.log.invited and online:
            self.log.bytes_down += records.size(task) + model
            return True
        return bool(self.reach(Requests([task], {client: 0}), partial(work, task), model))

    def reach(self, requests: Requests, work: Work | None, model: int | None = None) -> Requests:
        """Return the requests that reach their clients and will be answered in time. Log all requests that are sent.

        Args:
            requests: The requests.
            work: See ``Federation.ask``.
            model: Size in bytes of the model that travels with the request in a relay; None outside a relay.
        """
        clients, log = sorted(requests), self.log
        if not clients:
            return requests
        if clients[0] < 0 or clients[-1] >= self._config.clients:
            raise ValueError(
                f"there are requests for clients {clients[0]} … {clients[-1]}, but only the clients 0 … "
                f"{self._config.clients - 1} exist"
            )
        log.invited.update(clients)
        if self.log.round > 0 and not self._availability.always_online:
            clients = self._online_of(clients)
        distinct = [size + (model or 0) for size in map(records.size, requests.distinct)]
        sizes = {client: distinct[requests.which[client]] for client in clients}
        log.bytes_down += sum(sizes.values())
        log.exchanges += model is None
        if callable(work):
            samples = self._config.sizes
            work = {} if samples is None else {client: work(int(samples[client])) for client in clients}
        work = work or {}
        if self.clock is not None and self.log.round > 0:
            clients = self.clock.start({client: work.get(client, 0.0) for client in clients}, sizes, log)
            if model is not None:
                # In a relay, the client sends the model to the next client. Its reply to the server takes no simulated
                # time, so add the client's time to the clock now.
                self.clock.pass_time(log)
        which = {client: requests.which[client] for client in clients}
        return Requests(requests.distinct, which, work or requests.work)

    def _online_of(self, clients: list[ClientId]) -> list[ClientId]:
        """Return the online clients, which are determined once per round."""
        online = self.log.online
        if new := [client for client in clients if client not in online]:
            drawn = self._availability.online(np.array(new, dtype=np.int64), self.log.round, self._config.seed)
            online.update(zip(new, drawn.tolist(), strict=True))
        there = [client for client in clients if online[client]]
        if len(there) < len(clients):
            self.log.drop([client for client in clients if not online[client]])
        return there

    def collect(
        self,
        asked: Requests,
        outcomes: Mapping[ClientId, Reply | Failure],
        together: bool,
        check: Check | None,
    ) -> Replies:
        """Return the usable replies, and log why the remaining replies are not used.

        Args:
            asked: The requests that were sent.
            outcomes: The reply or the failure of each client.
            together: Whether tensors were added up over the clients, so that each reply depends on all clients.
            check: A check of the replies in addition to ``Request.check``; None for no further check.
        """
        log, replies = self.log, Replies()
        most, places = self._config.most_samples, self._config.places
        failures: dict[ClientId, Failure] = {}
        refused = False
        for client in sorted(outcomes):
            outcome = outcomes[client]
            if isinstance(outcome, Failure):
                failures[client] = outcome
            elif defect := defect_of(outcome, asked[client].check_reply, check):
                refused = True
                log.fail(client, Failure(defect, refused=True))
            elif most is not None and isinstance(outcome, FitReply) and outcome.samples > most[client]:
                refused = True
                reason = f"the number of samples in the reply is {outcome.samples}, but the client has {most[client]}"
                log.fail(client, Failure(reason, refused=True))
            elif isinstance(outcome, WeightedFitReply) and not 0 <= outcome.weight <= outcome.samples * places:
                refused = True
                weight = f"the reply has a weight of {outcome.weight:g}, but must have at most {places} for each of"
                log.fail(client, Failure(f"{weight} its {outcome.samples} samples", refused=True))
            else:
                replies[client] = outcome
        sizes = {client: records.size(reply) for client, reply in replies.items()}
        for client in self.clock.arrive(sizes, log) if self.clock is not None else ():
            refused = True
            del replies[client], sizes[client]
        kinds = set(map(type, asked.values()))
        if failures:
            self.raise_if_hopeless(set(asked), kinds, list(failures.items()))
        if together and len(replies) < len(outcomes):
            # Every reply depends on sums over all these clients. If one client has no valid reply, no reply is valid.
            void = Failure("the sums are invalid, because another client of the group failed", bystander=True)
            failures |= dict.fromkeys(replies, void)
            replies.clear()
        if failures:
            self._log_failures(failures, refused)
        if replies:
            self.answered |= kinds
        log.returned.update(replies)
        log.bytes_up += sum(map(sizes.__getitem__, replies))
        return replies

    def _log_failures(self, failures: Mapping[ClientId, Failure], refused: bool) -> None:
        """Log the failures, except the failures of bystanders, which only waited for a failed client.

        Log bystanders only if no other entry of the log explains why the exchange failed.

        Args:
            failures: The failure of each client.
            refused: Whether the log already contains the refusal of a reply.
        """
        broken = not refused and all(failure.bystander for failure in failures.values())
        for client, failure in failures.items():
            if broken or not failure.bystander:
                self.log.fail(client, failure)

    def raise_if_hopeless(
        self, asked: set[ClientId], kinds: set[type[Request]], failures: list[tuple[ClientId, Failure]]
    ) -> None:
        """Raise ``ClientsFailedError`` if the failures are probably caused by a fault in the program.

        A fault is assumed if all clients that got a request raised an exception, and no client has ever answered a
        request of these ``kinds``. With two or more clients in the federation, a fault is assumed only if at least
        two clients got a request.

        Args:
            asked: The clients that got a request.
            kinds: The Python classes of the requests.
            failures: The failed clients and their failures. The message quotes the first failure.
        """
        raised = {client for client, failure in failures if failure.error is not None}
        several = len(asked) >= min(2, self._config.clients)
        if self.resumed or not several or raised < asked or kinds & self.answered:
            return
        client, failure = failures[0]
        where = f"in round {self.log.round} of {self.log.method}"
        raise ClientsFailedError(
            f"all {len(asked)} clients failed {where}. For example, client {client}: {failure.reason}"
        ) from failure.error


def communication(weights: Weights, transfers: int, clients: int, round: int) -> dict[str, Any]:
    """Return communication metrics, such as the mean number of bytes that a client has sent since round 1.

    Args:
        weights: The model or gradient that is transferred, with a size of C bytes.
        transfers: Number of transfers in this round, over all clients. In one transfer, a client receives a model, and
            either returns a gradient or passes the model on (in a relay).
        clients: Number of clients, N.
        round: Number of finished rounds, R, including this round.

    Returns:
        A mapping with the metrics ``transfers``, ``transfers_per_client`` (f = ``transfers`` / N), ``update_bytes`` (C)
        and ``client_bytes``. ``client_bytes`` is the mean number of bytes that a client has sent: R × C × f. The
        formula assumes that all earlier rounds had the same number of transfers as this round.

    >>> communication(Weights({}, {}), 30, 10, 2)["transfers_per_client"]
    3.0
    """
    size = sum(tensor.numel() * tensor.element_size() for tensor in records.leaves_of(weights))
    frequency = transfers / clients
    return {
        "transfers": transfers,
        "transfers_per_client": frequency,
        "update_bytes": size,
        "client_bytes": round * size * frequency,
    }
