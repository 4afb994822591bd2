"""Intervals and tests: by hand, and as SciPy gives them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedstrata.base.errors import SpecError
from fedstrata.reporting.statistics import Difference, Estimate, bootstrap_interval, holm, paired_difference, t_interval

MINE = dict(enumerate([0.81, 0.84, 0.79, 0.86, 0.83, 0.88]))
THEIRS = dict(enumerate([0.80, 0.81, 0.77, 0.80, 0.82, 0.81]))
A, B = np.array(list(MINE.values())), np.array(list(THEIRS.values()))


def test_a_mean_and_its_interval_by_hand() -> None:
    assert Estimate.over([1.0, None, 3.0]) == Estimate(2.0, math.sqrt(2), 2, None)  # too few for an interval
    found = Estimate.over([1.0, None, 3.0, 2.0])
    assert (found.mean, found.sd, found.n) == (2.0, 1.0, 3)
    # The 97.5 % quantile of t with two degrees of freedom is 0.95 √(2 / (1 - 0.95²)).
    reach = 0.95 * math.sqrt(2 / (1 - 0.95**2)) / math.sqrt(3)
    assert found.interval == pytest.approx((2 - reach, 2 + reach))


def test_the_interval_is_scipys() -> None:
    expected = stats.ttest_1samp(A, 0).confidence_interval(0.95)
    assert Estimate.over(A).interval == pytest.approx((expected.low, expected.high), rel=1e-12)


def test_of_one_value_there_is_no_deviation_and_of_none_no_mean() -> None:
    assert Estimate.over([0.5]) == Estimate(0.5, None, 1, None)
    assert Estimate.over([None]) == Estimate(None, None, 0, None)


def test_the_paired_tests_are_scipys() -> None:
    by_t = paired_difference(MINE, THEIRS)
    assert by_t.mean == pytest.approx((A - B).mean())
    assert by_t.n == 6
    assert by_t.p == pytest.approx(stats.ttest_rel(A, B).pvalue, rel=1e-9)
    by_ranks = paired_difference(MINE, THEIRS, "wilcoxon")
    assert by_ranks.p == stats.wilcoxon(A - B).pvalue == 0.03125  # all six rise: 2 / 2⁶
    assert by_ranks.interval == by_t.interval


def test_the_bootstrap_is_scipys_and_the_same_again() -> None:
    differences = A - B
    expected = stats.bootstrap(
        (differences,), np.mean, n_resamples=9_999, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    assert bootstrap_interval(differences) == bootstrap_interval(differences) == tuple(expected)
    low, high = bootstrap_interval(differences)
    assert differences.min() <= low < differences.mean() < high <= differences.max()


def test_all_resamples_of_two_values_by_hand() -> None:
    # Of (0, 1) a quarter of the resamples has mean 0, and a quarter 1: both are far within 95 %.
    assert bootstrap_interval(np.array([0.0, 1.0])) == (0.0, 1.0)


def test_pairs_are_the_keys_that_both_have() -> None:
    found = paired_difference({3: 0.9, 1: 0.5, 2: None, 7: 0.1}, {1: 0.4, 2: 0.3, 3: 0.6})
    assert found.n == 2
    assert found.mean == pytest.approx(0.2)
    assert paired_difference({0: 1.0}, {1: 1.0}) == Difference(None, 0)
    assert paired_difference({0: 1.0}, {0: 0.5}) == Difference(0.5, 1)


def test_intervals_that_hold_together_are_wider() -> None:
    low, high = t_interval(1.0, 2.0, 4)
    assert (low, high) == pytest.approx(stats.t.interval(0.95, 3, 1.0, 1.0))
    assert t_interval(1.0, 2.0, 4, together=5) == pytest.approx(stats.t.interval(0.99, 3, 1.0, 1.0))


def test_below_six_pairs_wilcoxon_says_nothing() -> None:
    five = {seed: MINE[seed] for seed in range(5)}
    assert stats.wilcoxon(A[:5] - B[:5]).pvalue > 0.05  # however clear the case is
    assert paired_difference(five, THEIRS, "wilcoxon").p is None
    one_alike = MINE | {0: THEIRS[0]}
    assert paired_difference(one_alike, THEIRS, "wilcoxon").p is None
    assert paired_difference(five, THEIRS, "t").p is not None


@pytest.mark.parametrize("shift", [0.0, 0.1])
def test_differences_that_are_alike_have_no_test(shift: float) -> None:
    moved = {seed: value + shift for seed, value in THEIRS.items()}
    found = paired_difference(moved, THEIRS)
    assert (found.n, found.p) == (6, None)
    assert found.interval == (found.mean, found.mean)
    assert found.mean == pytest.approx(shift)


def test_a_test_that_there_is_not() -> None:
    with pytest.raises(SpecError, match=r"test = 'z': is not a test\. Use one of: t, wilcoxon\."):
        paired_difference(MINE, THEIRS, "z")  # type: ignore[arg-type]


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([None, 0.02]) == [None, 0.02]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_lies_between_the_ps_and_bonferroni(ps: list[float]) -> None:
    corrected = holm(ps)
    for p, q in zip(ps, corrected, strict=True):
        assert q is not None
        assert p <= q <= min(1.0, p * len(ps))
    order = np.argsort(ps, kind="stable")
    assert np.all(np.diff(np.array(corrected, dtype=float)[order]) >= 0)
    assert corrected[int(np.argmin(ps))] == min(1.0, min(ps) * len(ps))
