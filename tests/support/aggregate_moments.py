"""Bias and variance of a sampler's aggregate, by simulation on fixed client updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Drawn = Callable[[np.random.Generator], Floats]
"""One draw of a sampler: the weight a_k that the aggregate gives each of the N clients, 0 for those not drawn."""


@dataclass(frozen=True)
class Moments:
    """Moments of the aggregate Σ_k a_k Δ_k in a simulation.

    Args:
        weight: E a_k, shape (N,).
        mean: E Σ a_k Δ_k, shape (d,).
        error: The standard error of ``mean``, shape (d,).
        variance: E ‖Σ a_k Δ_k − its mean‖².
    """

    weight: Floats
    mean: Floats
    error: Floats
    variance: float

    def deviation(self, target: Floats) -> float:
        """The largest distance of a coordinate of the mean from ``target``, in standard errors.

        Infinite if a coordinate never varies and still differs from the target by more than rounding.
        """
        gap = np.abs(self.mean - target)
        gap[gap <= 1e-9 * max(float(np.abs(target).max()), 1e-300)] = 0.0
        ratio = np.divide(gap, self.error, out=np.where(gap > 0, np.inf, 0.0), where=self.error > 0)
        return float(ratio.max())


def moments(draw: Drawn, updates: NDArray[np.float64], draws: int, generator: np.random.Generator) -> Moments:
    """Estimate the moments from repeated draws with the same updates.

    Args:
        draw: The sampler with its aggregation.
        updates: Δ_k, shape (N, d).
        draws: How often, at least 2.
        generator: Randomness.

    >>> one = moments(lambda g: np.eye(2)[g.integers(2)], np.array([[0.0], [2.0]]), 1000, np.random.default_rng(0))
    >>> bool(one.deviation(np.array([1.0])) < 4), 0.9 < one.variance < 1.1
    (True, True)
    """
    n = len(updates)
    # The weights' moments are enough: the aggregate is linear in them, and N is far below draws and d.
    total, squares = np.zeros(n), np.zeros((n, n))
    for begin in range(0, draws, 1000):
        weights = np.stack([draw(generator) for _ in range(begin, min(begin + 1000, draws))])
        total += weights.sum(axis=0)
        squares += weights.T @ weights
    weight = total / draws
    covariance = (squares - draws * np.outer(weight, weight)) / (draws - 1)
    each = np.maximum(np.einsum("kd,kd->d", covariance @ updates, updates), 0.0)
    # Rounding of a variance that is zero: what is left after subtracting squares of this size.
    each[each <= 1e-12 * np.einsum("kd,kd->d", np.abs(np.outer(weight, weight)) @ np.abs(updates), np.abs(updates))] = 0
    return Moments(weight, weight @ updates, np.sqrt(each / draws), float(each.sum()))


def scattered(clients: NDArray[np.int64], coefficients: Floats, population: int) -> Floats:
    """Weights of the clients drawn as weights of all clients, shape (population,).

    >>> scattered(np.array([1, 3]), np.array([0.5, 0.5]), 4).tolist()
    [0.0, 0.5, 0.0, 0.5]
    """
    result = np.zeros(population)
    result[clients] = coefficients
    return result
