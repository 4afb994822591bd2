"""Measure two functions in turns, and compute the ratio of their times with a 95 % confidence interval."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Ratio:
    """The speed of the second function divided by the speed of the first function.

    Args:
        median: The median ratio over the pairs.
        low: The lower end of the median's confidence interval.
        high: The upper end of this interval.
        pairs: The number of pairs.
    """

    median: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f}, {self.pairs} pairs)"


def ratio_of(first: Sequence[float], second: Sequence[float]) -> Ratio:
    """Return the median of the ratios ``first`` / ``second`` of all pairs, with a bootstrap interval of 95 %.

    >>> ratio_of([2.0, 2.0, 2.0], [1.0, 1.0, 1.0]).median
    2.0
    """
    ratios = np.array(first) / np.array(second)
    drawn = np.random.default_rng(0).choice(ratios, size=(4000, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return Ratio(statistics.median(ratios.tolist()), float(low), float(high), len(ratios))


def in_turns(
    first: Callable[[], float | None], second: Callable[[], float | None], pairs: int
) -> tuple[list[float], list[float]]:
    """Run two functions in turns, and return the seconds of each.

    Each function runs once to warm up. After that, the order of the two alternates from pair to pair.

    Args:
        first: A function that returns its seconds, or None if the time of the call counts.
        second: The other function.
        pairs: The number of pairs.
    """

    def timed(work: Callable[[], float | None]) -> float:
        began = time.perf_counter()
        told = work()
        return time.perf_counter() - began if told is None else told

    timed(first), timed(second)
    seconds: tuple[list[float], list[float]] = [], []
    for turn in range(pairs):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            seconds[which].append(timed((first, second)[which]))
    return seconds
