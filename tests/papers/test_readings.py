"""Figures that follow from the rules alone, against what can be worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedstrata.papers.readings import fedssar_bias, neyman_bias, readings, size_estimates, uses_a_sample
from fedstrata.sampling.client_sizes import truth_probability


def test_fedssar_is_unbiased_where_shares_are_whole_and_only_there():
    assert fedssar_bias([50, 30, 20]) == pytest.approx(0)
    # Eight, one and one of ten places where 9, 0.5 and 0.5 are due.
    off = math.sqrt(0.1**2 + 2 * 0.05**2) / math.sqrt(0.9**2 + 2 * 0.05**2)
    assert fedssar_bias([90, 5, 5]) == pytest.approx(off)


def test_strata_without_a_draw_bias_the_mean():
    allocation, bias = neyman_bias([10, 10, 10], [1.0, 1.0, 0.0], 6)
    assert allocation == [3, 3, 0]
    # (1/2, 1/2, 0) for (1/3, 1/3, 1/3).
    assert bias == pytest.approx(math.sqrt(2 / 36 + 1 / 9) / math.sqrt(1 / 3))


def test_estimates_have_the_mean_and_the_deviation_of_the_randomised_response():
    sizes, bound, epsilon = np.array([600] * 10), 100, 3.0
    found = size_estimates(sizes, bound, epsilon)
    alpha = truth_probability(epsilon, bound)
    square = alpha * 99**2 + (1 - alpha) * np.mean(np.arange(1, 100) ** 2)
    variance = 10 * (square - (alpha * 99 + (1 - alpha) * 50) ** 2) / alpha**2
    assert found.mean() == pytest.approx(990, abs=4 * math.sqrt(variance / len(found)))
    assert found.std() == pytest.approx(math.sqrt(variance), rel=0.02)


def test_a_small_holder_is_used_up_while_a_large_one_is_not():
    large, small = uses_a_sample([900, 100], 500)
    assert (large, small) == (0.44, 1.0)  # 400 of 900, 100 of 100
    assert uses_a_sample([900, 100], 1000) == [1.0, 1.0]


def test_every_reading_says_what_the_review_of_the_rules_found():
    found = readings()
    assert found["ldp"].values["ratio"] == pytest.approx(math.exp(3.0))
    assert found["ldp-samples"].values["keep"] == pytest.approx(0.20, abs=0.01)
    assert found["ldp-floor"].values["after"] > found["ldp-floor"].values["before"] + 15
    assert found["fedssar-variance"].values["drawn"] == pytest.approx(1 / 1000 * 0.9, rel=0.01)
    assert [round(value, 1) for value in found["fedssar-bias"].values.values()] == [13.6, 12.7, 20.9]
    assert all(each.figure and each.says for each in found.values())
