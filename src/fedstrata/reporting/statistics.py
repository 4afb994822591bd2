"""Statistics over a few seeds: means with intervals, differences paired by seed, tests and their correction.

``paired_difference`` with ``holm`` is for tables of any runs. With a resolution, ``paired_difference`` also serves to
judge the papers' claims, by Student's t intervals. One method is said to be above another only with at least
``MIN_SEEDS`` seeds, and only if the interval of their difference excludes zero.

SciPy is imported when it is first needed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

import numpy as np

from fedstrata.base.arrays import Floats
from fedstrata.base.errors import SpecError

K = TypeVar("K", bound=Hashable)

Range: TypeAlias = tuple[float, float]
"""Lower and upper end of an interval."""
Test = Literal["t", "wilcoxon"]
Order = Literal["above", "below", "not significant", "too few seeds", "not run"]
Values: TypeAlias = Mapping[K, float | None]
"""A mapping from each key (a seed) to its number; None if the seed does not have the number."""

TESTS: tuple[Test, ...] = ("t", "wilcoxon")
"""Tests of paired differences: Student's t-test, and Wilcoxon's signed-rank test."""
LEVEL = 0.95
"""The confidence level of all intervals."""
RESAMPLES = 9_999
"""The number of resamples of a bootstrap interval."""
FEWEST = {"t": 2, "wilcoxon": 6}
"""The fewest pairs for each test. Wilcoxon's smallest two-sided p for n pairs is 2^(1-n), above 0.05 for n < 6."""
MIN_SEEDS = 3
"""The fewest seeds with which an interval is given and an order is stated."""
UNBOUNDED: Range = (-math.inf, math.inf)
ALIKE = 1e-12
"""Differences below this fraction of the largest value are attributed to rounding."""


@dataclass(frozen=True)
class Estimate:
    """The mean and the spread of a value over seeds.

    Args:
        mean: The mean of the values that are known; None if no seed has a value.
        sd: The sample standard deviation of these values; None for fewer than two.
        n: The number of seeds that have a value.
        interval: The 95 % interval of the mean by Student's t; None for fewer than ``MIN_SEEDS``.
    """

    mean: float | None
    sd: float | None
    n: int
    interval: Range | None = None

    @classmethod
    def over(cls, values: Iterable[float | None], bounds: Range = UNBOUNDED) -> Estimate:
        """Compute the mean, spread and interval of the seeds' values; None stands for a missing value.

        Args:
            values: The value of each seed.
            bounds: The smallest and the largest possible value; the interval is cut there.

        >>> Estimate.over([1.0, None])
        Estimate(mean=1.0, sd=None, n=1, interval=None)
        """
        known = [float(value) for value in values if value is not None]
        if len(known) < 2:
            return cls(known[0] if known else None, None, len(known))
        mean, sd = statistics.fmean(known), statistics.stdev(known)
        interval = t_interval(mean, sd, len(known)) if len(known) >= MIN_SEEDS else None
        return cls(mean, sd, len(known), cut(interval, bounds))


def t_interval(mean: float, sd: float, n: int, *, together: int = 1) -> Range:
    """Compute the 95 % interval mean ± t(n - 1) · sd / √n for the mean of normally distributed numbers.

    Args:
        mean: The sample mean.
        sd: The sample standard deviation.
        n: The sample size, at least two.
        together: The number of intervals that must hold at the same time with 95 % confidence (Bonferroni).
    """
    from scipy.stats import t

    margin = float(t.ppf(1 - (1 - LEVEL) / 2 / together, n - 1)) * sd / n**0.5
    return mean - margin, mean + margin


@dataclass(frozen=True)
class Difference:
    """The mean difference between the numbers of a method and of a baseline with the same seeds.

    Args:
        mean: The mean over the pairs; None without pairs.
        n: The number of pairs, which are the seeds that both have.
        interval: The 95 % interval of the mean, see ``paired_difference``; None for too few pairs.
        p: The two-sided p-value, not corrected. It is None for fewer pairs than the test's ``FEWEST``, and if all
            differences are equal, because a test is then impossible.
        corrected: The p-value after ``holm`` over all comparisons of a table.
    """

    mean: float | None
    n: int
    interval: Range | None = None
    p: float | None = None
    corrected: float | None = None

    def order(self, margin: float = 0.0) -> Order:
        """Return the order that the interval, moved up by ``margin``, shows; or the reason why it shows none.

        The order is ``above`` if both ends of the moved interval are positive, and ``below`` if both are negative.

        >>> Difference(1.5, 3, (0.5, 2.5)).order(), Difference(1.0, 3, (-0.5, 2.5)).order()
        ('above', 'not significant')
        >>> Difference(1.0, 3, (-0.5, 2.5)).order(margin=1.0), Difference(1.5, 2, (0.5, 2.5)).order()
        ('above', 'too few seeds')
        """
        if self.n == 0:
            return "not run"
        if self.n < MIN_SEEDS or self.interval is None:
            return "too few seeds"
        return (
            "above"
            if self.interval[0] + margin > 0
            else "below"
            if self.interval[1] + margin < 0
            else "not significant"
        )


def paired_difference(
    values: Values[K], baseline: Values[K], test: Test = "t", *, resolution: float | None = None, together: int = 1
) -> Difference:
    """Compute the mean difference between values and the baseline's values with the same seeds.

    Args:
        values: A mapping from each seed to a number; None stands for a missing number.
        baseline: The numbers of the baseline.
        test: ``"t"``, the paired t-test, or ``"wilcoxon"``, Wilcoxon's signed-rank test.
        resolution: The unit to which the numbers are rounded; None for a bootstrap interval of at least ``MIN_SEEDS``
            pairs. With a unit, the interval is Student's t. Its standard deviation is then at least resolution / √6,
            which is that of the rounding errors, so that a few equal differences do not give an interval of length 0.
        together: The number of simultaneous t intervals, see ``t_interval``.

    Raises:
        SpecError: The test is unknown.

    >>> paired_difference({0: 0.5, 1: 0.75, 2: 0.9}, {1: 0.25, 0: 0.5}).mean
    0.25
    """
    if test not in TESTS:
        raise SpecError("test", f"is not a test. Use one of: {', '.join(TESTS)}.", test)
    pairs = [(a, b) for key in values if (a := values[key]) is not None and (b := baseline.get(key)) is not None]
    if not pairs:
        return Difference(None, 0)
    table = np.array(pairs, dtype=np.float64)
    differences = table[:, 0] - table[:, 1]
    mean = float(differences.mean())
    if len(differences) < 2:
        return Difference(mean, len(differences))
    rounding = ALIKE * float(np.abs(table).max())
    alike = bool(np.ptp(differences) <= rounding)
    interval: Range | None
    if resolution is not None:
        sd = max(statistics.stdev(differences.tolist()), resolution / 6**0.5)
        interval = t_interval(mean, sd, len(differences), together=together)
    elif len(differences) < MIN_SEEDS:
        interval = None
    else:
        interval = (mean, mean) if alike else bootstrap_interval(differences)
    return Difference(mean, len(differences), interval, None if alike else _p(differences, test, rounding))


def cut(interval: Range | None, to: Range) -> Range | None:
    """Limit an interval to the possible values, because a t interval over few seeds may be wider.

    >>> cut((-186.7, 3.5), (-100.0, 100.0)), cut(None, (-100.0, 100.0))
    ((-100.0, 3.5), None)
    """
    return None if interval is None else (max(interval[0], to[0]), min(interval[1], to[1]))


def bootstrap_interval(values: Floats) -> Range:
    """Compute the 95 % percentile bootstrap interval of a mean, with a fixed seed.

    It is too narrow for few values. It contained the true mean of normal numbers in 51 % of 2,000 trials with 2
    values, 75 % with 3, 85 % with 5 and 91 % with 10. BCa intervals are not better (51, 72, 84 and 90 %). See
    ``benchmarks/bootstrap_coverage.py``.

    Args:
        values: At least two numbers, (n,).
    """
    from scipy.stats import bootstrap

    options = {"confidence_level": LEVEL, "n_resamples": RESAMPLES, "method": "percentile"}
    low, high = bootstrap((values,), np.mean, **options, rng=np.random.default_rng(0)).confidence_interval
    return float(low), float(high)


def _p(differences: Floats, test: Test, rounding: float) -> float | None:
    from scipy import stats

    if test == "t":
        return float(stats.ttest_1samp(differences, 0.0).pvalue)
    steps = np.round(differences / rounding)  # equal differences share a rank, whatever their rounding errors
    if np.count_nonzero(steps) < FEWEST[test]:  # Wilcoxon's test ignores pairs of equal numbers
        return None
    return float(stats.wilcoxon(steps).pvalue)


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Correct p-values by Holm's step-down procedure, which limits the chance of any false positive among all tests.

    The k-th smallest of m p-values is multiplied by m - k + 1, and is at least as large as the previous one (Holm, A
    simple sequentially rejective multiple test procedure, Scand. J. Statist. 6, 1979).

    Args:
        ps: The p-values of all tests of a family. None stands for a comparison without a test, which does not count.

    >>> holm([0.01, None, 0.04, 0.03])
    [0.03, None, 0.06, 0.06]
    """
    tested = sorted((p, index) for index, p in enumerate(ps) if p is not None)
    corrected: list[float | None] = [None] * len(ps)
    largest = 0.0
    for rank, (p, index) in enumerate(tested):
        largest = max(largest, min(1.0, p * (len(tested) - rank)))
        corrected[index] = largest
    return corrected
