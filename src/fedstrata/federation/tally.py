"""What comes back from many clients at once, and what a round cost."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

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
class Tally:
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
