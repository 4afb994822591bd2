"""Compute k-means incrementally: continue Lloyd's iteration from round to round when a few rows of a matrix change.

A cluster of k-means is called a *stratum*, and its centre is the mean of its rows. When rows change, the sums of their
strata are updated. When centres move, some rows may become nearer to another centre. Bounds on distances show which
rows may now have another nearest centre. Only these rows are compared with the centres (Hamerly 2010, Making k-means
even faster). The result is the same as if every row were compared with every centre.

If 100 of 10,000 rows change per round, incremental k-means is four times as fast as k-means from scratch
(``benchmarks/fast_paths.py``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstrata.base.arrays import Floats, Floats32, Ints
from fedstrata.base.records import record

STEPS = 5
"""The maximum number of steps of Lloyd's iteration per round. The next round continues an unfinished iteration."""

UNASSIGNED = -1
"""The label of a row without a stratum."""


@record("Clusters")
class Clusters:
    """The state of Lloyd's iteration.

    Args:
        centres: The centre of each stratum, shape (H, d), float32. The bounds ``upper`` and ``lower`` refer to these
            centres.
        sums: The sum of each stratum's rows, shape (H, d), float64.
        sizes: The number of rows of each stratum, shape (H,), int64.
        labels: The stratum of each row, or ``UNASSIGNED``, shape (n,), int64.
        upper: An upper bound on the distance of each row to the centre of its stratum, shape (n,), float64.
        lower: A lower bound on the distance of each row to the centres of all other strata, shape (n,), float64.
        renewed: The number of rows that were replaced or added since k-means last started from scratch.
    """

    centres: Floats32
    sums: Floats
    sizes: Ints
    labels: Ints
    upper: Floats
    lower: Floats
    renewed: int = 0

    @classmethod
    def of(cls, points: Floats32, norms: Floats, labels: Ints) -> Clusters:
        """Create the state for given strata.

        Args:
            points: The rows, shape (n, d).
            norms: The norm of every row, shape (n,).
            labels: The stratum of each row in 0 … H − 1, shape (n,). Each stratum has at least one row.
        """
        count = int(labels.max()) + 1
        sums = np.stack([points[labels == h].sum(axis=0, dtype=np.float64) for h in range(count)])
        sizes = np.bincount(labels, minlength=count)
        centres = (sums / sizes[:, None]).astype(np.float32)
        # If a row is nearer to another centre than to its own centre, then upper > lower, and ``converged`` checks this
        # row first.
        scale = _scale(norms)
        upper, lower = (scale * bound for bound in _bounds(_distances(points, norms, centres, scale), labels))
        return cls(centres, sums, sizes, labels, upper, lower)

    def without(self, places: Ints, before: Floats32) -> Clusters:
        """Return a copy in which the given rows, whose values will change, have no stratum.

        Args:
            places: The indices of the rows, shape (c,).
            before: The old values of these rows, shape (c, d), which are subtracted from the sums of the strata.
        """
        assigned = self.labels[places] != UNASSIGNED
        places, before = places[assigned], before[assigned]
        sums, labels = self.sums.copy(), self.labels.copy()
        np.subtract.at(sums, labels[places], before.astype(np.float64))
        sizes = self.sizes - np.bincount(labels[places], minlength=len(self.sizes))
        labels[places] = UNASSIGNED
        return replace(self, sums=sums, sizes=sizes, labels=labels, renewed=self.renewed + len(places))

    def among(self, places: Ints, count: int) -> Clusters:
        """Return a copy of the strata that also covers new rows of the matrix. These rows do not have a stratum yet.

        Args:
            places: The new index of each old row.
            count: The new number of rows.
        """
        labels, upper, lower = np.full(count, UNASSIGNED), np.zeros(count), np.zeros(count)
        labels[places], upper[places], lower[places] = self.labels, self.upper, self.lower
        return replace(self, labels=labels, upper=upper, lower=lower, renewed=self.renewed + count - len(self.labels))

    def converged(self, points: Floats32, norms: Floats) -> Clusters:
        """Iterate until each row belongs to its nearest centre, at most ``STEPS`` times. See ``of`` for arguments."""
        scale = _scale(norms)
        centres, sums, sizes = self.centres, self.sums.copy(), self.sizes.copy()
        labels, upper, lower = self.labels.copy(), self.upper.copy(), self.lower.copy()
        suspects = np.flatnonzero((labels == UNASSIGNED) | (upper > lower))
        for _ in range(STEPS):
            if len(suspects) == 0:
                break
            distances = scale * _distances(points[suspects], norms[suspects], centres, scale)
            nearest = distances.argmin(axis=1)
            changed = np.flatnonzero(nearest != labels[suspects])
            changed_rows, old = points[suspects[changed]].astype(np.float64), labels[suspects[changed]]
            assigned = old != UNASSIGNED
            np.add.at(sums, nearest[changed], changed_rows)
            np.subtract.at(sums, old[assigned], changed_rows[assigned])
            sizes += np.bincount(nearest[changed], minlength=len(sizes))
            sizes -= np.bincount(old[assigned], minlength=len(sizes))
            labels[suspects] = nearest
            upper[suspects], lower[suspects] = _bounds(distances, nearest)
            # An empty stratum has no mean, so its centre does not move.
            means = np.where(sizes[:, None] > 0, sums / np.maximum(sizes, 1)[:, None], centres)
            shift = np.linalg.norm((means - centres) / scale, axis=1) * scale
            centres = means.astype(np.float32)
            upper += shift[labels]
            lower -= shift.max()
            suspects = np.flatnonzero(upper > lower)
        return replace(self, centres=centres, sums=sums, sizes=sizes, labels=labels, upper=upper, lower=lower)

    def spread(self, norms: Floats) -> tuple[Floats, float]:
        """Return each stratum's spread, shape (H,), and the spread of all rows. See ``allocation.spread``.

        Args:
            norms: The norm of every row, shape (n,).
        """
        scale, d = _scale(norms), self.sums.shape[1]
        parts = np.bincount(self.labels, weights=np.square(norms / scale), minlength=len(self.sizes))
        squares: Floats = parts.astype(np.float64)
        sums = self.sums / scale

        def deviation(squares: Floats, lengths: Floats, sizes: NDArray[Any]) -> Floats:
            # Use the identity Σ‖z − mean‖² = Σ‖z‖² − ‖Σz‖² / n.
            n = np.maximum(sizes, 1)
            spread: Floats = scale * np.sqrt(np.maximum(squares - lengths / n, 0.0) / (n * d))
            return spread

        by_stratum = deviation(squares, np.square(sums).sum(axis=1), self.sizes)
        overall = deviation(squares.sum(), np.square(sums.sum(axis=0)).sum(), self.sizes.sum(keepdims=True))
        return by_stratum, float(overall[0])


def _scale(norms: Floats) -> float:
    """Return a number by which all rows are divided, so that the squares of their values fit into float32."""
    return float(norms.max()) or 1.0


def _distances(points: Floats32, norms: Floats, centres: Floats32, scale: float) -> Floats:
    """Return the distances between rows and centres, divided by ``scale``, shape (rows, H)."""
    scaled = centres / np.float32(scale)
    products = points @ scaled.T
    squares = np.square(norms / scale)[:, None] - 2 * products / scale + np.square(scaled, dtype=np.float64).sum(axis=1)
    distances: Floats = np.sqrt(np.maximum(squares, 0.0))
    return distances


def _bounds(distances: Floats, labels: Ints) -> tuple[Floats, Floats]:
    """Return each row's distance to its own centre and to the nearest other centre (infinite with a single centre)."""
    rows = np.arange(len(labels))
    others = distances.copy()
    others[rows, labels] = np.inf
    return distances[rows, labels], others.min(axis=1)
