"""Ratios of paired timings, and what they may be with 95 % confidence."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Ratio:
    """How many times as fast the second of two is.

    Args:
        median: Over the pairs.
        low: Lower end of the interval of the median.
        high: Its upper end.
        pairs: How many pairs.
    """

    median: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f}, {self.pairs} pairs)"


def ratio_of(first: Sequence[float], second: Sequence[float]) -> Ratio:
    """The median of ``first`` / ``second`` pair by pair, with a bootstrap interval of 95 %.

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
    """Seconds of two works that take turns, and take turns at going first, after one of each to warm up.

    Args:
        first: A work; what it returns counts as its seconds, or the time of the call where it returns None.
        second: The other.
        pairs: How often each counts.
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
