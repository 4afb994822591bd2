"""How many clients each stratum gets."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


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


def allocate(budget: int, sizes: NDArray[np.int64], weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """Whole numbers in proportion to ``weights``, by largest remainder, that add up to ``budget``.

    No stratum gets more than its size, and every stratum that is not empty gets at least one while the budget
    allows it: one that were left out would bias the aggregate. Where the budget is smaller than the number of strata,
    those of the largest weight get the ones.

    Args:
        budget: m, at most Σ N_h.
        sizes: N_h, shape (H,).
        weights: Shape (H,), not negative.

    Returns:
        m_h, shape (H,).

    Raises:
        ValueError: The budget is more than there is.

    >>> allocate(10, np.array([5, 20, 3]), np.array([1.0, 8.0, 1.0])).tolist()
    [1, 8, 1]
    """
    if budget > sizes.sum():
        raise ValueError(f"{budget} clients cannot be taken from {sizes.sum()}")
    filled = sizes > 0
    if filled.sum() >= budget:
        first = np.argsort(-np.where(filled, weights, -1.0), kind="stable")[:budget]
        result = np.zeros_like(sizes)
        result[first] = 1
        return result
    total = weights.sum()
    # A trace of proportionality to size lets strata of weight zero take what is left when all others are full.
    shares = (weights / total if total > 0 else 0.0) + 1e-12 * sizes / sizes.sum()
    # The scale at which the shares, held between one and the stratum's size, add up to the budget.
    low, high = float(1 / shares.max()), float((sizes[filled] / shares[filled]).max())
    # Until no number lies between the two.
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if np.clip(middle * shares, filled, sizes).sum() < budget else (low, middle)
    exact = np.clip(high * shares, filled, sizes)
    whole: NDArray[np.int64] = np.floor(exact + 1e-9).astype(np.int64)
    remainders = np.where(whole < sizes, exact - whole, -1.0)
    whole[np.argsort(-remainders, kind="stable")[: budget - int(whole.sum())]] += 1
    return whole


def neyman(budget: int, sizes: NDArray[np.int64], deviations: NDArray[np.float64]) -> NDArray[np.int64]:
    """Neyman's optimal allocation m_h ∝ N_h S_h (FedSTS, Eq. 5); proportional to N_h where all S_h are zero.

    Args:
        budget: m.
        sizes: N_h, shape (H,).
        deviations: S_h, shape (H,).

    Returns:
        m_h, shape (H,), with Σ m_h = m and m_h ≤ N_h.

    >>> neyman(4, np.array([10, 10]), np.array([3.0, 1.0])).tolist()
    [3, 1]
    >>> neyman(4, np.array([30, 10]), np.array([0.0, 0.0])).tolist()
    [3, 1]
    """
    weights = sizes * deviations
    return allocate(budget, sizes, weights if weights.sum() > 0 else sizes.astype(np.float64))
