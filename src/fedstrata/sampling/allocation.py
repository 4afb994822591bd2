"""Allocation of a round's draws of clients to strata, which are groups of clients, and systematic sampling.

m is the number of draws and H the number of strata. Stratum h has N_h clients and gets m_h draws.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedstrata.base.arrays import Floats, Floats32, Ints

Allocation = Literal["neyman", "neyman-random", "neyman-at-least-one", "proportional"]
"""The rules by which draws are allocated to strata.

- ``neyman``: Neyman's optimal allocation (see ``neyman``); a stratum may get no draw.
- ``neyman-random``: Neyman's allocation, raised to a minimum (see ``FLOOR``) and rounded at random, so that every
  stratum can get a draw.
- ``neyman-at-least-one``: Neyman's allocation with at least one draw for every stratum.
- ``proportional``: In proportion to the stratum's number of clients, with at least one draw for every stratum.
"""

FLOOR = 0.5
"""The minimum for ``neyman-random``: of m draws, each of H strata gets at least min(1, FLOOR · m / H) on average."""


def spread(points: Floats32, strata: Ints, count: int) -> Floats:
    """Return the spread S_h of each stratum h, a measure of how much its points differ, shape (count,).

    S_h² is the variance of one coordinate within the stratum, averaged over the d coordinates.

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
    """Divide ``budget`` draws among strata in proportion to ``weights``; return whole numbers.

    Exact shares are rounded down. The strata with the largest remainders get the draws that are left. No stratum gets
    more draws than it has clients. With ``least = 1`` every stratum that is not empty gets at least one draw, because a
    stratum without a draw biases the aggregate. If the budget is smaller than the number of strata, the strata with the
    largest weights get one draw each.

    Args:
        budget: The number of draws to allocate, at most the sum of ``sizes``.
        sizes: The number of clients in each stratum, shape (H,).
        weights: The weight of each stratum, shape (H,), not negative.
        least: The minimum for a stratum that is not empty: 0 or 1.

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
    """Divide ``budget`` in proportion to ``weights``; return real numbers between ``floors`` and ``sizes``.

    Args:
        budget: The number to divide, between the sum of ``floors`` and the sum of ``sizes``.
        sizes: The largest result for each stratum (its number of clients), shape (H,).
        weights: The weight of each stratum, shape (H,), not negative.
        floors: The smallest result for each stratum, shape (H,), at most its size.

    Returns:
        The expected number of draws from each stratum, shape (H,).

    Raises:
        ValueError: The budget is larger than the sum of ``sizes``.

    >>> quotas(4, np.array([9, 9, 9]), np.array([6.0, 2.0, 0.0]), np.array([0.5, 0.5, 0.5])).round(6).tolist()
    [2.625, 0.875, 0.5]
    """
    if budget > sizes.sum():
        raise ValueError(f"{budget} clients cannot be taken from {sizes.sum()}")
    if budget == 0:
        return np.zeros(len(sizes))
    filled, total = sizes > 0, weights.sum()
    # The second term is tiny. It matters if all strata with a positive weight have reached their size: it then divides
    # the rest of the budget.
    shares = (weights / total if total > 0 else 0.0) + 1e-12 * sizes / sizes.sum()
    # Find the factor with which the clipped shares add up to the budget, by bisection to the last bit.
    low, high = float(floors[filled].min() / shares.max()), float((sizes[filled] / shares[filled]).max())
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if np.clip(middle * shares, floors, sizes).sum() < budget else (low, middle)
    exact: Floats = np.clip(high * shares, floors, sizes)
    return exact


def systematic(exact: Floats, generator: np.random.Generator) -> Ints:
    """Round numbers down or up at random, so that their sum stays the same and each result is unbiased.

    The rounding is systematic: the cumulative sums are shifted by one random number in [0, 1) and rounded down, and the
    results are their differences.

    Args:
        exact: The numbers to round, shape (H,); their sum is a whole number.
        generator: Randomness.

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

    On average, an item is drawn ``count`` times its size, divided by the sum of the sizes of all ``items``.

    Args:
        items: The items from which to draw, as indices into ``sizes``, shape (I,).
        sizes: The size (weight) of each item, whole numbers.
        count: The number of draws.
        generator: Randomness.

    Returns:
        The items drawn, shape (count,). Each item appears as often as its average says, rounded down or up.
    """
    order = generator.permutation(items)
    # The items lie one after another on a line, each with the length of its size times ``count``. Pointers at a
    # distance of ``total`` from each other, with a random start, hit the items that are drawn.
    ends = np.cumsum(sizes[order] * count)
    total = int(sizes[order].sum())
    pointers = generator.integers(total) + total * np.arange(count)
    return order[np.searchsorted(ends, pointers, side="right")]


def allocated(
    rule: Allocation, budget: int, sizes: Ints, deviations: Floats, generator: np.random.Generator
) -> tuple[Ints, Floats]:
    """Allocate draws to strata by a rule; return each stratum's number of draws, and the probability that it gets any.

    Args:
        rule: The rule; see ``Allocation``.
        budget: The number of draws to allocate.
        sizes: The number of clients in each stratum, shape (H,).
        deviations: The spread of each stratum, shape (H,); see ``spread``.
        generator: Randomness, which only ``neyman-random`` uses.

    Returns:
        The number of draws from each stratum, shape (H,): at most its number of clients, ``budget`` in total; and the
        probability that a stratum gets a draw, shape (H,), which is 0 or 1 for rules that are not random.
    """
    if rule == "proportional":
        counts = allocate(budget, sizes, sizes.astype(np.float64))
    elif rule != "neyman-random":
        counts = neyman(budget, sizes, deviations, least=int(rule == "neyman-at-least-one"))
    else:
        weights, filled = sizes * deviations, sizes > 0
        floor = min(1.0, FLOOR * budget / max(int(filled.sum()), 1))
        floors = np.where(filled, floor, 0.0)
        exact = quotas(budget, sizes, weights if weights.sum() > 0 else sizes.astype(np.float64), floors)
        return systematic(exact, generator), np.minimum(exact, 1.0)
    return counts, (counts > 0).astype(np.float64)


def neyman(budget: int, sizes: Ints, deviations: Floats, *, least: int = 1) -> Ints:
    """Allocate draws to strata in proportion to size times spread: Neyman's optimal allocation (FedSTS, Eq. 5).

    If all spreads are zero, the allocation is in proportion to size.

    Args:
        budget: The number of draws to allocate.
        sizes: The number of clients in each stratum, shape (H,).
        deviations: The spread of each stratum, shape (H,); see ``spread``.
        least: The minimum for a stratum that is not empty: 0 (as in the authors' published code) or 1.

    Returns:
        The number of draws from each stratum, shape (H,): at most its number of clients, ``budget`` in total.

    >>> neyman(4, np.array([10, 10]), np.array([3.0, 1.0])).tolist()
    [3, 1]
    >>> neyman(4, np.array([30, 10]), np.array([0.0, 0.0])).tolist()
    [3, 1]
    """
    weights = sizes * deviations
    return allocate(budget, sizes, weights if weights.sum() > 0 else sizes.astype(np.float64), least=least)
