"""Compute statistics over a few seeds: means with intervals, and differences paired by seed, with tests.

All intervals are Student's t intervals. A method is ``above`` another method only if there are at least
``MIN_SEEDS`` seeds and the interval of the difference excludes zero. If several differences are judged together, their
intervals hold simultaneously with 95 % confidence. Their p-values are corrected for the number of differences
(Bonferroni). The corrected p-value of the t-test is below 0.05 if and only if the interval excludes zero.

SciPy is imported at its first use.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

import numpy as np

from fedstrata.base.arrays import Floats
from fedstrata.base.errors import SpecError

K = TypeVar("K", bound=Hashable)

Range: TypeAlias = tuple[float, float]
"""The type of an interval: its lower and upper end."""
Test = Literal["t", "wilcoxon"]
Order = Literal["above", "below", "not significant", "too few seeds", "not run"]
Values: TypeAlias = Mapping[K, float | None]
"""The type of a mapping from each key (a seed) to its value; None if the seed does not have a value."""

TESTS: tuple[Test, ...] = ("t", "wilcoxon")
"""The tests of paired differences: Student's t-test, and Wilcoxon's signed-rank test."""
LEVEL = 0.95
"""The confidence level of all intervals."""
FEWEST = {"t": 2, "wilcoxon": 6}
"""The minimum number of pairs for each test. With fewer than 6 pairs, Wilcoxon's p-value cannot be below 0.05."""
MIN_SEEDS = 3
"""Intervals and orders are shown only with at least this number of seeds."""
MOST_SEEDS = 100
"""The maximum number of seeds that ``seeds_needed`` recommends."""
UNBOUNDED: Range = (-math.inf, math.inf)
ALIKE = 1e-12
"""Differences below this fraction of the largest value are considered rounding errors."""


@dataclass(frozen=True)
class Estimate:
    """The mean and the spread of a value over seeds.

    Args:
        mean: The mean of the known values; None if no seed has a value.
        sd: The sample standard deviation of the known values; None for fewer than two values.
        n: The number of seeds with a value.
        interval: The 95 % interval of the mean by Student's t distribution; None for fewer than ``MIN_SEEDS`` values.
    """

    mean: float | None
    sd: float | None
    n: int
    interval: Range | None = None

    @classmethod
    def over(cls, values: Iterable[float | None], bounds: Range = UNBOUNDED) -> Estimate:
        """Estimate the mean, standard deviation and interval of the seeds' values. None stands for a missing value.

        Args:
            values: The value of each seed.
            bounds: The minimum and the maximum possible value. The interval is cut at these values.

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
        together: The number of intervals that must hold simultaneously with 95 % confidence (Bonferroni).
    """
    from scipy.stats import t

    margin = float(t.ppf(1 - (1 - LEVEL) / 2 / together, n - 1)) * sd / n**0.5
    return mean - margin, mean + margin


@dataclass(frozen=True)
class Difference:
    """The mean difference between a method's values and a baseline's values, paired by seed.

    Args:
        mean: The mean over the pairs; None without pairs.
        n: The number of pairs, which is the number of seeds that both methods have.
        interval: The 95 % interval of the mean; see ``paired_difference``. The value is None for fewer than
            ``MIN_SEEDS`` pairs, or if all differences are equal.
        p: The two-sided p-value without correction. The value is None if the test needs more pairs (``FEWEST``), or if
            all differences are equal and therefore cannot be tested.
        corrected: The p-value multiplied by the number of differences that are judged together, but at most 1.
        each: The difference of each pair, in the order of the seeds.
    """

    mean: float | None
    n: int
    interval: Range | None = None
    p: float | None = None
    corrected: float | None = None
    each: tuple[float, ...] = ()

    def order(self, margin: float = 0.0) -> Order:
        """Return on which side of 0 the interval lies after a shift by ``margin``, or why the side is unknown.

        The result is ``above`` if both ends of the shifted interval are positive, and ``below`` if both ends are
        negative.

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
    values: Values[K], baseline: Values[K], test: Test = "t", *, resolution: float = 0.0, together: int = 1
) -> Difference:
    """Compute the mean difference between a method's values and a baseline's values, paired by seed.

    Args:
        values: A mapping from each seed to the method's value. None stands for a missing value.
        baseline: A mapping from each seed to the baseline's value.
        test: ``"t"`` for the paired t-test, or ``"wilcoxon"`` for Wilcoxon's signed-rank test.
        resolution: The unit to which the values are rounded. The standard deviation of the differences is set to at
            least the standard deviation of the rounding errors, so no interval has the length 0.
        together: The number of differences that are judged together; see ``t_interval``.

    Raises:
        SpecError: The test is unknown.

    >>> paired_difference({0: 0.5, 1: 0.75, 2: 0.9}, {1: 0.25, 0: 0.5}).mean
    0.25
    """
    if test not in TESTS:
        raise SpecError("test", f"is not a statistical test. Use one of: {', '.join(TESTS)}.", test)
    pairs = [(a, b) for key in values if (a := values[key]) is not None and (b := baseline.get(key)) is not None]
    if not pairs:
        return Difference(None, 0)
    table = np.array(pairs, dtype=np.float64)
    differences = table[:, 0] - table[:, 1]
    mean, n, each = float(differences.mean()), len(differences), tuple(differences.tolist())
    if n < 2:
        return Difference(mean, n, each=each)
    rounding = ALIKE * float(np.abs(table).max())
    alike = bool(np.ptp(differences) <= rounding)
    sd = max(statistics.stdev(each), resolution / 6**0.5)
    interval = None if n < MIN_SEEDS or (alike and not resolution) else t_interval(mean, sd, n, together=together)
    p = None if alike else _p(differences, test, rounding)
    return Difference(mean, n, interval, p, None if p is None else min(1.0, p * together), each)


def holm(p: Mapping[K, float]) -> dict[K, float]:
    """Return p-values that are corrected for multiple tests by Holm's step-down procedure (1979).

    The i-th smallest of m p-values is multiplied by m − i + 1. Corrected p-values are raised where necessary to keep
    them in ascending order.

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    corrected, largest = dict[K, float](), 0.0
    for place, (key, value) in enumerate(sorted(p.items(), key=lambda each: each[1])):
        largest = max(largest, min(1.0, value * (len(p) - place)))
        corrected[key] = largest
    return corrected


def seeds_needed(difference: Difference, *, together: int = 1) -> int | None:
    """Return the number of seeds with which the interval would exclude zero, if mean and deviation stayed the same.

    Args:
        difference: The difference. The field ``each`` must contain at least two numbers that are not all equal.
        together: The number of differences that are judged together; see ``t_interval``.

    Returns:
        The number of seeds, which is at least ``MIN_SEEDS``; None if more than ``MOST_SEEDS`` seeds would be needed.

    >>> seeds_needed(Difference(1.0, 3, each=(0.0, 1.0, 2.0)))
    7
    """
    mean, sd = statistics.fmean(difference.each), statistics.stdev(difference.each)
    for n in range(MIN_SEEDS, MOST_SEEDS + 1):
        low, high = t_interval(mean, sd, n, together=together)
        if low > 0 or high < 0:
            return n
    return None


def cut(interval: Range | None, to: Range) -> Range | None:
    """Cut an interval at the limits of possible values. A t interval over few seeds may contain impossible values.

    >>> cut((-186.7, 3.5), (-100.0, 100.0)), cut(None, (-100.0, 100.0))
    ((-100.0, 3.5), None)
    """
    return None if interval is None else (max(interval[0], to[0]), min(interval[1], to[1]))


def _p(differences: Floats, test: Test, rounding: float) -> float | None:
    from scipy import stats

    if test == "t":
        return float(stats.ttest_1samp(differences, 0.0).pvalue)
    steps = np.round(differences / rounding)  # Equal differences get the same rank in spite of rounding errors.
    if np.count_nonzero(steps) < FEWEST[test]:  # Wilcoxon's test ignores differences of 0.
        return None
    return float(stats.wilcoxon(steps).pvalue)
