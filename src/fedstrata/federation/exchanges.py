"""The exchanges of a run: which clients are reached, which replies count, and what it costs; and the log of a round."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial, reduce
from typing import Any

import numpy as np

from fedstrata.base import records
from fedstrata.base.errors import ClientsFailedError
from fedstrata.federation.availability import Availability
from fedstrata.federation.clock import Clock
from fedstrata.federation.engine import Failure, FederationConfig
from fedstrata.federation.messages import ClientId, Reply, Request, Requests, Weights, Work
from fedstrata.federation.reply_checks import Check, defect_of


class Replies(dict[ClientId, Any]):
    """Replies by client, ascending."""

    def total(self) -> Any:
        """Return the sum of all replies."""
        return reduce(records.add, self.values())


class RoundLog:
    """What one round cost, who took part in it, and what happened.

    Args:
        round: The round, counted from 1; 0 while clients enrol.
        method: The method's name, for messages.
    """

    def __init__(self, round: int = 0, method: str = "") -> None:
        self.round, self.method = round, method
        self.invited: set[ClientId] = set()
        self.returned: set[ClientId] = set()
        self.dropped: set[ClientId] = set()
        self.late: set[ClientId] = set()
        self.failed: set[ClientId] = set()
        self.exchanges = self.hops = self.bytes_up = self.bytes_down = 0
        self.simulated_seconds = 0.0
        self.events: list[dict[str, Any]] = []

    def note(self, kind: str, clients: Iterable[ClientId] = (), reason: str = "") -> None:
        """Record an event."""
        event: dict[str, Any] = {"round": self.round, "kind": kind}
        if listed := [int(client) for client in clients]:
            event["clients"] = listed
        if reason:
            event["reason"] = reason
        self.events.append(event)

    def drop(self, clients: Iterable[ClientId]) -> None:
        """Record clients that are not there; each once."""
        if new := [client for client in clients if client not in self.dropped]:
            self.dropped.update(new)
            self.note("dropped", new)

    def miss_deadline(self, clients: Iterable[ClientId]) -> None:
        """Record clients that are too late; each once."""
        if new := [client for client in clients if client not in self.late]:
            self.late.update(new)
            self.note("late", new)

    def fail(self, client: ClientId, failure: Failure) -> None:
        """Record why a client's answer does not count."""
        self.failed.add(client)
        kind = "refused" if failure.refused else "failed"
        self.note(kind, [client], f"client {client} in round {self.round} of {self.method}: {failure.reason}")

    def absent(self) -> set[ClientId]:
        """Return the clients that were invited and did not answer at least once."""
        return self.dropped | self.late | self.failed

    def metrics(self) -> dict[str, Any]:
        """Return counts of distinct clients, exchanges and hops, bytes, and simulated seconds."""
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
    """The exchanges of a run: which clients are reached, which replies count, and what it costs.

    Args:
        config: The settings on which server and clients agreed.
        availability: Which clients are there in a round, and how fast they are.
        method: The method's name, for messages.
    """

    def __init__(self, config: FederationConfig, availability: Availability, method: str) -> None:
        self._config, self._availability, self._method = config, availability, method
        self.log = RoundLog(0, method)
        self.answered: set[type[Request]] = set()
        """Kinds of requests that some client answered."""
        self.resumed = False
        """Whether earlier rounds ran in another process, so that ``answered`` lacks what clients answered then."""
        self.clock: Clock | None = None
        """Simulated time; None if nothing depends on it."""
        if config.sizes is not None and availability.simulates_time:
            self.clock = Clock(availability, config.seed)
        self._online: dict[ClientId, bool] = {}

    def begin(self, round: int) -> None:
        """Begin a round."""
        self.log, self._online = RoundLog(round, self._method), {}

    def reach_hop(self, client: ClientId, task: Request, model: int, work: Callable[[Any, int], float]) -> bool:
        """Return whether a hop with a model of so many bytes reaches its client; cheap if an earlier hop did."""
        online = self._availability.always_online or self._online.get(client, False)
        if self.clock is None and client in self.log.invited and online:
            self.log.bytes_down += records.size(task) + model
            return True
        return bool(self.reach(Requests([task], {client: 0}), partial(work, task), model))

    def reach(self, requests: Requests, work: Work | None, model: int | None = None) -> Requests:
        """Return the requests that reach their clients and will be answered in time.

        What is sent to clients that turn out to be late counts too. With each request of a relay goes a ``model`` of so
        many bytes; None for an exchange.
        """
        clients, log = sorted(requests), self.log
        if not clients:
            return requests
        if clients[0] < 0 or clients[-1] >= self._config.clients:
            raise ValueError(f"clients {clients[0]} … {clients[-1]} asked; there are 0 … {self._config.clients - 1}")
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
                self.clock.pass_time(log)  # the model goes on to the next client, and comes back only once
        return requests.among(clients, work)

    def _online_of(self, clients: list[ClientId]) -> list[ClientId]:
        """Return the clients that are there; each is drawn once a round."""
        online = self._online
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
        """Return the replies that count, and log why the others do not."""
        log, replies = self.log, Replies()
        failures: dict[ClientId, Failure] = {}
        refused = False
        for client in sorted(outcomes):
            outcome = outcomes[client]
            if isinstance(outcome, Failure):
                failures[client] = outcome
            elif defect := defect_of(outcome, asked[client].check_reply, check):
                refused = True
                log.fail(client, Failure(defect, refused=True))
            else:
                replies[client] = outcome
        sizes = {client: records.size(reply) for client, reply in replies.items()}
        for client in self.clock.arrive(sizes, log) if self.clock is not None else ():
            refused = True
            del replies[client], sizes[client]
        kinds = set(map(type, asked.values()))
        if failures:
            raised = sum(failure.error is not None for failure in failures.values())
            self.raise_if_hopeless(set(asked), raised, kinds, list(failures.items()))
        if together and len(replies) < len(outcomes):
            # Every reply depends on sums to which a reply that does not count has contributed.
            void = Failure("the group's sums are void: another of its clients did not count", bystander=True)
            failures |= dict.fromkeys(replies, void)
            replies.clear()
        if failures:
            # A client that only waited for one that failed has not failed itself. If nobody did, the group broke.
            broken = not refused and all(failure.bystander for failure in failures.values())
            for client, failure in failures.items():
                if broken or not failure.bystander:
                    log.fail(client, failure)
        if replies:
            self.answered |= kinds
        log.returned.update(replies)
        log.bytes_up += sum(map(sizes.__getitem__, replies))
        return replies

    def raise_if_hopeless(
        self,
        asked: set[ClientId],
        raised: int,
        kinds: set[type[Request]],
        failures: list[tuple[ClientId, Failure]],
    ) -> None:
        """Raise if the program is at fault: several clients were asked, all raised, and none ever answered."""
        several = len(asked) >= min(2, self._config.clients)
        if self.resumed or not several or raised < len(asked) or kinds & self.answered:
            return
        client, failure = failures[0]
        where = f"in round {self.log.round} of {self._method}"
        raise ClientsFailedError(
            f"all {len(asked)} clients failed {where}; client {client}: {failure.reason}"
        ) from failure.error


def communication(weights: Weights, transfers: int, clients: int, round: int) -> dict[str, Any]:
    """Return T = R × C × f and its parts, for the metrics.

    Args:
        weights: What is transferred: a model, or a gradient of its size.
        transfers: Transfers of it in this round, over all clients. A client that gets a model and returns a gradient
            takes part in one. A client that gets the travelling model and passes it on also takes part in one.
        clients: N.
        round: R, rounds so far.

    Returns:
        ``transfers``; ``transfers_per_client``, f, the mean over all clients; ``update_bytes``, C; and
        ``client_bytes``, T, what a client has sent by now if every round was like this one.

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
