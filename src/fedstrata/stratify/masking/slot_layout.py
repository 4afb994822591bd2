"""The layout of labels in slots, so that one subtraction compares many labels, and the scrambling of differences.

Label y of C has the code y + 1. The unique list has a *column* for each of C entries, and each *row* is a copy of it. A
row of a client holds one of its labels in all columns. The difference of two ciphertexts therefore compares as many
labels with the whole list as there are rows. A client with more labels sends several *sheets*. If C exceeds the number
of slots, the list has several *pages*. Code 0 is an empty column, and C + 1 an unused row: neither equals a label.

A difference d must only tell whether it is zero. Multiplication by a random number is not enough, because the product
r·d of real numbers still shows the magnitude of d. The server therefore computes

    z = r·d + p·s + u

with r uniform in 1 … p − 1 for a prime p > C + 1, s uniform in a range of S integers and |u| ≤ 1/16. Modulo p, z is
r·d: zero for d = 0, and exactly uniform over 1 … p − 1 for every other d. The rest of z, its multiple of p, is s plus
at most p steps: its distribution changes with d by at most p / S (2⁻¹⁹ up to 5,000 classes). The noise u hides CKKS's
own error, which is proportional to r. Together they stay below 1/4, so that rounding is exact. The term p·s + u is a
fresh encryption, which hides the history of the ciphertext.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedstrata.base.arrays import Floats, Ints
from fedstrata.base.errors import FedstrataError
from fedstrata.stratify.masking.ckks import COMPARING

MOST_CLASSES = 60_000
"""The most classes for which p / S is at most 2⁻¹²."""

TOLERANCE = 0.25
_FLOOD = 1 / 16
_SPAN = 2**44
"""An upper bound of |z|: after encoding and decoding in double precision, such numbers are accurate to 1/256."""


@dataclass(frozen=True)
class SlotLayout:
    """The layout for C classes.

    Args:
        classes: C, the largest number of entries of the unique list.
        slots: The number of slots of a ciphertext.

    >>> layout = SlotLayout(10)
    >>> layout.width, layout.rows, layout.pages, layout.prime
    (10, 409, 1, 13)
    """

    classes: int
    slots: int = COMPARING.slots

    @property
    def width(self) -> int:
        """The number of columns of a page."""
        return min(self.classes, self.slots)

    @property
    def rows(self) -> int:
        """The number of labels on a sheet."""
        return self.slots // self.width

    @property
    def pages(self) -> int:
        """The number of pages of the list."""
        return -(-self.classes // self.width)

    @property
    def prime(self) -> int:
        """p, the smallest prime above C + 1."""
        candidate = self.classes + 2
        while any(candidate % d == 0 for d in range(2, int(candidate**0.5) + 1)):
            candidate += 1
        return candidate

    def sheets(self, labels: int) -> int:
        """Return the number of sheets for some labels; a client without labels sends one sheet too."""
        return max(1, -(-labels // self.rows))

    def sheets_of(self, labels: Ints) -> list[Floats]:
        """Return a client's sheets.

        Args:
            labels: Class numbers, shape (L,).

        Returns:
            Arrays of shape (slots,).
        """
        codes = np.full(self.sheets(len(labels)) * self.rows, self.classes + 1, dtype=np.float64)
        codes[: len(labels)] = labels + 1
        sheets = np.full((len(codes) // self.rows, self.slots), self.classes + 1, dtype=np.float64)
        sheets[:, : self.rows * self.width] = np.repeat(codes, self.width).reshape(len(sheets), -1)
        return list(sheets)

    def entries(self, labels: Ints, places: Ints) -> dict[int, Floats]:
        """Return the vectors that add labels to the list.

        Args:
            labels: Class numbers, shape (L,).
            places: Page times width plus column, shape (L,).

        Returns:
            For each page that gets an entry, an array of shape (slots,) that is zero in all other columns.
        """
        pages: dict[int, Floats] = {}
        for label, place in zip(labels.tolist(), places.tolist(), strict=True):
            page, column = divmod(place, self.width)
            rows = pages.setdefault(page, np.zeros(self.slots))[: self.rows * self.width]
            rows[column :: self.width] = label + 1
        return pages

    def blind(self) -> tuple[Floats, Floats]:
        """Draw r and p·s + u for every slot from the operating system's randomness.

        Clients know the experiment's seed and could repeat draws from it.
        """
        p = self.prime
        spread = min(p << 20, _SPAN // p)
        factors = 1 + below(p - 1, self.slots)
        multiples = p * (below(spread, self.slots) - spread // 2)
        flood = (below(1 << 32, self.slots) / 2**31 - 1) * _FLOOD
        return factors.astype(np.float64), multiples + flood

    def find(self, opened: Sequence[Ints], sheets: Ints, labels: int) -> Ints:
        """Find the zeros.

        Args:
            opened: Decrypted differences, one array of shape (slots,) for each ciphertext.
            sheets: The sheet that each ciphertext compares.
            labels: L, the number of labels that the client sent.

        Returns:
            For each label, the number of the ciphertext times width plus the column of its zero; −1 without a zero.

        Raises:
            FedstrataError: A label equals two entries, or an unused row equals one. This cannot happen if all parties
                follow the protocol under one key.
        """
        places = np.full(labels, -1, dtype=np.int64)
        for number, (values, sheet) in enumerate(zip(opened, sheets.tolist(), strict=True)):
            zeros = np.flatnonzero(values % self.prime == 0)
            rows, columns = zeros // self.width + sheet * self.rows, zeros % self.width
            last = (sheet + 1) * self.rows
            if len(np.unique(rows)) != len(rows) or (rows >= min(labels, last)).any() or (places[rows] >= 0).any():
                raise FedstrataError("a comparison contradicts itself: a label is on the unique list twice")
            places[rows] = number * self.width + columns
        return places


def below(bound: int, size: int) -> Ints:
    """Draw numbers in 0 … bound − 1 from the operating system's randomness, uniform up to bound / 2⁶³."""
    drawn = np.frombuffer(os.urandom(8 * size), dtype=np.uint64) >> np.uint64(1)
    return (drawn % np.uint64(bound)).astype(np.int64)


def shuffled(size: int) -> Ints:
    """Draw a permutation from the operating system's randomness."""
    return np.argsort(np.frombuffer(os.urandom(8 * size), dtype=np.uint64), kind="stable").astype(np.int64)
