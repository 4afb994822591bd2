"""Arrange labels in the slots of a ciphertext, and scramble the differences between labels.

A ciphertext encrypts a vector of numbers, one per slot. The *unique list* contains all clients' labels, each label
exactly once. One subtraction of ciphertexts compares several labels of a client with several entries of the list. For
this, the slots are laid out as a table. There are C classes, and class y = 0 … C − 1 has the code y + 1. In a
ciphertext of the list, each *column* contains the code of one entry, repeated in all *rows*. In a ciphertext of a
client, each row contains the code of one label of the client, repeated in all columns. A client with more labels than
rows sends several ciphertexts, called *sheets*. If C exceeds the number of slots, the list has several ciphertexts,
called *pages*. Code 0 means an empty column, and code C + 1 means an unused row. No label has code 0 or C + 1.

A client must learn only whether a difference d is zero. Multiplying d by a random number r is not enough, because the
product r·d of real numbers still reveals the magnitude of d. The server therefore computes

    z = r·d + p·s + u

with r uniform in 1 … p − 1 for a prime p > C + 1, s uniform in a range of S integers and |u| ≤ 1/16. Modulo p, z equals
r·d, which is zero for d = 0, and uniform over 1 … p − 1 for every other d. The integer quotient of z and p is s + e,
where e is a number below p that depends on d. For two values of d, the distributions of this quotient differ by at most
p / S, which is 2⁻¹⁹ for up to 5,000 classes. The noise u hides CKKS's own error, which is proportional to r. Together,
noise and error stay below 1/4, so that rounding is exact. To hide how the ciphertext was computed, the term p·s + u is
encrypted again for each comparison.
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
"""The maximum number of classes. With this number, p / S is at most 2⁻¹²; see the module's docstring."""

TOLERANCE = 0.25
_FLOOD = 1 / 16
_SPAN = 2**44
"""The maximum absolute value of z (see the module's docstring) that CKKS encodes with an error below 1/256."""


@dataclass(frozen=True)
class SlotLayout:
    """The layout of ciphertexts for C classes. The module's docstring describes the layout.

    Args:
        classes: The maximum number C of labels on the unique list (the encrypted list of all labels).
        slots: The number of slots of a ciphertext.

    >>> layout = SlotLayout(10)
    >>> layout.width, layout.rows, layout.pages, layout.prime
    (10, 409, 1, 13)
    """

    classes: int
    slots: int = COMPARING.slots

    @property
    def width(self) -> int:
        """The number of columns in one ciphertext (page) of the unique list. A column has room for one entry."""
        return min(self.classes, self.slots)

    @property
    def rows(self) -> int:
        """The number of rows (labels) in one ciphertext (sheet) of a client."""
        return self.slots // self.width

    @property
    def pages(self) -> int:
        """The number of ciphertexts (pages) that the unique list needs."""
        return -(-self.classes // self.width)

    @property
    def prime(self) -> int:
        """The smallest prime above ``classes`` + 1, which the module's docstring calls p."""
        candidate = self.classes + 2
        while any(candidate % d == 0 for d in range(2, int(candidate**0.5) + 1)):
            candidate += 1
        return candidate

    def sheets(self, labels: int) -> int:
        """Return the number of ciphertexts (sheets, at least 1) for a client with ``labels`` labels."""
        return max(1, -(-labels // self.rows))

    def sheets_of(self, labels: Ints) -> list[Floats]:
        """Return a client's *sheets*: the vectors that the client encrypts to compare its labels with the unique list.

        Args:
            labels: The indices of the client's classes, shape (L,).

        Returns:
            The sheets, each an array of shape (slots,).
        """
        codes = np.full(self.sheets(len(labels)) * self.rows, self.classes + 1, dtype=np.float64)
        codes[: len(labels)] = labels + 1
        sheets = np.full((len(codes) // self.rows, self.slots), self.classes + 1, dtype=np.float64)
        sheets[:, : self.rows * self.width] = np.repeat(codes, self.width).reshape(len(sheets), -1)
        return list(sheets)

    def entries(self, labels: Ints, places: Ints) -> dict[int, Floats]:
        """Return the vectors that a client encrypts to add labels to the unique list.

        Args:
            labels: The indices of the classes to add, shape (L,).
            places: The index of the new entry for each class, shape (L,). The index is page · width + column. A page is
                one ciphertext of the list.

        Returns:
            A mapping from indices of pages to arrays, shape (slots,): each array is added to its page. Only pages with
            new entries have an array. The array is zero in all columns without a new entry.
        """
        pages: dict[int, Floats] = {}
        for label, place in zip(labels.tolist(), places.tolist(), strict=True):
            page, column = divmod(place, self.width)
            rows = pages.setdefault(page, np.zeros(self.slots))[: self.rows * self.width]
            rows[column :: self.width] = label + 1
        return pages

    def blind(self) -> tuple[Floats, Floats]:
        """Draw the random numbers r and p·s + u, shape (slots,), that hide differences (see the module's docstring).

        The numbers come from the operating system's randomness, and not from the experiment's seed, because clients
        know the seed and could repeat the draws.
        """
        p = self.prime
        spread = min(p << 20, _SPAN // p)
        factors = 1 + below(p - 1, self.slots)
        multiples = p * (below(spread, self.slots) - spread // 2)
        flood = (below(1 << 32, self.slots) / 2**31 - 1) * _FLOOD
        return factors.astype(np.float64), multiples + flood

    def find(self, opened: Sequence[Ints], sheets: Ints, labels: int) -> Ints:
        """Find out which labels of a client are on the unique list (the encrypted list of all labels).

        A label is on the list if the decrypted difference between the label and an entry of the list is zero.

        Args:
            opened: The decrypted differences, one array of shape (slots,) for each ciphertext.
            sheets: For each ciphertext, the index of the client's sheet from which the ciphertext was computed.
            labels: The number L of labels that the client sent.

        Returns:
            For each label, the position of a zero difference, shape (L,). The position is i · width + c for column c of
            ciphertext i. If none of a label's differences is zero, the position is −1.

        Raises:
            FedstrataError: Two entries of the list stand for one label, or an entry equals an unused row of a sheet.
                The error cannot occur if all parties follow the protocol and use the same key.
        """
        places = np.full(labels, -1, dtype=np.int64)
        for number, (values, sheet) in enumerate(zip(opened, sheets.tolist(), strict=True)):
            zeros = np.flatnonzero(values % self.prime == 0)
            rows, columns = zeros // self.width + sheet * self.rows, zeros % self.width
            last = (sheet + 1) * self.rows
            if len(np.unique(rows)) != len(rows) or (rows >= min(labels, last)).any() or (places[rows] >= 0).any():
                raise FedstrataError("the server's list of labels is invalid, because it contains a label twice")
            places[rows] = number * self.width + columns
        return places


def below(bound: int, size: int) -> Ints:
    """Draw ``size`` integers in 0 … bound − 1 from the operating system's randomness, with a bias below bound / 2⁶³."""
    drawn = np.frombuffer(os.urandom(8 * size), dtype=np.uint64) >> np.uint64(1)
    return (drawn % np.uint64(bound)).astype(np.int64)


def shuffled(size: int) -> Ints:
    """Draw a permutation of 0 … ``size`` − 1 from the operating system's randomness."""
    return np.argsort(np.frombuffer(os.urandom(8 * size), dtype=np.uint64), kind="stable").astype(np.int64)
