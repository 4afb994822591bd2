"""Allocate draws to strata (groups of clients), and draw systematic samples.

A stratum is a group of clients. All H strata together get m draws.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedstrata.base.arrays import Floats, Floats32, Ints

Allocation = Literal["neyman", "neyman-random", "neyman-at-least-one", "proportional"]
"""The rules for allocating draws to strata.

- ``neyman`` is Neyman's optimal allocation (see ``allocated``), in which a stratum may get no draw, as in the authors'
  published code.
- ``neyman-random`` is Neyman's allocation, rounded at random. Every stratum can get a draw, because its mean number of
  draws has a minimum (see ``FLOOR``).
- ``neyman-at-least-one`` is Neyman's allocation with at least one draw for every stratum.
- ``proportional`` allocates draws in proportion to the number of clients, with at least one draw for every stratum.
"""

FLOOR = 0.5
"""The constant of ``neyman-random``: the mean number of draws from a stratum is at least min(1, FLOOR · m / H)."""


def spread(points: Floats32, strata: Ints, count: int) -> Floats:
    """Return the spread of the points in each stratum, shape (count,).

    The square of the spread is the variance of a coordinate within the stratum, averaged over the d coordinates.

    Args:
        points: The points, shape (N, d).
        strata: The stratum of each point, shape (N,), in 0 … count − 1.
        count: The number of strata.
    """
    result = np.zeros(count)
    for h in range(count):
        members = points[strata == h]
        if len(members):
            result[h] = np.sqrt(members.var(axis=0, dtype=np.float64).mean())
    return result


def allocate(budget: int, sizes: Ints, weights: Floats, *, least: int = 1) -> Ints:
    """Divide a number of draws among strata in proportion to ``weights``, and round the results to integers.

    The rounding uses the largest-remainder method: all numbers are rounded down, and the draws that are left go to the
    strata with the largest remainders. No stratum gets more draws than it has clients. With ``least = 1``, every
    non-empty stratum gets at least one draw. If there are fewer draws than strata, the strata with the largest weights
    get one draw each.

    Args:
        budget: The number of draws to allocate, at most the sum of ``sizes``.
        sizes: The number of clients in each stratum, shape (H,).
        weights: The non-negative weight of each stratum, shape (H,).
        least: The minimum number of draws for a non-empty stratum: 0 or 1.

    Returns:
        The number of draws from each stratum, shape (H,).

    Raises:
        ValueError: The budget is larger than the number of clients.

    >>> allocate(10, np.array([5, 20, 3]), np.array([1.0, 8.0, 1.0])).tolist()
    [1, 8, 1]
    >>> allocate(3, np.array([5, 20, 3]), np.array([1.0, 8.0, 1.0]), least=0).tolist()
    [0, 3, 0]
    """
    filled = sizes > 0
    if least and filled.sum() >= budget:
        first = np.argsort(-np.where(filled, weights, -1.0), kind="stable")[:budget]
        result = np.zeros_like(sizes)
        result[first] = 1
        return result
    exact = quotas(budget, sizes, weights, np.where(filled, float(least), 0.0))
    whole: Ints = np.floor(exact + 1e-9).astype(np.int64)
    remainders = np.where(whole < sizes, exact - whole, -1.0)
    whole[np.argsort(-remainders, kind="stable")[: budget - int(whole.sum())]] += 1
    return whole


def quotas(budget: int, sizes: Ints, weights: Floats, floors: Floats) -> Floats:
    """Divide ``budget`` in proportion to ``weights`` into real numbers that are between ``floors`` and ``sizes``.

    Args:
        budget: The number of draws, between the sum of ``floors`` and the sum of ``sizes``.
        sizes: The largest possible result for each stratum (its number of clients), shape (H,).
        weights: The non-negative weight of each stratum, shape (H,).
        floors: The smallest possible result for each stratum, shape (H,). It must not exceed the value in ``sizes``.

    Returns:
        The expected number of draws from each stratum, shape (H,).

    Raises:
        ValueError: The budget is larger than the sum of ``sizes``.

    >>> quotas(4, np.array([9, 9, 9]), np.array([6.0, 2.0, 0.0]), np.array([0.5, 0.5, 0.5])).round(6).tolist()
    [2.625, 0.875, 0.5]
    """
    if budget > sizes.sum():
        raise ValueError(f"{budget} clients cannot be drawn from {sizes.sum()} clients")
    if budget == 0:
        return np.zeros(len(sizes))
    filled, total = sizes > 0, weights.sum()
    # If all strata with a positive weight have reached their sizes, the tiny second term divides the remaining draws
    # among the other strata.
    shares = (weights / total if total > 0 else 0.0) + 1e-12 * sizes / sizes.sum()
    # Find the factor with which the clipped products add up to the budget, by bisection to the last bit.
    low, high = float(floors[filled].min() / shares.max()), float((sizes[filled] / shares[filled]).max())
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if np.clip(middle * shares, floors, sizes).sum() < budget else (low, middle)
    exact: Floats = np.clip(high * shares, floors, sizes)
    return exact


def systematic(exact: Floats, generator: np.random.Generator) -> Ints:
    """Randomly round numbers down or up, so that the sum stays the same and each result is unbiased.

    The rounding is systematic: one random number in [0, 1) is added to all cumulative sums before they are rounded
    down.

    Args:
        exact: The numbers to round, shape (H,), whose sum must be an integer.
        generator: The random generator.

    >>> systematic(np.array([0.5, 0.5, 2.0]), np.random.default_rng(0)).sum()
    np.int64(3)
    """
    ends = np.concatenate(([0.0], np.cumsum(exact)))
    ends[-1] = round(float(ends[-1]))
    # Remove floating-point errors from the sums, because they could move a draw from one stratum to another.
    whole = np.round(ends)
    ends = np.where(np.abs(ends - whole) < 1e-9, whole, ends)
    return np.diff(np.floor(ends + generator.random())).astype(np.int64)


def systematic_draws(items: Ints, sizes: Ints, count: int, generator: np.random.Generator) -> Ints:
    """Draw items by systematic sampling in random order (Madow 1949).

    An item's expected number of draws is ``count`` times its size, divided by the total size of all ``items``.

    Args:
        items: The items from which to draw, as indices into ``sizes``, shape (I,).
        sizes: The size (weight) of each item, as integers.
        count: The number of draws.
        generator: The random generator.

    Returns:
        The drawn items, shape (count,). Each item's number of draws is the expected number, rounded down or up.
    """
    order = generator.permutation(items)
    # Imagine the items one after another on a line, where the length of an item is its size times ``count``. Pointers
    # are placed every ``total``, beginning at a random point, and each pointer draws the item that it hits.
    ends = np.cumsum(sizes[order] * count)
    total = int(sizes[order].sum())
    pointers = generator.integers(total) + total * np.arange(count)
    return order[np.searchsorted(ends, pointers, side="right")]


def allocated(
    rule: Allocation, budget: int, sizes: Ints, deviations: Floats, generator: np.random.Generator | None = None
) -> tuple[Ints, Floats]:
    """Allocate draws to strata. Return each stratum's number of draws, and the probability that it gets any draws.

    In Neyman's optimal allocation, the number of draws is proportional to stratum size times spread (FedSTS, Eq. 5). If
    all spreads are zero, draws are allocated in proportion to stratum size.

    Args:
        rule: The rule; see ``Allocation``.
        budget: The number of draws to allocate.
        sizes: The number of clients in each stratum, shape (H,).
        deviations: The spread of each stratum, shape (H,); see ``spread``.
        generator: The random generator, which only ``neyman-random`` needs.

    Returns:
        Two arrays of shape (H,). The first array contains the number of draws from each stratum. A stratum never gets
        more draws than it has clients, and the sum is ``budget``. The second array contains the probability that a
        stratum gets at least one draw: 0 or 1 for rules that are not random.

    >>> allocated("neyman", 4, np.array([10, 10]), np.array([3.0, 1.0]))[0].tolist()
    [3, 1]
    >>> allocated("neyman", 4, np.array([30, 10]), np.array([0.0, 0.0]))[0].tolist()
    [3, 1]
    """
    weights = sizes * deviations
    if rule == "proportional" or not weights.sum() > 0:
        weights = sizes.astype(np.float64)
    if rule != "neyman-random":
        counts = allocate(budget, sizes, weights, least=int(rule != "neyman"))
        return counts, (counts > 0).astype(np.float64)
    assert generator is not None
    filled = sizes > 0
    floor = min(1.0, FLOOR * budget / max(int(filled.sum()), 1))
    exact = quotas(budget, sizes, weights, np.where(filled, floor, 0.0))
    return systematic(exact, generator), np.minimum(exact, 1.0)
