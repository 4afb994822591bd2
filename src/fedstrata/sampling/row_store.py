"""Store a large matrix in which a few rows are replaced in every round."""

from __future__ import annotations

import numpy as np

from fedstrata.base.arrays import Floats, Floats32, Ints
from fedstrata.base.records import record

SHARE = 8
"""The whole matrix is copied when more than 1/``SHARE`` of its rows have been replaced."""


@record("RowStore")
class RowStore:
    """An immutable matrix. A copy with a few replaced rows costs little time and memory.

    New rows are stored beside the old matrix until their number is too large; see ``SHARE``.

    Args:
        base: All rows at the time of the last copy of the whole matrix, shape (n, d).
        places: The indices of the rows that were replaced after the last copy, ascending, shape (c,).
        newer: The current values of the replaced rows, shape (c, d).
        norms: The Euclidean norm of every row, shape (n,). The type is float64, because squares of very small values
            are zero in float32.
    """

    base: Floats32
    places: Ints
    newer: Floats32
    norms: Floats

    @classmethod
    def of(cls, matrix: Floats32, norms: Floats | None = None) -> RowStore:
        """Return a store for a matrix. The caller must not change the matrix afterwards."""
        places = np.empty(0, dtype=np.int64)
        return cls(matrix, places, matrix[:0], lengths(matrix) if norms is None else norms)

    @classmethod
    def empty(cls) -> RowStore:
        """Return a store without rows."""
        return cls.of(np.empty((0, 0), dtype=np.float32))

    def __len__(self) -> int:
        return len(self.base)

    def whole(self) -> Floats32:
        """Return all rows as a read-only array of shape (n, d)."""
        if len(self.places) == 0:
            return self.base
        matrix = self.base.copy()
        matrix[self.places] = self.newer
        return matrix

    def take(self, indices: Ints) -> Floats32:
        """Return the rows at the given indices, shape (len(indices), d)."""
        rows: Floats32 = self.base[indices]
        replaced = np.flatnonzero(np.isin(indices, self.places))
        rows[replaced] = self.newer[np.searchsorted(self.places, indices[replaced])]
        return rows

    def times(self, matrix: Floats32) -> Floats32:
        """Return the product of the stored matrix and ``matrix``, shape (n, k), for ``matrix`` of shape (d, k)."""
        product: Floats32 = self.base @ matrix
        product[self.places] = self.newer @ matrix
        return product

    def renewed(self, places: Ints, rows: Floats32) -> RowStore:
        """Return a store in which the rows at the given indices are replaced.

        Args:
            places: The c ascending indices, shape (c,).
            rows: The new rows, shape (c, d).
        """
        if len(places) == len(self):
            return RowStore.of(rows)
        norms = self.norms.copy()
        norms[places] = lengths(rows)
        replaced = np.union1d(self.places, places)
        if SHARE * len(replaced) > len(self):
            matrix = self.base.copy()
            matrix[self.places] = self.newer
            matrix[places] = rows
            return RowStore.of(matrix, norms)
        newer = np.empty((len(replaced), rows.shape[1]), dtype=np.float32)
        newer[np.searchsorted(replaced, self.places)] = self.newer
        newer[np.searchsorted(replaced, places)] = rows
        return RowStore(self.base, replaced, newer, norms)

    def joined(self, known: Ints, clients: Ints, rows: Floats32) -> tuple[Ints, RowStore]:
        """Replace the rows of the given clients, and add rows for clients without a row.

        Args:
            known: The client of each row, ascending, shape (n,).
            clients: The clients with new rows, ascending, shape (c,).
            rows: The new rows, shape (c, d).

        Returns:
            The client of each row, and the new store.
        """
        if len(clients) == 0:
            return known, self
        if np.isin(clients, known).all():
            return known, self.renewed(np.searchsorted(known, clients), rows)
        union = np.union1d(known, clients)
        before, after = np.searchsorted(union, known), np.searchsorted(union, clients)
        matrix, norms = np.empty((len(union), rows.shape[1]), dtype=np.float32), np.empty(len(union))
        if len(known):
            matrix[before], norms[before] = self.base, self.norms
            matrix[before[self.places]] = self.newer
        matrix[after], norms[after] = rows, lengths(rows)
        return union, RowStore.of(matrix, norms)


def lengths(matrix: Floats32) -> Floats:
    """Return the Euclidean norm of every row, shape (n,)."""
    norms: Floats = np.sqrt(np.einsum("kd,kd->k", matrix, matrix, dtype=np.float64))
    return norms
