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
    """The number of samples of each class at each client.

    Args:
        known: The clients that reported their counts, ascending, shape (n,).
        counts: The number of samples of each of C classes at each client in ``known``, shape (n, C). A number below
            ``privacy.min_samples`` is replaced by 0.
    """

    known: Ints
    counts: Ints

    @classmethod
    def ask(cls, federation: Federation) -> LabelCounts:
        """Ask every client for its label counts during enrolment, before the first round.

        A sampler or method that calls this function in ``init`` must list ``allowed_label_counts()`` in ``allowed``.
        """
        replies = federation.ask(federation.candidates().tolist(), LabelReport())
        counts = np.zeros((len(replies), federation.config.strata), dtype=np.int64)
        for row, reply in enumerate(replies.values()):
            counts[row, reply.labels.numpy()] = reply.counts.numpy()
        return cls(np.fromiter(replies, dtype=np.int64), counts)

    def among(self, candidates: Ints) -> tuple[Ints, Ints]:
        """Return the candidates with known counts, shape (m,), and these counts, shape (m, C)."""
        available = np.isin(self.known, candidates)
        return self.known[available], self.counts[available]


def allowed_label_counts() -> Allowed:
    """Return the declaration of the request that ``LabelCounts.ask`` sends, so that real sites accept the request."""
    return Allowed(LabelReport)
