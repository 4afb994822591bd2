"""Compute statistical bounds for audits: intervals of success rates, and lower bounds on ε from guesses about canaries.

Canaries are artificial samples, each of which was in the data with probability 1/2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta, binom

SHARES = (1.0, 0.3, 0.1, 0.03)
"""The fractions of canaries about which the attacker guesses.

For each fraction, a bound is computed with a quarter of the allowed error probability. The best bound is used.
"""
LARGEST_EPSILON = 100.0
"""The largest ε that ``epsilon_bound`` returns."""


@dataclass(frozen=True)
class Rate:
    """The success rate of independent trials, with its confidence interval (Clopper & Pearson 1934).

    Args:
        right: The number of successes.
        trials: The number of trials.
        rate: The fraction of successes; None without trials.
        low: The lower end of the interval.
        high: The upper end of the interval.
    """

    right: int
    trials: int
    rate: float | None
    low: float
    high: float

    @classmethod
    def of(cls, right: int, trials: int, confidence: float = 0.95) -> Rate:
        """Compute the interval of a rate.

        Args:
            right: The number of successes.
            trials: The number of trials.
            confidence: The minimum probability with which the interval contains the true rate.

        >>> one = Rate.of(10, 10)
        >>> one.rate, round(one.low, 4), one.high
        (1.0, 0.6915, 1.0)
        """
        tail = (1 - confidence) / 2
        low = float(beta.ppf(tail, right, trials - right + 1)) if right else 0.0
        high = float(beta.ppf(1 - tail, right + 1, trials - right)) if right < trials else 1.0
        return cls(right, trials, right / trials if trials else None, low, high)


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return the maximum probability that at least ``right`` guesses are correct, under (ε, δ)-differential privacy.

    Each canary was in the data with probability 1/2, independently of the other canaries. For some canaries, the
    attacker guesses whether the canary was in the data (Steinke, Nasr & Jagielski 2023). Let W be the number of correct
    guesses among r guesses. Then P(W ≥ v) ≤ P(B ≥ v) + 2 m δ · max_i P(v − i ≤ B < v) / i. Here, B is binomial with r
    trials and the probability e^ε / (1 + e^ε), and m is the number of canaries.

    Args:
        canaries: m, the number of canaries.
        guesses: r, the number of canaries about which the attacker guesses.
        right: v, the number of correct guesses.
        epsilon: ε.
        delta: δ.

    >>> round(p_value(canaries=1, guesses=1, right=1, epsilon=0.0, delta=0.0), 3)
    0.5
    """
    rate = 1 / (1 + np.exp(-epsilon))
    chance = float(binom.sf(right - 1, guesses, rate))
    if right == 0:
        return 1.0
    below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, rate))
    slope = float(np.max(below / np.arange(1, right + 1), initial=0.0))
    return min(1.0, chance + 2 * canaries * delta * slope)


def epsilon_bound(canaries: int, guesses: int, right: int, delta: float, confidence: float) -> float:
    """Return a lower bound on ε that holds with the given confidence; 0 if the guesses are consistent with ε = 0.

    Args:
        canaries: The number of canaries.
        guesses: The number of canaries about which the attacker guesses. This number must be fixed before guessing.
        right: The number of correct guesses.
        delta: δ.
        confidence: The confidence level. If training is (ε, δ)-differentially private, the probability that the bound
            exceeds ε is at most 1 − ``confidence``.

    >>> round(epsilon_bound(canaries=100, guesses=100, right=100, delta=0.0, confidence=0.95), 2)
    3.49
    """
    tail, low, high = 1 - confidence, 0.0, LARGEST_EPSILON
    if p_value(canaries, guesses, right, low, delta) >= tail:
        return 0.0
    for _ in range(50):
        middle = (low + high) / 2
        if p_value(canaries, guesses, right, middle, delta) < tail:
            low = middle
        else:
            high = middle
    return low


def best_bound(
    scores: NDArray[np.float64], present: NDArray[np.bool_], delta: float, confidence: float
) -> tuple[int, int, float]:
    """Guess which canaries were in the data, and return the best lower bound on ε.

    Guess "in the data" for the canaries with the lowest scores, and "not in the data" for equally many canaries with
    the highest scores. The fractions in ``SHARES`` share the error probability equally, so all their bounds are valid
    together, including the best bound.

    Args:
        scores: For each canary, the changes of the canary's parameter, summed over all rounds.
        present: Whether each canary was in the data.
        delta: δ.
        confidence: The confidence level of the best bound.

    Returns:
        The number of guesses, the number of correct guesses, and the bound.
    """
    order, results = np.argsort(scores, kind="stable"), list[tuple[int, int, float]]()
    for share in SHARES:
        half = max(1, round(share * len(scores) / 2)) if len(scores) > 1 else 0
        low, high = order[:half], order[len(order) - half :]
        right = int(present[low].sum() + (~present[high]).sum())
        level = 1 - (1 - confidence) / len(SHARES)
        results.append((2 * half, right, epsilon_bound(len(scores), 2 * half, right, delta, level)))
    return max(results, key=lambda result: result[2])
