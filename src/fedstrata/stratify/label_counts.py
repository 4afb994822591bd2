"""A request for the clients' label counts, for samplers and methods that users write."""

from __future__ import annotations

import numpy as np

from fedstrata.base.arrays import Ints
from fedstrata.base.records import record
from fedstrata.federation.allowed import Allowed
from fedstrata.federation.federation import Federation
from fedstrata.stratify.messages import LabelReport


@record("LabelCounts")
class LabelCounts:
    """How many samples of each class the clients hold.

    Args:
        known: The clients that reported their counts, ascending, shape (n,).
        counts: The number of samples of each of C classes at each client in ``known``, shape (n, C). A class of which a
            client has fewer than ``privacy.min_samples`` samples counts as 0.
    """

    known: Ints
    counts: Ints

    @classmethod
    def ask(cls, federation: Federation) -> LabelCounts:
        """Ask every client for its label counts, in the enrolment before the first round.

        A sampler or method that calls this in ``init`` lists ``allowed_label_counts()`` in ``allowed``.
        """
        replies = federation.ask(federation.candidates().tolist(), LabelReport())
        counts = np.zeros((len(replies), federation.config.strata), dtype=np.int64)
        for row, reply in enumerate(replies.values()):
            counts[row, reply.labels.numpy()] = reply.counts.numpy()
        return cls(np.fromiter(replies, dtype=np.int64), counts)

    def among(self, candidates: Ints) -> tuple[Ints, Ints]:
        """Return the candidates with known counts, shape (m,), and their counts, shape (m, C)."""
        available = np.isin(self.known, candidates)
        return self.known[available], self.counts[available]


def allowed_label_counts() -> Allowed:
    """Declare the request that ``LabelCounts.ask`` sends, so that real sites accept it."""
    return Allowed(LabelReport)
