"""The stratified label schedule, who holds which label, and batch selection (Stratify §III)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedstrata.federation.messages import LabelReply
from fedstrata.records import record

Ints = NDArray[np.int64]
Rule = Literal["capped", "uniform", "uncapped"]


@record
class Holders:
    """Which clients hold each placeholder, and how many samples.

    Args:
        placeholders: What clients call the placeholders, shape (P,); everything else knows them by their place here.
        offsets: Where each one's holders begin, shape (P + 1,).
        clients: Holders, ascending within a placeholder, shape (offsets[-1],).
        counts: n_k(p), the same shape.
    """

    placeholders: Ints
    offsets: Ints
    clients: Ints
    counts: Ints

    @classmethod
    def of(cls, replies: Mapping[int, LabelReply]) -> Holders:
        """From the clients' label reports."""
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

    def totals(self) -> Ints:
        """N(p), shape (P,)."""
        if len(self.clients) == 0:
            return np.zeros(len(self.placeholders), dtype=np.int64)
        return np.add.reduceat(self.counts, self.offsets[:-1])

    def of_placeholder(self, place: int) -> tuple[Ints, Ints]:
        """Holders of the placeholder at ``place``, and their counts."""
        part = slice(self.offsets[place], self.offsets[place + 1])
        return self.clients[part], self.counts[part]


def frequencies(totals: Ints, rule: Rule = "capped", cap: int | None = None) -> Ints:
    """f_l, how often each label is trained in an epoch (Stratify §III-A).

    Args:
        totals: N(l), shape (P,).
        rule: ``uniform``: the mean count for every label. ``capped``: min(N(l), cap). ``uncapped``: N(l).
        cap: The cap; the median of N(·) unless given.

    Returns:
        Shape (P,).

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


def schedule(frequency: Ints, draw: np.random.Generator) -> Ints:
    """SLS = shuffle(∪_l f_l × {l}): places of placeholders, shape (Σ f_l,)."""
    return draw.permutation(np.repeat(np.arange(len(frequency)), frequency))


def select_batch(
    wanted: Ints,
    available: Mapping[int, Ints],
    weights: Mapping[int, NDArray[np.float64]] | None,
    draw: np.random.Generator,
) -> Ints:
    """Clients for the positions of one batch (Stratify, Algorithm 2).

    For each placeholder p as many clients as p has positions are drawn from ``available[p]``, with replacement only
    where there are fewer clients than positions, and dealt to the positions of p in order.

    Args:
        wanted: The placeholder of every position, shape (B,).
        available: Clients by placeholder.
        weights: Selection weights by placeholder, alike in shape; None for uniform selection.
        draw: Randomness.

    Returns:
        The client of every position, −1 where nobody is available, shape (B,).
    """
    return select_batches(wanted, np.zeros(len(wanted), dtype=np.int64), available, weights, draw)


def select_batches(
    wanted: Ints,
    batch_of: Ints,
    available: Mapping[int, Ints],
    weights: Mapping[int, NDArray[np.float64]] | None,
    draw: np.random.Generator,
) -> Ints:
    """``select_batch`` for many batches at once.

    Args:
        wanted: The placeholder of every position, shape (L,).
        batch_of: The batch of every position, ascending, shape (L,).
        available: Clients by placeholder.
        weights: Selection weights by placeholder, alike in shape; None for uniform selection.
        draw: Randomness.

    Returns:
        The client of every position, −1 where nobody is available, shape (L,).
    """
    chosen = np.full(len(wanted), -1, dtype=np.int64)
    for p in np.unique(wanted).tolist():
        clients = available[p]
        if len(clients) == 0:
            continue
        positions = np.flatnonzero(wanted == p)
        _, begins, group, sizes = np.unique(
            batch_of[positions], return_index=True, return_inverse=True, return_counts=True
        )
        shares = None if weights is None else weights[p] / weights[p].sum()
        possible = len(clients) if shares is None else int((shares > 0).sum())
        place = np.arange(len(positions)) - begins[group]
        crowded = sizes[group] > possible
        chosen[positions[crowded]] = draw.choice(clients, size=int(crowded.sum()), p=shares)
        drawn = _orders(sizes <= possible, len(clients), shares, int(sizes.max()), draw)
        chosen[positions[~crowded]] = clients[drawn[group[~crowded], place[~crowded]]]
    return chosen


def _orders(
    groups: NDArray[np.bool_], clients: int, shares: NDArray[np.float64] | None, most: int, draw: np.random.Generator
) -> Ints:
    """For each of some groups, up to ``most`` clients drawn one after another without replacement, shape (G, most).

    Weighted draws follow the smallest of keys Exp(1) / share (Efraimidis and Spirakis 2006).
    """
    most = min(most, clients)
    orders = np.zeros((len(groups), most), dtype=np.int64)
    rows = np.flatnonzero(groups)
    if clients == 1:
        return orders
    if shares is None and clients > 32 * most:
        # Few among many: a draw each costs less than a key for everybody.
        for row in rows.tolist():
            orders[row] = draw.choice(clients, size=most, replace=False)
        return orders
    block = max(1, (1 << 21) // clients)
    for begin in range(0, len(rows), block):
        part = rows[begin : begin + block]
        keys = draw.standard_exponential((len(part), clients))
        if shares is not None:
            with np.errstate(divide="ignore"):
                keys /= shares
        orders[part] = np.argsort(keys, axis=1)[:, :most]
    return orders
