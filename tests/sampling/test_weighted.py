"""Sampling by size and with replacement."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedstrata as fs
from fedstrata.aggregation.base import MeanBySize, StratumMean
from fedstrata.base.errors import SpecError
from fedstrata.sampling.base import Uniform
from fedstrata.sampling.weighted import Weighted, certainties, with_replacement, without_replacement


def test_draws_with_replacement_count_once_each():
    """The mean by size does not count size twice."""
    selection = with_replacement(np.array([3, 5, 9]), np.array([1, 1000, 1]), 7, np.random.default_rng(0))
    assert selection.draws.sum() == 7
    a = MeanBySize().coefficients(selection, np.arange(len(selection.clients)), np.array([1000]))
    np.testing.assert_allclose(a, selection.draws / 7)


def test_certain_clients_keep_their_share():
    """70 of 100 samples: always drawn, weight 0.7; one of the other three stands for 0.3."""
    sizes = np.array([10, 70, 15, 5])
    generator = np.random.default_rng(0)
    for _ in range(20):
        selection = without_replacement(np.arange(4), sizes, 2, generator)
        a = dict(
            zip(selection.clients.tolist(), MeanBySize().coefficients(selection, np.arange(2), sizes), strict=True)
        )
        assert a.pop(1) == pytest.approx(0.7)
        assert list(a.values()) == pytest.approx([0.3])


def test_who_is_missing_is_made_up_for_within_its_stratum():
    selection = without_replacement(np.arange(5), np.array([10, 70, 10, 5, 5]), 3, np.random.default_rng(0))
    returned = np.array([0, 1])
    a = StratumMean().coefficients(selection, returned, np.ones(2))
    assert a.sum() == pytest.approx(1)
    assert a[selection.clients[returned] == 1] == pytest.approx(0.7)


def test_where_fewer_are_there_than_are_wanted_all_are_drawn():
    selection = without_replacement(np.array([2, 5, 7]), np.array([10, 70, 20]), 5, np.random.default_rng(0))
    assert selection.clients.tolist() == [2, 5, 7]
    assert selection.draws.tolist() == [1, 1, 1]
    a = MeanBySize().coefficients(selection, np.arange(3), np.array([10, 70, 20]))
    assert a == pytest.approx([0.1, 0.7, 0.2])


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=25), st.integers(1, 25), st.integers(0, 9999))
def test_m_different_clients_with_the_right_probabilities(sizes, m, seed):
    sizes = np.array(sizes)
    m = min(m, len(sizes))
    selection = without_replacement(np.arange(len(sizes)), sizes, m, np.random.default_rng(seed))
    assert len(set(selection.clients.tolist())) == m
    certain = certainties(sizes, m)
    assert set(np.flatnonzero(certain)) <= set(selection.clients.tolist())
    left = m - certain.sum()
    # The others' probabilities, in proportion to size, are below one and add up to the places that are left.
    if left:
        inclusion = left * sizes[~certain] / sizes[~certain].sum()
        assert (inclusion < 1).all()
    else:
        assert certain.sum() == m


@pytest.mark.slow
def test_inclusion_probabilities_by_simulation():
    sizes, generator = np.array([1, 2, 3, 4, 10]), np.random.default_rng(0)
    count = np.zeros(5)
    for _ in range(4000):
        count[without_replacement(np.arange(5), sizes, 2, generator).clients] += 1
    np.testing.assert_allclose(count / 4000, [0.1, 0.2, 0.3, 0.4, 1.0], atol=0.03)


@pytest.mark.parametrize("by", ["size", "uniform"])
@pytest.mark.parametrize("replacement", [True, False])
def test_in_a_federation(tiny, by, replacement):
    federation = tiny(5, sizes=[8, 0, 16, 8, 40], clients_per_round=3)
    sampler = (Weighted if by == "size" else Uniform)(replacement=replacement)
    state = sampler.init(federation)
    drawn = []
    for round in range(1, 30):
        federation.begin(round)
        selection, state = sampler.select(federation, state, federation.weights)
        assert selection.draws.sum() == 3
        assert (selection.stratum_samples is not None) == (by == "size")
        drawn += selection.clients.tolist()
        if not replacement:
            assert (selection.draws == 1).all()
    assert (1 in drawn) == (by == "uniform")  # who holds nothing is never drawn by size


def test_more_clients_than_there_are_is_an_error():
    spec = fs.Experiment(
        method={"name": "fedavg", "client_sampler": "weighted"},
        partition=fs.IID(clients=4),
        training=fs.Training(clients_per_round=5),
    )
    with pytest.raises(SpecError, match=r"the partition has 4 clients. Use at most") as caught:
        fs.prepare(spec)
    assert caught.value.key == "training.clients_per_round"
