from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.data.partitions.assign import (
    deal_by_mix,
    deal_to_holders,
    hold_classes,
    log_dirichlet,
    taken_from_largest,
    top_up,
)


@pytest.mark.parametrize("alpha", [1e-9, 1e-3, 1.0, 1e9])
def test_log_dirichlet_is_finite_and_sums_to_one(alpha):
    draws = log_dirichlet(np.full((200, 5), alpha), np.random.default_rng(0))
    assert np.isfinite(draws).all()
    np.testing.assert_allclose(np.exp(draws).sum(axis=1), 1)


def test_log_dirichlet_is_the_distribution_that_numpy_draws():
    alpha = np.array([0.4, 1.5, 3.0])
    ours = np.exp(log_dirichlet(np.broadcast_to(alpha, (20_000, 3)), np.random.default_rng(1)))
    theirs = np.random.default_rng(2).dirichlet(alpha, 20_000)
    quantiles = np.linspace(0.05, 0.95, 7)
    np.testing.assert_allclose(np.quantile(ours, quantiles, axis=0), np.quantile(theirs, quantiles, axis=0), atol=0.02)


@pytest.mark.slow
@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.data())
def test_taking_from_the_largest_is_what_taking_one_by_one_is(sizes, data):
    amount = data.draw(st.integers(0, sum(sizes)))
    left = list(sizes)
    for _ in range(amount):
        left[left.index(max(left))] -= 1
    given = taken_from_largest(np.array(sizes), amount)
    assert given.sum() == amount
    assert sorted(np.array(sizes) - given) == sorted(left)


def test_mixes_are_renormalised_when_a_class_runs_out():
    """Everyone wants class 0 first and class 2 never: 0 is shared by chance, then 1, and 2 fills the rest."""
    codes = np.array([0] * 10 + [1] * 10 + [2] * 10)
    mix = np.tile(np.array([0.0, -50.0, -2000.0]), (3, 1))
    owner = deal_by_mix(codes, np.array([10, 10, 10]), mix, np.random.default_rng(0))
    assert np.bincount(owner).tolist() == [10, 10, 10]
    lone = deal_by_mix(codes, np.array([5, 25]), np.array([[0.0, -99, -99], [-99, 0.0, 0.0]]), np.random.default_rng(0))
    assert (lone[:10] == 0).sum() == 5
    assert (lone[10:] == 1).all()


@pytest.mark.slow
@given(st.lists(st.integers(1, 6), min_size=1, max_size=15), st.integers(0, 99))
def test_holders_are_balanced_and_distinct(each, seed):
    owner, held = hold_classes(np.array(each), 6, np.random.default_rng(seed))
    assert np.bincount(owner).tolist() == each
    assert len(set(zip(owner.tolist(), held.tolist(), strict=True))) == sum(each)
    holders = np.bincount(held, minlength=6)
    assert holders.max() - holders.min() <= 1


@pytest.mark.slow
def test_what_an_even_split_leaves_is_drawn_among_the_holders():
    """Of ten samples each of three holders gets three, and each gets the tenth in about a third of the draws."""
    zeros = np.zeros(10, dtype=np.int64)
    owners, classes = np.array([4, 5, 6]), np.zeros(3, dtype=np.int64)
    sizes = np.array(
        [
            np.bincount(deal_to_holders(zeros, owners, classes, np.random.default_rng(seed)), minlength=7)[4:]
            for seed in range(300)
        ]
    )
    assert (np.sort(sizes, axis=1) == [3, 3, 4]).all()
    assert (sizes == 4).mean(axis=0) == pytest.approx([1 / 3] * 3, abs=0.1)


def test_what_is_given_to_small_clients_comes_from_all_that_give():
    """Two clients of ten samples give three each. On average, half of what a small client gets is from each."""
    before = np.repeat([0, 1], 10)
    from_first = []
    for seed in range(200):
        after = top_up(before, 4, 3, np.random.default_rng(seed))
        assert np.bincount(after).tolist() == [7, 7, 3, 3]
        from_first.append([(before[after == client] == 0).sum() for client in (2, 3)])
    assert np.mean(from_first, axis=0) == pytest.approx([1.5, 1.5], abs=0.2)
