"""Draw the order of the labels in an epoch (the schedule), and find the clients with samples of each label.

The schedule is the random sequence of labels that Stratify §III defines. At each position, a client trains on one
sample of the position's label.

A *placeholder* is a number that stands for a label, so that the server does not need to know the label.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Literal

import numpy as np

from fedstrata.base.arrays import Floats, Ints
from fedstrata.base.records import record
from fedstrata.sampling.label_counts import LabelReply

Rule = Literal["capped", "uniform", "uncapped"]


@record("Holders")
class Holders:
    """The clients with samples of each label (the label's *holders*), and their numbers of samples.

    Args:
        placeholders: The numbers that stand for the labels in requests to clients (placeholders), shape (P,). In other
            arrays, the server represents a placeholder by its index in ``placeholders``, called its *place*.
        offsets: The indices at which each placeholder's entries begin in ``clients`` and ``counts``, shape (P + 1,).
            The last offset is the length of ``clients`` and ``counts``.
        clients: The holders of the first placeholder, then the holders of the second placeholder, and so on, shape
            (offsets[-1],). The holders of each placeholder are in ascending order.
        counts: For each entry of ``clients``, the client's number of samples of the label, shape (offsets[-1],).
    """

    placeholders: Ints
    offsets: Ints
    clients: Ints
    counts: Ints

    @classmethod
    def of(cls, replies: Mapping[int, LabelReply]) -> Holders:
        """Find the holders of each label in the clients' reports."""
        if not replies:
            empty = np.empty(0, dtype=np.int64)
            return cls(empty, np.zeros(1, dtype=np.int64), empty, empty)
        labels = np.concatenate([reply.labels.numpy() for reply in replies.values()])
        counts = np.concatenate([reply.counts.numpy() for reply in replies.values()])
        clients = np.repeat(np.fromiter(replies, dtype=np.int64), [len(reply.labels) for reply in replies.values()])
        order = np.lexsort((clients, labels))
        placeholders, sizes = np.unique(labels, return_counts=True)
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return cls(placeholders.astype(np.int64), offsets, clients[order], counts[order])

    @cached_property
    def totals(self) -> Ints:
        """The number of samples of each label over all clients, in the order of ``placeholders``, shape (P,)."""
        if len(self.clients) == 0:
            return np.zeros(len(self.placeholders), dtype=np.int64)
        return np.add.reduceat(self.counts, self.offsets[:-1])

    def of_placeholder(self, place: int) -> tuple[Ints, Ints]:
        """Return the holders of ``placeholders[place]``, and the number of samples of the label at each holder."""
        part = slice(self.offsets[place], self.offsets[place + 1])
        return self.clients[part], self.counts[part]


def frequencies(totals: Ints, rule: Rule = "capped", cap: int | None = None) -> Ints:
    """Return how many samples of each label l an epoch uses (f_l in Stratify §III-A).

    Args:
        totals: The number of samples of each label, shape (P,).
        rule: The rule for f_l. ``uniform``: the mean of ``totals`` for every label. ``capped``: the label's total, or
            ``cap`` if the total is larger. ``uncapped``: the label's total.
        cap: The maximum of f_l for the rule ``capped``. Default: the median of ``totals``.

    Returns:
        The number f_l for every label, shape (P,).

    >>> frequencies(np.array([10, 4, 1])).tolist()
    [4, 4, 1]
    >>> frequencies(np.array([10, 4, 1]), "uniform").tolist()
    [5, 5, 5]
    """
    if len(totals) == 0 or rule == "uncapped":
        return totals
    if rule == "uniform":
        return np.full_like(totals, round(float(totals.mean())))
    limit = cap if cap is not None else int(np.median(totals))
    return np.minimum(totals, max(limit, 1))


def label_weights(totals: Ints, frequency: Ints) -> Floats:
    """Return w_l = (n_l / Σ n) / (f_l / Σ f), the weight of label l, which compensates for its frequency f_l.

    An entry of the schedule has label l with the probability f_l / Σ f. In the data, the label's fraction is n_l / Σ n.
    With the weights w_l, the expected gradient of a scheduled sample is the gradient of the mean loss over all samples.
    These weights are not part of the Stratify paper.

    Args:
        totals: The number n_l of samples of each label, shape (P,).
        frequency: For each label l, the number f_l of entries of the schedule with this label, shape (P,).

    Returns:
        The weight w_l of each label, float64, shape (P,). A label that is not in the schedule gets the weight 1.

    >>> label_weights(np.array([6, 2]), np.array([2, 2])).tolist()
    [1.5, 0.5]
    """
    weights = totals * (frequency.sum() / max(totals.sum(), 1)) / np.maximum(frequency, 1)
    return np.where(frequency > 0, weights, 1.0)


def schedule(frequency: Ints, generator: np.random.Generator) -> Ints:
    """Return the stratified label schedule (SLS): f_l copies of every label l, in random order.

    Args:
        frequency: For each label l, the number f_l of samples to train on in the epoch, shape (P,).
        generator: The random generator.

    Returns:
        The label of each entry of the schedule, as an index into ``frequency``, shape (Σ f_l,).
    """
    return generator.permutation(np.repeat(np.arange(len(frequency)), frequency))
