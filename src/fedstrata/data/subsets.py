"""Select and order the samples of a data set by class."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedstrata.base.arrays import Ints


def largest_remainder(shares: NDArray[np.floating], total: int) -> Ints:
    """Divide ``total`` into integers in proportion to ``shares`` (Hamilton's method).

    >>> largest_remainder(np.array([1.0, 1.0, 2.0]), 5).tolist()
    [1, 1, 3]
    """
    exact = shares / shares.sum() * total
    whole: Ints = np.floor(exact).astype(np.int64)
    order = np.argsort(whole - exact, kind="stable")
    whole[order[: total - int(whole.sum())]] += 1
    return whole


def stratified(codes: Ints, size: int, rng: np.random.Generator) -> Ints:
    """Draw ``size`` random samples, divided among the classes in proportion to the classes' sizes.

    Return the indices of the drawn samples, in ascending order.

    >>> stratified(np.array([0, 0, 0, 0, 1, 1]), 3, np.random.default_rng(0)).shape
    (3,)
    """
    classes = int(codes.max()) + 1
    pool, starts, sizes = by_class(codes, classes, rng)
    quota = largest_remainder(sizes.astype(np.float64), size)
    rank = np.arange(len(pool)) - starts[codes[pool]]
    drawn: Ints = np.sort(pool[rank < quota[codes[pool]]])
    return drawn


def by_class(codes: Ints, classes: int, rng: np.random.Generator) -> tuple[Ints, Ints, Ints]:
    """Sort all samples by class, in random order within each class.

    Returns:
        The indices of the samples, the position of each class's first sample, and the number of samples of each class.
    """
    shuffled = rng.permutation(len(codes))
    sizes = np.bincount(codes, minlength=classes)
    return shuffled[np.argsort(codes[shuffled], kind="stable")], np.cumsum(sizes) - sizes, sizes
