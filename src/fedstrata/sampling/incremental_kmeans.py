"""k-means of many rows of which a few are renewed every round: Lloyd's iteration goes on where it stood.

Sums of strata change by what their members changed. Bounds on distances (Hamerly 2010, Making k-means even faster) tell
which rows may have to change sides after the centres moved; only these are looked at. So a round costs about what
changed in it, and its end is the same as if every row had been compared with every centre.

With 10,000 clients of whom 100 are renewed it is 25 times as fast as k-means from the start
(``benchmarks/fast_paths.py``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstrata.base.records import record
from fedstrata.sampling.row_store import RowStore

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

STEPS = 5
"""Most steps of Lloyd's iteration in a round; what is left of them waits for the next."""

NOWHERE = -1


@record("Clusters")
class Clusters:
    """Where Lloyd's iteration stands.

    Args:
        centres: The centres that the bounds are about, shape (H, d), float32.
        sums: Of each stratum's rows, shape (H, d), float64.
        sizes: Of the strata, shape (H,), int64.
        labels: The stratum of each row, −1 for one that has none yet, shape (n,), int64.
        upper: At least the distance to its own centre, shape (n,), float64.
        lower: At most the distance to any other centre, shape (n,), float64.
        renewed: Rows that were renewed since the centres were first sought.
    """

    centres: NDArray[np.float32]
    sums: Floats
    sizes: Ints
    labels: Ints
    upper: Floats
    lower: Floats
    renewed: int = 0

    @classmethod
    def of(cls, rows: RowStore, labels: Ints) -> Clusters:
        """Begin with strata 0 … H − 1, none of them empty."""
        count, matrix = int(labels.max()) + 1, rows.whole()
        sums = np.stack([matrix[labels == h].sum(axis=0, dtype=np.float64) for h in range(count)])
        sizes = np.bincount(labels, minlength=count)
        centres = (sums / sizes[:, None]).astype(np.float32)
        # Some may not be nearest to their own: their bounds cross, and the first step looks at them.
        scale = _scale(rows.norms)
        upper, lower = (scale * bound for bound in _bounds(_distances(rows, None, centres, scale), labels))
        return cls(centres, sums, sizes, labels, upper, lower)

    def without(self, places: Ints, before: NDArray[np.float32]) -> Clusters:
        """With some rows, that were ``before`` until now, in no stratum."""
        inside = self.labels[places] != NOWHERE
        places, before = places[inside], before[inside]
        sums, labels = self.sums.copy(), self.labels.copy()
        np.subtract.at(sums, labels[places], before.astype(np.float64))
        sizes = self.sizes - np.bincount(labels[places], minlength=len(self.sizes))
        labels[places] = NOWHERE
        return replace(self, sums=sums, sizes=sizes, labels=labels, renewed=self.renewed + len(places))

    def among(self, places: Ints, count: int) -> Clusters:
        """With more rows, in no stratum, so that those of now are in ``places`` of ``count``."""
        labels, upper, lower = np.full(count, NOWHERE), np.zeros(count), np.zeros(count)
        labels[places], upper[places], lower[places] = self.labels, self.upper, self.lower
        return replace(self, labels=labels, upper=upper, lower=lower, renewed=self.renewed + count - len(self.labels))

    def converged(self, rows: RowStore) -> Clusters:
        """Every row in the stratum of its nearest centre, and the centres where their strata's means are."""
        scale = _scale(rows.norms)
        centres, sums, sizes = self.centres, self.sums.copy(), self.sizes.copy()
        labels, upper, lower = self.labels.copy(), self.upper.copy(), self.lower.copy()
        suspects = np.flatnonzero((labels == NOWHERE) | (upper > lower))
        for _ in range(STEPS):
            if len(suspects) == 0:
                break
            distances = scale * _distances(rows, suspects, centres, scale)
            nearest = distances.argmin(axis=1)
            changed = np.flatnonzero(nearest != labels[suspects])
            moved, old = rows.take(suspects[changed]).astype(np.float64), labels[suspects[changed]]
            np.add.at(sums, nearest[changed], moved)
            np.subtract.at(sums, old[old != NOWHERE], moved[old != NOWHERE])
            sizes += np.bincount(nearest[changed], minlength=len(sizes))
            sizes -= np.bincount(old[old != NOWHERE], minlength=len(sizes))
            labels[suspects] = nearest
            upper[suspects], lower[suspects] = _bounds(distances, nearest)
            # An empty stratum's centre stays where it is.
            means = np.where(sizes[:, None] > 0, sums / np.maximum(sizes, 1)[:, None], centres)
            shift = np.linalg.norm((means - centres) / scale, axis=1) * scale
            centres = means.astype(np.float32)
            upper += shift[labels]
            lower -= shift.max()
            suspects = np.flatnonzero(upper > lower)
        return replace(self, centres=centres, sums=sums, sizes=sizes, labels=labels, upper=upper, lower=lower)

    def spread(self, norms: Floats) -> tuple[Floats, float]:
        """S_h, shape (H,), and S of all rows together; see ``allocation.spread``.

        Args:
            norms: The length of every row, shape (n,).
        """
        scale, d = _scale(norms), self.sums.shape[1]
        parts = np.bincount(self.labels, weights=np.square(norms / scale), minlength=len(self.sizes))
        squares: Floats = parts.astype(np.float64)
        sums = self.sums / scale

        def deviation(squares: Floats, lengths: Floats, sizes: NDArray[Any]) -> Floats:
            # Σ‖z − mean‖² = Σ‖z‖² − ‖Σz‖² / n, in float64.
            n = np.maximum(sizes, 1)
            spread: Floats = scale * np.sqrt(np.maximum(squares - lengths / n, 0.0) / (n * d))
            return spread

        each = deviation(squares, np.square(sums).sum(axis=1), self.sizes)
        together = deviation(squares.sum(), np.square(sums.sum(axis=0)).sum(), self.sizes.sum(keepdims=True))
        return each, float(together[0])


def _scale(norms: Floats) -> float:
    """What rows are divided by: squares of very small or large gradients leave the range of float32."""
    return float(norms.max()) or 1.0


def _distances(rows: RowStore, where: Ints | None, centres: NDArray[np.float32], scale: float) -> Floats:
    """Of some rows, or of all, to each centre, in units of ``scale``, shape (rows, H)."""
    near = centres / np.float32(scale)
    products = rows.times(near.T) if where is None else rows.take(where) @ near.T
    lengths = (rows.norms if where is None else rows.norms[where]) / scale
    squares = np.square(lengths)[:, None] - 2 * products / scale + np.square(near, dtype=np.float64).sum(axis=1)
    distances: Floats = np.sqrt(np.maximum(squares, 0.0))
    return distances


def _bounds(distances: Floats, labels: Ints) -> tuple[Floats, Floats]:
    """The distance to the own centre and to the nearest other; infinite where there is none."""
    each = np.arange(len(labels))
    others = distances.copy()
    others[each, labels] = np.inf
    return distances[each, labels], others.min(axis=1)
