"""How many clients each stratum gets."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Allocation = Literal["neyman", "neyman-random", "neyman-at-least-one", "proportional"]
"""Rules: Neyman's, by which strata may get none; the same rounded at random above a floor, so that every stratum has a
chance; with one for every stratum; in proportion to N_h, with one for every stratum."""

FLOOR = 0.5
"""Of an equal share of the places: what ``neyman-random`` leaves every stratum on average, at most one place."""


def spread(points: NDArray[np.float32], strata: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """S_h: the root of the mean coordinate variance within each stratum, shape (count,).

    Args:
        points: Shape (N, d).
        strata: Shape (N,), in 0 … count − 1.
        count: H.
    """
    result = np.zeros(count)
    for h in range(count):
        members = points[strata == h]
        if len(members):
            result[h] = np.sqrt(members.var(axis=0, dtype=np.float64).mean())
    return result


def allocate(
    budget: int, sizes: NDArray[np.int64], weights: NDArray[np.float64], *, least: int = 1
) -> NDArray[np.int64]:
    """Whole numbers in proportion to ``weights``, by largest remainder, that add up to ``budget``.

    No stratum gets more than its size. With ``least = 1`` every stratum that is not empty gets at least one while the
    budget allows it: one that were left out would bias the aggregate. Where the budget is smaller than the number of
    strata, those of the largest weight get the ones.

    Args:
        budget: m, at most Σ N_h.
        sizes: N_h, shape (H,).
        weights: Shape (H,), not negative.
        least: Fewest of a stratum that is not empty: 0 or 1.

    Returns:
        m_h, shape (H,).

    Raises:
        ValueError: The budget is more than there is.

    >>> allocate(10, np.array([5, 20, 3]), np.array([1.0, 8.0, 1.0])).tolist()
    [1, 8, 1]
    >>> allocate(3, np.array([5, 20, 3]), np.array([1.0, 8.0, 1.0]), least=0).tolist()
    [0, 3, 0]
    """
    filled = sizes > 0
    if least and filled.sum() >= budget:
        _require(budget, sizes)
        first = np.argsort(-np.where(filled, weights, -1.0), kind="stable")[:budget]
        result = np.zeros_like(sizes)
        result[first] = 1
        return result
    exact = quotas(budget, sizes, weights, np.where(filled, float(least), 0.0))
    whole: NDArray[np.int64] = np.floor(exact + 1e-9).astype(np.int64)
    remainders = np.where(whole < sizes, exact - whole, -1.0)
    whole[np.argsort(-remainders, kind="stable")[: budget - int(whole.sum())]] += 1
    return whole


def quotas(
    budget: int, sizes: NDArray[np.int64], weights: NDArray[np.float64], floors: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Numbers in proportion to ``weights``, held between ``floors`` and ``sizes``, that add up to ``budget``.

    Args:
        budget: m, between Σ floors and Σ N_h.
        sizes: N_h, shape (H,).
        weights: Shape (H,), not negative.
        floors: Shape (H,), at most N_h.

    Returns:
        Shape (H,).

    Raises:
        ValueError: The budget is more than there is.

    >>> quotas(4, np.array([9, 9, 9]), np.array([6.0, 2.0, 0.0]), np.array([0.5, 0.5, 0.5])).round(6).tolist()
    [2.625, 0.875, 0.5]
    """
    _require(budget, sizes)
    if budget == 0:
        return np.zeros(len(sizes))
    filled, total = sizes > 0, weights.sum()
    # A trace of proportionality to size lets strata of weight zero take what is left when all others are full.
    shares = (weights / total if total > 0 else 0.0) + 1e-12 * sizes / sizes.sum()
    # The scale at which the shares, held between the bounds, add up to the budget.
    low, high = float(floors[filled].min() / shares.max()), float((sizes[filled] / shares[filled]).max())
    # Until no number lies between the two.
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if np.clip(middle * shares, floors, sizes).sum() < budget else (low, middle)
    exact: NDArray[np.float64] = np.clip(high * shares, floors, sizes)
    return exact


def systematic(exact: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.int64]:
    """Whole numbers that are ``exact`` on average, each rounded down or up, with the same sum.

    Systematic rounding: one random start, and a step whenever the running sum passes a whole number from it.

    Args:
        exact: Shape (H,); adds up to a whole number.
        generator: Randomness.

    >>> systematic(np.array([0.5, 0.5, 2.0]), np.random.default_rng(0)).sum()
    np.int64(3)
    """
    ends = np.concatenate(([0.0], np.cumsum(exact)))
    ends[-1] = round(float(ends[-1]))
    # Sums of decimals miss whole numbers by rounding, and a stratum must not lose its place by that.
    near = np.round(ends)
    ends = np.where(np.abs(ends - near) < 1e-9, near, ends)
    return np.diff(np.floor(ends + generator.random())).astype(np.int64)


def allocated(
    rule: Allocation,
    budget: int,
    sizes: NDArray[np.int64],
    deviations: NDArray[np.float64],
    generator: np.random.Generator,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """How many clients each stratum gets by a rule, and how likely it was to get any.

    Args:
        rule: See ``Allocation``.
        budget: m.
        sizes: N_h, shape (H,).
        deviations: S_h, shape (H,).
        generator: Randomness, for ``neyman-random``.

    Returns:
        m_h, shape (H,), with Σ m_h = m and m_h ≤ N_h; the probability of m_h > 0, shape (H,), which is 0 or 1 where
        nothing is random.
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


def neyman(
    budget: int, sizes: NDArray[np.int64], deviations: NDArray[np.float64], *, least: int = 1
) -> NDArray[np.int64]:
    """Neyman's optimal allocation m_h ∝ N_h S_h (FedSTS, Eq. 5); proportional to N_h where all S_h are zero.

    Args:
        budget: m.
        sizes: N_h, shape (H,).
        deviations: S_h, shape (H,).
        least: Fewest of a stratum that is not empty: 0 (as the authors' published code has it) or 1.

    Returns:
        m_h, shape (H,), with Σ m_h = m and m_h ≤ N_h.

    >>> neyman(4, np.array([10, 10]), np.array([3.0, 1.0])).tolist()
    [3, 1]
    >>> neyman(4, np.array([30, 10]), np.array([0.0, 0.0])).tolist()
    [3, 1]
    """
    weights = sizes * deviations
    return allocate(budget, sizes, weights if weights.sum() > 0 else sizes.astype(np.float64), least=least)


def _require(budget: int, sizes: NDArray[np.int64]) -> None:
    if budget > sizes.sum():
        raise ValueError(f"{budget} clients cannot be taken from {sizes.sum()}")
