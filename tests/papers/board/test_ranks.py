"""Average ranks, and the tests of Friedman and Nemenyi."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.papers.board.ranks import critical_difference, ranking

BLOCKS = {"a": [0.9, 0.8, 0.7, 0.6], "b": [0.8, 0.7, 0.9, 0.1], "c": [0.1, 0.2, 0.3, 0.4]}
"""Ranks by hand: a has 1, 1, 2, 1; b has 2, 2, 1, 3; c has 3, 3, 3, 2."""

PUBLISHED = {2: 1.960, 3: 2.343, 4: 2.569, 5: 2.728, 6: 2.850, 7: 2.949, 8: 3.031, 9: 3.102, 10: 3.164}
"""The quantiles q at 5 % for k methods: Demšar 2006, JMLR 7, Table 5 (a)."""


def test_three_methods_in_four_blocks_by_hand():
    result = ranking(BLOCKS)
    assert dict(result.ranks) == {"a": 1.25, "b": 2.0, "c": 2.75}
    assert list(result.ranks) == ["a", "b", "c"], "the best method comes first"
    assert result.blocks == 4
    # Friedman's statistic is 12 · 4 / (3 · 4) · (1.25² + 2² + 2.75² − 3 · 4² / 4) = 4.5, with 2 degrees of freedom.
    assert result.p == pytest.approx(math.exp(-4.5 / 2))
    assert result.critical == pytest.approx(2.343 * math.sqrt(3 * 4 / (6 * 4)), abs=1e-3)


@pytest.mark.parametrize(("methods", "quantile"), PUBLISHED.items())
def test_the_critical_difference_uses_the_published_quantiles(methods, quantile):
    blocks = methods * (methods + 1) // 2  # √(k (k + 1) / (6 N)) is then √(1 / 3)
    assert critical_difference(methods, blocks) == pytest.approx(quantile / math.sqrt(3), abs=1e-3)


def test_the_published_example_of_a_critical_difference():
    assert critical_difference(4, 14) == pytest.approx(1.25, abs=5e-3)  # Demšar 2006, section 3.2.2


def test_equal_values_share_a_rank_and_a_missing_value_is_last():
    result = ranking({"a": [1.0, None], "b": [1.0, 0.0], "c": [0.0, -5.0]})
    assert dict(result.ranks) == {"b": 1.25, "a": 2.25, "c": 2.5}


def test_too_little_to_rank():
    assert ranking({"a": [1.0, 2.0], "b": [2.0, 1.0]}) is None
    assert ranking({"a": [1.0], "b": [2.0], "c": [3.0]}) is None
    assert ranking({"a": [1.0, 1.0], "b": [1.0, 1.0], "c": [1.0, 1.0]}).p is None


values = st.lists(st.lists(st.integers(0, 100), min_size=4, max_size=4), min_size=3, max_size=6)


@pytest.mark.slow
@given(values, st.sampled_from([math.exp, lambda x: x**3 - 7.0, lambda x: 2.0 * x]))
def test_monotone_maps_do_not_change_the_ranking(table, monotone):
    before = ranking({str(i): [value / 50 for value in row] for i, row in enumerate(table)})
    after = ranking({str(i): [monotone(value / 50) for value in row] for i, row in enumerate(table)})
    assert after == before
