"""Compute average ranks of methods, with the tests of Friedman and Nemenyi (Demšar 2006, JMLR 7)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

ALPHA = 0.05
"""The significance level of Friedman's and Nemenyi's tests."""


@dataclass(frozen=True)
class Ranking:
    """The average ranks of methods over blocks, such as seeds. Rank 1 is the best.

    Args:
        ranks: A mapping from each method to its average rank, from best to worst. If methods have equal values in a
            block, each of them gets the mean of their ranks.
        blocks: Number of blocks.
        p: p-value of Friedman's test, whose null hypothesis is that all methods have the same distribution of ranks;
            None if all values are equal.
        critical: Critical difference of Nemenyi's test. Smaller differences between average ranks are not significant.
    """

    ranks: Mapping[str, float]
    blocks: int
    p: float | None
    critical: float


def ranking(values: Mapping[str, Sequence[float | None]]) -> Ranking | None:
    """Rank methods in each block, and average the ranks over the blocks.

    Args:
        values: A mapping from each method to its value in each block. Higher values are better. A method without a
            value in a block has the last rank in this block.

    Returns:
        The ranking. None if Friedman's test is impossible: for fewer than three methods or fewer than two blocks.
    """
    from scipy.stats import friedmanchisquare, rankdata

    table = np.array([[-np.inf if v is None else v for v in each] for each in values.values()], dtype=np.float64)
    if len(values) < 3 or table.shape[1] < 2:
        return None
    ranks = rankdata(-table, axis=0)
    means = dict(zip(values, ranks.mean(axis=1).tolist(), strict=True))
    # If all methods have the same rank in all blocks, there is nothing to test, and SciPy would divide by zero.
    p = None if np.ptp(ranks) == 0 else float(friedmanchisquare(*ranks).pvalue)
    ordered = dict(sorted(means.items(), key=lambda each: each[1]))
    return Ranking(ordered, table.shape[1], p, critical_difference(*table.shape))


def critical_difference(methods: int, blocks: int) -> float:
    """Return Nemenyi's critical difference of average ranks, q √(k (k + 1) / (6 N)) for k methods and N blocks.

    The quantile q is the 95 % quantile of the studentised range of k values, divided by √2.
    """
    from scipy.stats import studentized_range

    q = float(studentized_range.ppf(1 - ALPHA, methods, np.inf)) / math.sqrt(2)
    return q * math.sqrt(methods * (methods + 1) / (6 * blocks))
