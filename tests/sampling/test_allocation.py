"""Neyman allocation: laws that hold for all inputs, and cases by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.sampling.allocation import FLOOR, allocate, allocated, quotas, spread, systematic

STRATA = st.lists(st.tuples(st.integers(0, 40), st.floats(0, 1e3)), min_size=1, max_size=8).filter(
    lambda strata: any(size for size, _ in strata)
)


def unzip(strata: list[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    sizes, values = zip(*strata, strict=True)
    return np.array(sizes, dtype=np.int64), np.array(values, dtype=np.float64)


@pytest.mark.slow
@given(STRATA, st.floats(0, 1))
def test_allocations_add_up_and_stay_within_the_strata(strata, share):
    sizes, weights = unzip(strata)
    budget = round(share * int(sizes.sum()))
    for found in (allocate(budget, sizes, weights), allocated("neyman-at-least-one", budget, sizes, weights)[0]):
        assert found.sum() == budget
        assert (found >= 0).all()
        assert (found <= sizes).all()


@pytest.mark.slow
@given(STRATA, st.floats(0, 1))
def test_every_stratum_that_is_not_empty_gets_one_while_the_budget_allows_it(strata, share):
    sizes, deviations = unzip(strata)
    filled = sizes > 0
    budget = int(filled.sum()) + round(share * int((sizes - filled).sum()))
    assert (allocated("neyman-at-least-one", budget, sizes, deviations)[0][filled] >= 1).all()


@pytest.mark.slow
@given(STRATA, st.floats(0, 1))
def test_fewer_clients_than_strata_go_to_the_largest_weights(strata, share):
    sizes, weights = unzip(strata)
    filled = np.flatnonzero(sizes > 0)
    budget = int(share * len(filled))
    found = allocate(budget, sizes, weights)
    assert found.max() <= 1
    chosen, left_out = weights[found > 0], weights[filled[found[filled] == 0]]
    assert not len(chosen) or not len(left_out) or chosen.min() >= left_out.max()


@pytest.mark.slow
@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.floats(0, 1))
def test_without_deviations_allocation_is_proportional_to_size(counts, share):
    sizes = np.array(counts)
    budget = len(sizes) + round(share * int(sizes.sum() - len(sizes)))
    counts, _ = allocated("neyman-at-least-one", budget, sizes, np.zeros(len(sizes)))
    assert counts.tolist() == allocate(budget, sizes, sizes * 1.0).tolist()


def largest_remainder(budget: int, weights: list[int]) -> list[int]:
    """In whole numbers, with no bounds."""
    total = sum(weights)
    whole = [budget * w // total for w in weights]
    by_remainder = sorted(range(len(weights)), key=lambda h: (-(budget * weights[h] % total), h))
    for h in by_remainder[: budget - sum(whole)]:
        whole[h] += 1
    return whole


@pytest.mark.slow
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 200))
def test_it_is_the_largest_remainder_where_no_bound_is_met(weights, budget):
    expected = largest_remainder(budget, weights)
    remainders = [budget * w % sum(weights) for w in weights]
    ties = len(set(remainders)) < len(remainders)
    if min(budget * w // sum(weights) for w in weights) < 1 or ties:
        return  # the floor of one takes part, or the order of equal remainders decides
    sizes = np.full(len(weights), 1000)
    assert allocate(budget, sizes, np.array(weights, dtype=float)).tolist() == expected


@pytest.mark.parametrize(
    ("budget", "sizes", "deviations", "expected"),
    [
        (10, [50, 30, 20], [1.0, 1.0, 1.0], [5, 3, 2]),  # alike: proportional
        (8, [10, 10, 10], [2.0, 1.0, 1.0], [4, 2, 2]),  # m N_h S_h / Σ N_h S_h
        (7, [10, 20], [3.0, 2.0], [3, 4]),  # 7·30/70 and 7·40/70
        (6, [2, 10, 10], [9.0, 1.0, 1.0], [2, 2, 2]),  # the first is full, the rest is shared
        (5, [10, 10], [1.0, 0.0], [4, 1]),  # a stratum without spread is not left out
        (12, [10, 4], [1.0, 0.0], [10, 2]),  # and takes what the other cannot
        (3, [5, 0, 5], [1.0, 7.0, 1.0], [2, 0, 1]),  # an empty one gets nothing
        (2, [5, 5, 5], [1.0, 3.0, 2.0], [0, 1, 1]),  # m < H: the largest N_h S_h
        (0, [3, 3], [1.0, 1.0], [0, 0]),
    ],
)
def test_by_hand(budget, sizes, deviations, expected):
    assert allocated("neyman-at-least-one", budget, np.array(sizes), np.array(deviations))[0].tolist() == expected


def test_more_than_there_are_is_refused():
    with pytest.raises(ValueError, match="6 clients cannot be drawn from 5 clients"):
        allocated("neyman", 6, np.array([2, 3]), np.ones(2))


def test_spread_is_the_root_of_the_mean_coordinate_variance():
    points = np.array([[0, 0], [2, 4], [5, 5], [1, 9]], dtype=np.float32)
    # Stratum 0: variances 1 and 4. Stratum 1: one point. Stratum 2: nobody. Stratum 3: one point.
    found = spread(points, np.array([0, 0, 1, 3]), 4)
    np.testing.assert_allclose(found, [np.sqrt(2.5), 0, 0, 0])


@pytest.mark.parametrize(
    ("budget", "sizes", "deviations", "expected"),
    [
        (4, [10, 10, 10], [9.0, 1.0, 0.5], [4, 0, 0]),  # 3.4, 0.4, 0.2: the largest remainder is the first's
        (10, [20, 20, 20], [2.0, 1.0, 0.0], [7, 3, 0]),  # 6.7, 3.3, 0
        (6, [2, 10, 10], [9.0, 1.0, 1.0], [2, 2, 2]),  # full
        (3, [4, 0, 4], [1.0, 7.0, 1.0], [2, 0, 1]),
    ],
)
def test_as_published_strata_may_get_none(budget, sizes, deviations, expected):
    assert allocated("neyman", budget, np.array(sizes), np.array(deviations))[0].tolist() == expected


def test_as_many_draws_as_strata_leave_the_floor_of_one_nothing_to_allocate():
    """Ten strata and ten draws: with one for each, deviations do not matter."""
    sizes, deviations = np.full(10, 10), np.array([0.1, 0.1, 3, 1, 1, 1, 1, 1, 1, 1])
    assert allocated("neyman-at-least-one", 10, sizes, deviations)[0].tolist() == [1] * 10
    assert allocated("neyman", 10, sizes, deviations)[0].tolist() == [0, 0, 3, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.slow
@given(STRATA, st.floats(0, 1), st.integers(0, 99))
def test_random_rounding_keeps_the_sum_and_stays_within_the_strata(strata, share, seed):
    sizes, deviations = unzip(strata)
    budget = round(share * int(sizes.sum()))
    found, chance = allocated("neyman-random", budget, sizes, deviations, np.random.default_rng(seed))
    assert found.sum() == budget
    assert ((found >= 0) & (found <= sizes)).all()
    assert (chance[found > 0] > 0).all()
    filled = sizes > 0
    floor = min(1.0, FLOOR * budget / filled.sum())
    assert (chance[filled] >= floor - 1e-9).all()


@pytest.mark.slow
def test_random_rounding_gives_the_quotas_on_average():
    """4,000 draws: each mean within 4 standard errors, each number one of the two whole ones beside its quota."""
    sizes, weights = np.array([30, 20, 9, 4, 1]), np.array([5.0, 3.0, 2.0, 0.3, 0.0])
    exact = quotas(7, sizes, weights, np.full(5, 0.5))
    assert exact.sum() == pytest.approx(7)
    g = np.random.default_rng(0)
    found = np.stack([systematic(exact, g) for _ in range(4000)])
    assert (found.sum(axis=1) == 7).all()
    assert ((found == np.floor(exact)) | (found == np.ceil(exact))).all()
    error = found.std(axis=0) / np.sqrt(4000)
    assert (np.abs(found.mean(axis=0) - exact) <= 4 * error + 1e-12).all()


@pytest.mark.parametrize("rule", ["neyman", "neyman-at-least-one", "proportional"])
def test_other_rules_are_certain(rule):
    sizes, deviations = np.array([30, 9, 3]), np.array([0.0, 5.0, 1.0])
    found, chance = allocated(rule, 5, sizes, deviations, np.random.default_rng(0))
    by_hand = {"neyman": [0, 5, 0], "neyman-at-least-one": [1, 3, 1], "proportional": [3, 1, 1]}
    assert found.tolist() == by_hand[rule]
    assert chance.tolist() == (found > 0).astype(float).tolist()


@pytest.mark.slow
def test_the_floor_of_random_allocation_and_the_chance_of_a_draw_by_hand():
    # A budget of 2 for three strata has a floor of a third of a draw; the first stratum has all the spread.
    sizes, spreads = np.array([10, 10, 10]), np.array([1.0, 0.0, 0.0])
    drawn = [allocated("neyman-random", 2, sizes, spreads, np.random.default_rng(seed)) for seed in range(200)]
    counts, chance = np.array([count for count, _ in drawn]), drawn[0][1]
    assert chance == pytest.approx([1, 1 / 3, 1 / 3])
    assert counts.mean(axis=0) == pytest.approx([4 / 3, 1 / 3, 1 / 3], abs=0.1)
    assert (counts > 0).mean(axis=0) == pytest.approx(chance, abs=0.1)
    # However large the budget is, the floor is one draw: 8 and 1, not 6.75 and 2.25.
    counts, chance = allocated("neyman-random", 9, sizes[:2], spreads[:2], np.random.default_rng(0))
    assert counts.tolist() == [8, 1]
    assert chance.tolist() == [1, 1]
