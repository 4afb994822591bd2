"""The exact 1-D k-means of many values: the cheapest division of a sorted line into segments.

A dynamic programme over all positions is exact and takes the time; Lloyd's iteration takes none and may be wrong. This
is both: bounds from a coarse grid say where the boundaries of the optimum can still be, Lloyd's iteration from the best
division seen says what the optimum costs at most, and only what the two leave open is looked at more finely, until the
bounds meet. Passes are a few operations on small arrays, whatever the number of values. For 178,110 values and 9
centres it is 1.8 times as fast as the whole programme (``benchmarks/fast_paths.py``).

The bound. Let boundary t lie somewhere in a run of consecutive values (a *bin*). Some of the bin then belong to the
segment on its left and the others to the one on its right. Moving the former to the bin's smallest value and the
latter to its largest, towards their segments, makes no segment costlier. The cost of a segment (the least second
moment about a point) is concave in the masses, so it is least where the bin goes to one side as a whole. Two choices
a bin: the programme over them bounds the optimum from below, and is exact once a bin is a single value.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FIRST, LATER, MOST = 96, 48, 600
"""Bins of the first grid and of the later ones, and how many a boundary may have: time grows with their square."""

TOLERANCE = 1e-10
"""What rounding may cost, relative to the optimum; a hundredth of it relative to the cost of one single segment."""


def segment(values: Floats, weights: Ints, count: int) -> Ints | None:
    """Divide values into segments so that Σ weight · (value − mean of its segment)² is least.

    Args:
        values: Different, finite and ascending, shape (n,).
        weights: How often each occurs, shape (n,), positive.
        count: Segments, k: at least 2 and less than n.

    Returns:
        Where each segment but the first begins, ascending, shape (k − 1,). None where too many divisions are nearly as
        good as the best, which takes data made for it.

    >>> segment(np.array([0.0, 0.2, 5.0, 8.8, 9.0]), np.ones(5, dtype=np.int64), 3).tolist()
    [2, 3]
    """
    x = values - np.average(values, weights=weights)
    sums = _prefix_sums(x, weights)
    edges = _first_edges(x)
    low, high = [edges[:-1]] * (count - 1), [edges[1:]] * (count - 1)
    best, cost = np.empty(0, dtype=np.int64), np.inf
    slack = 0.01 * TOLERANCE * float(sums[2, -1])
    while max(map(len, low)) <= MOST:
        bound, through, path = _bounds(x, sums, _padded(low), _padded(high))
        improved, reached = _lloyd(x, sums, path)
        if reached < cost:
            best, cost = improved, reached
        single = all((h - b == 1).all() for b, h in zip(low, high, strict=True))
        if single or cost - bound <= TOLERANCE * cost + slack:
            return best
        limit = cost + TOLERANCE * cost + slack
        finer = [_split(b, h, row[: len(b)] <= limit) for b, h, row in zip(low, high, through, strict=True)]
        low, high = [b for b, _ in finer], [h for _, h in finer]
    return None


def _prefix_sums(x: Floats, weights: Ints) -> Floats:
    """Σ w, Σ w x, Σ w x² of the first i values, shape (3, n + 1)."""
    sums = np.zeros((3, len(x) + 1))
    np.cumsum([weights, weights * x, weights * x * x], axis=1, out=sums[:, 1:])
    return sums


def _first_edges(x: Floats) -> Ints:
    """Half of the edges evenly by rank, half evenly by value: the latter for thin tails."""
    by_rank = np.linspace(0, len(x), FIRST // 2 + 1).astype(np.int64)
    by_value = np.searchsorted(x, np.linspace(x[0], x[-1], FIRST // 2 + 1)[1:-1])
    return np.union1d(by_rank, by_value)


def _padded(rows: list[Ints]) -> Ints:
    """Rows of different lengths as a matrix; the last entry is repeated."""
    longest = max(map(len, rows))
    return np.stack([np.pad(row, (0, longest - len(row)), mode="edge") for row in rows])


def _second_moment(sums: Floats) -> Floats:
    """Σ w (x − mean)² from Σ w, Σ w x, Σ w x² along the first axis; 0 for nothing."""
    mass = np.where(sums[0] > 0, sums[0], 1.0)
    moment: Floats = np.maximum(sums[2] - sums[1] * sums[1] / mass, 0.0)
    return moment


def _bounds(x: Floats, sums: Floats, low: Ints, high: Ints) -> tuple[float, Floats, Ints]:
    """Lower bounds of divisions whose boundary t lies in the bin [low, high) of row t.

    Args:
        x: The values, shape (n,).
        sums: Their prefix sums.
        low: Where bins begin, shape (k − 1, M).
        high: Where they end.

    Returns:
        Of all divisions; of those through each bin, shape (k − 1, M); and boundaries to which the first belongs.
    """
    boundaries, bins = low.shape
    below, above = sums[:, low], sums[:, high]
    mass, smallest, largest = above[0] - below[0], x[low], x[high - 1]
    # Choice 1: the bin goes to the left, at its smallest value. Choice 2: to the right, at its largest.
    ends = np.concatenate([below + _atom(mass, smallest), below], axis=2)
    starts = np.concatenate([above, above - _atom(mass, largest)], axis=2)
    first, last = np.tile(low, 2), np.tile(high, 2)

    between = _second_moment(ends[:, 1:, None, :] - starts[:, :-1, :, None])
    # A segment inside of what two bins share costs nothing; none goes backwards.
    between[last[:-1, :, None] > first[1:, None, :]] = 0.0
    between[last[1:, None, :] <= first[:-1, :, None]] = np.inf

    forward, backward = np.empty((boundaries, 2 * bins)), np.empty((boundaries, 2 * bins))
    forward[0], backward[-1] = _second_moment(ends[:, 0]), _second_moment(sums[:, -1:] - starts[:, -1])
    came = np.zeros((boundaries, 2 * bins), dtype=np.int64)
    for t in range(boundaries - 1):
        through = forward[t][:, None] + between[t]
        came[t + 1] = through.argmin(axis=0)
        forward[t + 1] = through[came[t + 1], np.arange(2 * bins)]
    for t in range(boundaries - 2, -1, -1):
        backward[t] = (between[t] + backward[t + 1]).min(axis=1)
    total = forward + backward

    path = np.empty(boundaries, dtype=np.int64)
    node = int(total[-1].argmin())
    for t in range(boundaries - 1, -1, -1):
        path[t] = last[t, node] if node < bins else first[t, node]
        node = int(came[t, node])
    return float(total[-1].min()), np.minimum(total[:, :bins], total[:, bins:]), path


def _atom(mass: Floats, place: Floats) -> Floats:
    """The sums of a mass in one place."""
    return np.stack([mass, mass * place, mass * place * place])


def _lloyd(x: Floats, sums: Floats, cuts: Ints) -> tuple[Ints, float]:
    """Lloyd's iteration with prefix sums, as long as it helps; an empty segment costs infinitely much."""
    best, cost = cuts, np.inf
    while True:
        edges = np.concatenate([[0], cuts, [len(x)]])
        inside = sums[:, edges[1:]] - sums[:, edges[:-1]]
        if (np.diff(edges) <= 0).any():
            return best, cost
        reached = float(_second_moment(inside).sum())
        if reached >= cost:
            return best, cost
        best, cost = cuts, reached
        means = inside[1] / inside[0]
        cuts = np.searchsorted(x, (means[1:] + means[:-1]) / 2)


def _split(low: Ints, high: Ints, keep: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Cut those bins that are kept into parts, at least two each where they have as many values."""
    low, high = low[keep], high[keep]
    parts = max(2, LATER // len(low))
    edges = low[:, None] + ((high - low)[:, None] * np.linspace(0, 1, parts + 1)).astype(np.int64)
    begin, end = edges[:, :-1].ravel(), edges[:, 1:].ravel()
    return begin[end > begin], end[end > begin]
