"""Intervals and tests: by hand, and as SciPy gives them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedstrata.base.errors import SpecError
from fedstrata.reporting.statistics import (
    Difference,
    Estimate,
    holm,
    paired_difference,
    seeds_needed,
    t_interval,
)

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
    expected = stats.ttest_rel(A, B).confidence_interval(0.95)
    assert by_t.interval == by_ranks.interval == pytest.approx((expected.low, expected.high))
    assert by_t.each == pytest.approx(A - B)


def test_pairs_are_the_keys_that_both_have() -> None:
    found = paired_difference({3: 0.9, 1: 0.5, 2: None, 7: 0.1}, {1: 0.4, 2: 0.3, 3: 0.6})
    assert found.n == 2
    assert found.mean == pytest.approx(0.2)
    assert paired_difference({0: 1.0}, {1: 1.0}) == Difference(None, 0)
    assert paired_difference({0: 1.0}, {0: 0.5}) == Difference(0.5, 1, each=(0.5,))


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
def test_differences_that_are_alike_have_no_test_and_no_interval(shift: float) -> None:
    moved = {seed: value + shift for seed, value in THEIRS.items()}
    found = paired_difference(moved, THEIRS)
    assert (found.n, found.p, found.interval) == (6, None, None)
    assert found.mean == pytest.approx(shift)


def test_a_test_that_there_is_not() -> None:
    with pytest.raises(SpecError, match=r"test = 'z': is not a statistical test\. Use one of: t, wilcoxon\."):
        paired_difference(MINE, THEIRS, "z")  # type: ignore[arg-type]


@pytest.mark.slow
@given(st.lists(st.integers(-1000, 1000).map(lambda n: n / 1000), min_size=3, max_size=8), st.integers(1, 20))
def test_an_interval_excludes_zero_exactly_where_p_is_below_5_percent(differences: list[float], together: int) -> None:
    found = paired_difference(dict(enumerate(differences)), dict.fromkeys(range(8), 0.0), together=together)
    if found.interval is None or found.corrected is None:
        assert np.ptp(differences) <= 1e-9 * max(map(abs, differences))
        return
    assert found.corrected == min(1.0, found.p * together)
    if abs(found.corrected - 0.05) > 1e-9:
        assert (found.corrected < 0.05) == (found.interval[0] > 0 or found.interval[1] < 0)


def test_the_seeds_that_a_difference_needs() -> None:
    three = paired_difference({0: 0.3, 1: 0.5, 2: 0.7}, dict.fromkeys(range(3), 0.4))
    assert three.interval is not None
    assert three.interval[0] < 0 < three.interval[1]
    for together in (1, 5):
        n = seeds_needed(three, together=together)
        assert n is not None
        assert t_interval(0.1, 0.2, n, together=together)[0] > 0 >= t_interval(0.1, 0.2, n - 1, together=together)[0]
    assert seeds_needed(Difference(0.0, 2, each=(-1.0, 1.0))) is None
    assert seeds_needed(paired_difference({0: 0.5, 1: 0.6, 2: 0.7}, {0: 0.1, 1: 0.1, 2: 0.1})) == 3


def test_p_values_are_corrected_step_by_step() -> None:
    # In ascending order: 4 · 0.01, 3 · 0.02, 2 · 0.03 and 1 · 0.04, which is below the value before.
    found = holm({"a": 0.04, "b": 0.01, "c": 0.03, "d": 0.02})
    assert found == pytest.approx({"b": 0.04, "d": 0.06, "c": 0.06, "a": 0.06})
    assert holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}


@pytest.mark.slow
@given(st.dictionaries(st.integers(), st.floats(0, 1)))
def test_holm_lies_between_no_correction_and_bonferroni(p: dict[int, float]) -> None:
    for key, corrected in holm(p).items():
        assert p[key] <= corrected <= min(1.0, len(p) * p[key])
