"""Intervals of rates, and lower bounds of ε: computed by hand, and right as often as they say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from fedstrata.audits.intervals import SHARES, Rate, best_bound, epsilon_bound, p_value


@pytest.mark.parametrize("trials", [1, 3, 40])
def test_rates_at_the_ends_by_hand(trials: int) -> None:
    """With all trials right, P(all right) = low ** n is half the error."""
    every, none = Rate.of(trials, trials), Rate.of(0, trials)
    assert (every.low, every.high) == (pytest.approx(0.025 ** (1 / trials)), 1.0)
    assert (none.low, none.high) == (0.0, pytest.approx(1 - 0.025 ** (1 / trials)))
    assert (every.rate, none.rate) == (1.0, 0.0)


def test_without_trials_nothing_is_known() -> None:
    assert Rate.of(0, 0) == Rate(0, 0, None, 0.0, 1.0)


@pytest.mark.slow
@given(st.integers(0, 60), st.integers(1, 60), st.sampled_from([0.8, 0.95, 0.99]))
def test_intervals_are_those_of_scipy(right: int, trials: int, confidence: float) -> None:
    right = min(right, trials)
    interval = binomtest(right, trials).proportion_ci(confidence, "exact")
    made = Rate.of(right, trials, confidence)
    assert (made.low, made.high) == (pytest.approx(interval.low), pytest.approx(interval.high))


def test_p_values_by_hand() -> None:
    """ε = ln 3: a guess is right with probability 3/4."""
    epsilon, delta = math.log(3), 0.01
    assert p_value(1, 1, 1, epsilon, delta) == pytest.approx(3 / 4 + 2 * delta * (1 / 4))
    # Two guesses: P(both) = 9/16, P(one) = 6/16, P(none) = 1/16; the slope is max(6/16, 7/16 / 2).
    assert p_value(5, 2, 2, epsilon, delta) == pytest.approx(9 / 16 + 2 * 5 * delta * 6 / 16)
    # One of two is right: P(at least one) = 15/16, the slope is P(none) = 1/16.
    assert p_value(5, 2, 1, epsilon, delta) == pytest.approx(15 / 16 + 2 * 5 * delta / 16)
    assert p_value(5, 2, 0, epsilon, delta) == 1.0
    assert p_value(1000, 2, 2, epsilon, 0.5) == 1.0


@pytest.mark.parametrize("guesses", [1, 10, 500])
def test_the_bound_of_only_right_guesses_by_hand(guesses: int) -> None:
    """With δ = 0, the bound solves (e^ε / (1 + e^ε)) ** r = 0.05."""
    rate = 0.05 ** (1 / guesses)
    expected = max(0.0, math.log(rate / (1 - rate)))
    assert epsilon_bound(guesses, guesses, guesses, 0.0, 0.95) == pytest.approx(expected, abs=1e-9)


@pytest.mark.slow
def test_bounds_grow_with_right_guesses_and_shrink_with_delta_and_confidence() -> None:
    bounds = [epsilon_bound(200, 100, right, 1e-5, 0.95) for right in range(101)]
    assert bounds == sorted(bounds)
    assert bounds[50] == 0.0 < bounds[70] < bounds[100]
    assert epsilon_bound(200, 100, 90, 1e-3, 0.95) < epsilon_bound(200, 100, 90, 1e-5, 0.95) < bounds[95]
    assert epsilon_bound(200, 100, 90, 1e-5, 0.99) < epsilon_bound(200, 100, 90, 1e-5, 0.95)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.0, 0.7, 2.0])
def test_the_bound_is_too_large_in_at_most_five_percent_of_randomised_responses(epsilon: float) -> None:
    """Randomised response with ε: guesses are right with probability e^ε / (1 + e^ε), so that the bound is tight."""
    guesses, draws = 60, 4000
    right = np.random.default_rng(0).binomial(guesses, 1 / (1 + math.exp(-epsilon)), draws)
    bounds = np.array([epsilon_bound(guesses, guesses, each, 0.0, 0.95) for each in range(guesses + 1)])[right]
    wrong = float((bounds > epsilon).mean())
    assert wrong <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / draws)
    assert bounds.mean() > epsilon / 3
    assert wrong > 0.005


@pytest.mark.slow
def test_guesses_by_hand() -> None:
    """Canaries in the data have low sums: with all four guesses one is wrong, with the two surest guesses none."""
    scores, present = np.array([-3.0, -1.0, 1.0, 3.0]), np.array([True, False, False, False])
    level = 1 - 0.05 / len(SHARES)
    guesses, right, bound = best_bound(scores, present, 0.0, 0.95)
    assert (guesses, right) in {(4, 3), (2, 2)}
    assert bound == max(epsilon_bound(4, 4, 3, 0.0, level), epsilon_bound(4, 2, 2, 0.0, level))
    many, inside = np.linspace(-1, 1, 1000), np.arange(1000) < 500
    assert best_bound(many, inside, 0.0, 0.95)[:2] == (1000, 1000)
    assert best_bound(-many, inside, 0.0, 0.95)[2] == 0.0


@pytest.mark.slow
def test_the_best_bound_is_too_large_in_at_most_five_percent_of_laplace_mechanisms() -> None:
    """Laplace noise of scale 1/ε on the presence of each canary is ε-differentially private."""
    generator, epsilon, wrong, total = np.random.default_rng(1), 1.5, 0, 40
    for _ in range(total):
        present = generator.random(100) < 0.5
        scores = generator.laplace(scale=1 / epsilon, size=100) - present
        wrong += best_bound(scores, present, 0.0, 0.95)[2] > epsilon
    assert wrong <= 0.05 * total + 4 * math.sqrt(0.05 * 0.95 * total)
