"""What a round cost, who took part in it, and what happened."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from fedstrata.base import records
from fedstrata.federation.engine import Failure
from fedstrata.federation.messages import ClientId, Weights


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
