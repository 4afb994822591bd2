"""A large matrix of which a few rows are renewed every round."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedstrata.base.records import record

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

SHARE = 8
"""Renewed rows are put in their places once they are more than one in so many; copying everything costs that seldom."""


@record("RowStore")
class RowStore:
    """A matrix that never changes in place, and of which renewing 50 of 10,000 rows copies 50 and not 10,000.

    Args:
        base: The rows as they were when all were last written, shape (n, d).
        places: Rows that were renewed since, ascending, shape (c,).
        newer: What they are now, shape (c, d).
        norms: The length of every row, shape (n,), float64: squares of very small rows leave the range of float32.
    """

    base: Floats
    places: Ints
    newer: Floats
    norms: NDArray[np.float64]

    @classmethod
    def of(cls, matrix: Floats, norms: NDArray[np.float64] | None = None) -> RowStore:
        """A matrix as it is."""
        nowhere = np.empty(0, dtype=np.int64)
        return cls(matrix, nowhere, matrix[:0], lengths(matrix) if norms is None else norms)

    def __len__(self) -> int:
        return len(self.base)

    def whole(self) -> Floats:
        """All rows, shape (n, d); not to be written to."""
        if len(self.places) == 0:
            return self.base
        matrix = self.base.copy()
        matrix[self.places] = self.newer
        return matrix

    def take(self, where: Ints) -> Floats:
        """Some rows, shape (len(where), d)."""
        rows: Floats = self.base[where]
        hit = np.flatnonzero(np.isin(where, self.places))
        rows[hit] = self.newer[np.searchsorted(self.places, where[hit])]
        return rows

    def times(self, matrix: Floats) -> Floats:
        """The product with a matrix, shape (n, columns)."""
        product: Floats = self.base @ matrix
        product[self.places] = self.newer @ matrix
        return product

    def renewed(self, places: Ints, rows: Floats) -> RowStore:
        """With other rows in some places, ascending."""
        if len(places) == len(self):
            return RowStore.of(rows)
        norms = self.norms.copy()
        norms[places] = lengths(rows)
        together = np.union1d(self.places, places)
        if SHARE * len(together) > len(self):
            matrix = self.whole()
            matrix = matrix.copy() if matrix is self.base else matrix
            matrix[places] = rows
            return RowStore.of(matrix, norms)
        newer = np.empty((len(together), rows.shape[1]), dtype=np.float32)
        newer[np.searchsorted(together, self.places)] = self.newer
        newer[np.searchsorted(together, places)] = rows
        return RowStore(self.base, together, newer, norms)

    def joined(self, known: Ints, clients: Ints, rows: Floats) -> tuple[Ints, RowStore]:
        """With the rows of some clients renewed, or added where there were none.

        Args:
            known: Whose rows these are, ascending, shape (n,).
            clients: Whose are new, ascending, shape (c,).
            rows: The new ones, shape (c, d).

        Returns:
            ``known`` and the rows afterwards.
        """
        if len(clients) == 0:
            return known, self
        if np.isin(clients, known).all():
            return known, self.renewed(np.searchsorted(known, clients), rows)
        everybody = np.union1d(known, clients)
        before, after = np.searchsorted(everybody, known), np.searchsorted(everybody, clients)
        matrix, norms = np.empty((len(everybody), rows.shape[1]), dtype=np.float32), np.empty(len(everybody))
        if len(known):
            matrix[before], norms[before] = self.base, self.norms
            matrix[before[self.places]] = self.newer
        matrix[after], norms[after] = rows, lengths(rows)
        return everybody, RowStore.of(matrix, norms)


def lengths(matrix: Floats) -> NDArray[np.float64]:
    """The Euclidean norm of every row, shape (n,)."""
    norms: NDArray[np.float64] = np.sqrt(np.einsum("kd,kd->k", matrix, matrix, dtype=np.float64))
    return norms
