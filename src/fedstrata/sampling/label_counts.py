"""Ask clients for their label counts, and store the counts on the server."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedstrata.base.arrays import Ints
from fedstrata.base.errors import ReplyRefusedError
from fedstrata.base.records import record
from fedstrata.federation.allowed import Allowed
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Reply, Request, RequestRule
from fedstrata.federation.reply_checks import require_shape

MOST_SAMPLES = 2**40
"""The maximum number of samples per label that a client may report, so that sums over clients fit into 64 bits."""


@record("LabelReply")
class LabelReply(Reply):
    """The labels of a client's samples, and the client's number of samples of each label.

    Args:
        labels: The labels, int64, in random order.
        counts: The number of samples of each label, int64, in the order of ``labels``.
    """

    labels: Tensor
    counts: Tensor


@record("LabelReport")
class LabelReport(Request):
    """A request for the labels of a client's samples and for the number of samples of each label."""

    reply_type: ClassVar[type[Reply]] = LabelReply
    rule = RequestRule(
        "its labels and its number of samples of each label, without encryption",
        phase="enrolment",
        discloses=frozenset({"labels", "sizes"}),
    )

    def check(self, reply: LabelReply) -> None:
        """Raise ``ReplyRefusedError`` if a label occurs twice, or if the number of its samples is out of range."""
        require_shape(reply.labels, (-1,), torch.int64, "labels")
        require_shape(reply.counts, (len(reply.labels),), torch.int64, "counts")
        if len(torch.unique(reply.labels)) != len(reply.labels):
            raise ReplyRefusedError("a label occurs twice in the reply")
        if bool(((reply.counts < 1) | (reply.counts > MOST_SAMPLES)).any()):
            raise ReplyRefusedError(f"a label must have 1 to {MOST_SAMPLES} samples")


@record("LabelCounts")
class LabelCounts:
    """The number of samples of each class at each client.

    Args:
        known: The clients that reported their counts, ascending, shape (n,).
        counts: For each client in ``known`` and each of C classes, the number of samples, shape (n, C). Numbers below
            ``privacy.min_samples`` are replaced by 0.
    """

    known: Ints
    counts: Ints

    @classmethod
    def ask(cls, federation: Federation) -> LabelCounts:
        """Ask every client for its label counts before the first round.

        If ``init`` of a sampler or method calls this function, its ``allowed`` must include ``allowed_label_counts()``.
        """
        strata = federation.config.strata

        def check(reply: LabelReply) -> None:
            if bool(((reply.labels < 0) | (reply.labels >= strata)).any()):
                raise ReplyRefusedError(f"a label is not between 0 and {strata - 1}")

        replies = federation.ask(federation.candidates().tolist(), LabelReport(), check=check)
        counts = np.zeros((len(replies), strata), dtype=np.int64)
        for row, reply in enumerate(replies.values()):
            counts[row, reply.labels.numpy()] = reply.counts.numpy()
        return cls(np.fromiter(replies, dtype=np.int64), counts)

    def among(self, candidates: Ints) -> tuple[Ints, Ints]:
        """Return the candidates with known counts, shape (m,), and the counts, shape (m, C)."""
        available = np.isin(self.known, candidates)
        return self.known[available], self.counts[available]


def allowed_label_counts() -> Allowed:
    """Return the declaration of the request that ``LabelCounts.ask`` sends. Sites refuse undeclared requests."""
    return Allowed(LabelReport)
