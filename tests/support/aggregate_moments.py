"""Estimate the bias and the variance of a sampler's aggregate, by simulations with fixed client updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Drawn = Callable[[np.random.Generator], Floats]
"""A function that draws clients once, and returns the weight a_k of each of the N clients (0 for those not drawn)."""


@dataclass(frozen=True)
class Moments:
    """The moments of the aggregate Σ_k a_k Δ_k in a simulation.

    Args:
        weight: The mean of a_k, shape (N,).
        mean: The mean of the aggregate, shape (d,).
        error: The standard error of ``mean``, shape (d,).
        variance: The mean squared distance of the aggregate from its mean.
    """

    weight: Floats
    mean: Floats
    error: Floats
    variance: float

    def deviation(self, target: Floats) -> float:
        """Return the largest distance of a coordinate of the mean from ``target``, in standard errors.

        It is infinite if a coordinate never varies but differs from the target by more than rounding.
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
        draws: The number of draws, at least 2.
        generator: The random generator.

    >>> one = moments(lambda g: np.eye(2)[g.integers(2)], np.array([[0.0], [2.0]]), 1000, np.random.default_rng(0))
    >>> bool(one.deviation(np.array([1.0])) < 4), 0.9 < one.variance < 1.1
    (True, True)
    """
    n = len(updates)
    # The moments of the weights are enough, because the aggregate is linear in the weights. This saves time and memory.
    total, squares = np.zeros(n), np.zeros((n, n))
    for begin in range(0, draws, 1000):
        weights = np.stack([draw(generator) for _ in range(begin, min(begin + 1000, draws))])
        total += weights.sum(axis=0)
        squares += weights.T @ weights
    weight = total / draws
    covariance = (squares - draws * np.outer(weight, weight)) / (draws - 1)
    each = np.maximum(np.einsum("kd,kd->d", covariance @ updates, updates), 0.0)
    # A variance that is this small, compared with the squares that were subtracted, is a rounding error of zero.
    each[each <= 1e-12 * np.einsum("kd,kd->d", np.abs(np.outer(weight, weight)) @ np.abs(updates), np.abs(updates))] = 0
    return Moments(weight, weight @ updates, np.sqrt(each / draws), float(each.sum()))


def scattered(clients: NDArray[np.int64], coefficients: Floats, population: int) -> Floats:
    """Return the weights of all clients, shape (population,): those of the drawn clients, and 0 for the others.

    >>> scattered(np.array([1, 3]), np.array([0.5, 0.5]), 4).tolist()
    [0.0, 0.5, 0.0, 0.5]
    """
    result = np.zeros(population)
    result[clients] = coefficients
    return result
