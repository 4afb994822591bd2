"""What comes back from many clients at once, and what a round cost."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from fedstrata.base import records
from fedstrata.federation.messages import ClientId, Weights


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
    """The sum of replies, and who took part in it."""

    reply: Any
    clients: list[ClientId]


@dataclass
class Accounting:
    """What one round cost and who took part, for the metrics."""

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

    def absent(self) -> set[ClientId]:
        """Who was invited this round and did not answer at least once."""
        return self.dropped | self.late | self.failed

    def metrics(self) -> dict[str, Any]:
        """Counts of distinct clients, exchanges and bytes."""
        counts = {f"clients_{f.name}": len(getattr(self, f.name)) for f in dataclasses.fields(self)[:5]}
        rest = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)[5:]}
        return counts | rest


def communication(weights: Weights, transfers: int, clients: int, round: int) -> dict[str, Any]:
    """T = R × C × f, for the metrics.

    Args:
        weights: What is transferred, a model or a gradient of its size.
        transfers: Transfers of it in this round, over all clients: a client that gets a model and returns a gradient
            takes part in one; so does one that gets the travelling model and passes it on.
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
