"""What communication costs, as Stratify counts it (Stratify §IV-B)."""

from __future__ import annotations

from typing import Any

from fedstrata import records
from fedstrata.federation.messages import Weights


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
