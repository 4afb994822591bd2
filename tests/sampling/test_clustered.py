"""Clustered sampling: m distributions whose masses add up exactly, however they are arranged."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.base import records
from fedstrata.base.errors import SpecError
from fedstrata.sampling import clustered
from fedstrata.sampling.clustered import Clustered, by_group, by_size, group


def probabilities(distributions, clients: int) -> np.ndarray:
    """Return the probability of each client in each distribution, shape (m, N)."""
    result = np.zeros((distributions.draws, clients))
    which = (np.cumsum(distributions.masses) - 1) // distributions.each
    np.add.at(result, (which, distributions.places), distributions.masses / distributions.each)
    return result


def exactly_unbiased(made, sizes: np.ndarray, m: int) -> None:
    """Whole numbers: Σ_i r_i(k) Σn = m n_k, and every distribution is full."""
    got = np.zeros(len(sizes), dtype=np.int64)
    np.add.at(got, made.places, made.masses)
    assert got.tolist() == (m * sizes).tolist()
    assert (made.masses > 0).all()
    ends = np.cumsum(made.masses)
    assert set((np.arange(1, m + 1) * sizes.sum()).tolist()) <= set(ends.tolist())
    np.testing.assert_allclose(probabilities(made, len(sizes)).sum(axis=1), 1)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 12), st.integers(0, 2**16))
def test_the_expected_weight_is_the_share_of_the_data_exactly(sizes, m, seed):
    sizes = np.array(sizes)
    updates = np.random.default_rng(seed).normal(size=(len(sizes), 3)).astype(np.float32)
    updates[::4] = 0
    exactly_unbiased(by_size(sizes, m), sizes, m)
    groups = group(updates, sizes, m)
    exactly_unbiased(by_group(groups, sizes, m), sizes, m)


def test_algorithm_1_by_hand():
    """Sizes 6, 3, 2, 1 in two draws of mass 12: client 0 fills the first, and so on."""
    matrix = probabilities(by_size(np.array([3, 1, 6, 2]), 2), 4)
    np.testing.assert_allclose(matrix, [[0, 0, 1, 0], [6 / 12, 2 / 12, 0, 4 / 12]])


def test_algorithm_2_by_hand():
    """Groups {0, 1}, {2, 3}, {4} of equal clients, m = 2: the two heavy groups get a draw each, 4 fills both up."""
    sizes = np.full(5, 2)
    matrix = probabilities(by_group(np.array([0, 0, 1, 1, 2]), sizes, 2), 5)
    np.testing.assert_allclose(matrix, [[0.4, 0.4, 0, 0, 0.2], [0, 0, 0.4, 0.4, 0.2]])


def test_a_client_with_most_of_the_data_is_drawn_for_certain():
    sizes = np.array([70, 10, 10, 10])
    made = by_group(group(np.eye(4, dtype=np.float32), sizes, 4), sizes, 4)
    exactly_unbiased(made, sizes, 4)
    matrix = probabilities(made, 4)
    assert matrix[:2, 0].tolist() == [1, 1]  # 4 · 70 / 100 = 2.8
    assert matrix[:, 0].sum() == pytest.approx(2.8)


def test_similar_updates_share_a_distribution():
    """Four directions of three clients, m = 4: each draw is of one direction, whatever the updates' lengths."""
    g = np.random.default_rng(0)
    direction = g.permutation(np.repeat(np.arange(4), 3))
    lengths = np.exp(3 * g.normal(size=(12, 1)))
    updates = ((10 * np.eye(4)[direction] + 0.1 * g.normal(size=(12, 4))) * lengths).astype(np.float32)
    sizes = np.full(12, 5)
    matrix = probabilities(by_group(group(updates, sizes, 4), sizes, 4), 12)
    assert sorted(tuple(sorted(set(direction[row > 0]))) for row in matrix) == [(0,), (1,), (2,), (3,)]


def test_groups_are_as_large_as_their_mass_allows():
    """All alike: groups of N/m, and not N groups of one."""
    groups = group(np.ones((12, 3), dtype=np.float32), np.full(12, 4), 3)
    assert max(np.bincount(groups)) == 4


@pytest.mark.slow
def test_draws_come_from_their_distributions():
    made = by_size(np.array([5, 4, 3, 2, 1]), 3)
    matrix, generator = probabilities(made, 5), np.random.default_rng(0)
    drawn = np.array([made.draw(generator) for _ in range(6000)])
    for i in range(3):
        np.testing.assert_allclose(np.bincount(drawn[:, i], minlength=5) / 6000, matrix[i], atol=0.03)


@pytest.mark.parametrize("algorithm", [1, 2])
def test_in_a_federation(tiny, algorithm):
    federation = tiny(6, sizes=[8, 16, 24, 8, 8, 0], clients_per_round=3)
    sampler = Clustered(algorithm=algorithm)
    state = sampler.init(federation)
    assert state.sizes.known.tolist() == [0, 1, 2, 3, 4]
    assert state.sizes.samples.tolist() == [8, 16, 24, 8, 8]
    for round in range(1, 4):
        federation.begin(round)
        selection, state = sampler.select(federation, state, federation.weights)
        assert selection.draws.sum() == 3
        state = sampler.observe(state, federation.fit(*selection.clients.tolist()))
        state = records.decode(records.encode(state))
    assert (len(state.sketches.known) > 0) == (algorithm == 2)


def test_two_labels_two_groups_after_a_few_rounds(tiny):
    """Clients are told apart by what they have learned: the metric shows the groups."""
    federation = tiny(4, clients_per_round=2)
    sampler = Clustered()
    state = sampler.init(federation)
    selection, state = sampler.select(federation, state, federation.weights)
    assert sum(selection.metrics["strata_sizes"]) == 4
    replies = federation.fit()
    state = sampler.observe(state, replies)
    sent = state.sketches.sent
    for place, client in enumerate(state.sketches.known.tolist()):
        flat = np.concatenate([w.numpy().ravel() for w in replies[client].weights.params.values()])
        np.testing.assert_allclose(state.sketches.points[place], flat - sent, atol=1e-6)


def test_too_many_clients_for_ward_are_refused_with_advice(tiny, monkeypatch):
    monkeypatch.setattr(clustered, "LARGEST", 3)
    config = tiny(4, clients_per_round=2).config
    with pytest.raises(
        SpecError, match="computes distances between all pairs of clients, and supports at most 3"
    ) as caught:
        Clustered().check(config)
    assert caught.value.key == "method.client_sampler.algorithm"
    Clustered(algorithm=1).check(config)
