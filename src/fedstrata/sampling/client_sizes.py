"""How many samples the clients hold: asked of everybody once, by samplers that weight by size."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedstrata.federation.federation import Federation
from fedstrata.records import record
from fedstrata.sampling.messages import SizeReport


@record
class Sizes:
    """Who holds how much.

    Args:
        known: Clients that answered and hold something, ascending, int64.
        samples: n_k of each, int64.
    """

    known: NDArray[np.int64]
    samples: NDArray[np.int64]

    def among(self, candidates: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The candidates that are known, and their sizes."""
        there = np.isin(self.known, candidates)
        return self.known[there], self.samples[there]


def ask_sizes(federation: Federation) -> Sizes:
    """Ask every client for its plain n_k; who holds nothing or does not answer is never drawn."""
    request = SizeReport(federation.round, 0, 1.0)
    replies = federation.ask(dict.fromkeys(federation.candidates().tolist(), request))
    held = {client: reply.samples for client, reply in replies.items() if reply.samples}
    return Sizes(np.fromiter(held, dtype=np.int64), np.fromiter(held.values(), dtype=np.int64))
