"""FedSSAR's sampling: clusters by OPTICS, shares, sketches, and who is asked for what."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.cluster import OPTICS

import fedstrata as fs
from fedstrata.aggregation.base import HorvitzThompson
from fedstrata.base import records
from fedstrata.federation.availability import Bernoulli
from fedstrata.federation.messages import FitReply
from fedstrata.sampling import fedssar
from fedstrata.sampling.fedssar import FedSSARSampler, cluster, shares
from fedstrata.sampling.sketches import Sketches, no_sketches, sketch, update_sketches


def groups(*sizes: int, noise: float = 0.05, d: int = 6) -> np.ndarray:
    """Points around as many far-apart centres."""
    g = np.random.default_rng(1)
    return np.concatenate([10 * g.normal(size=d) + noise * g.normal(size=(n, d)) for n in sizes]).astype(np.float32)


def found(points: np.ndarray, limit: int = 2000, **settings) -> tuple[np.ndarray, int]:
    chosen = {"min_samples": 3, "xi": 0.1} | settings
    return cluster(points, chosen["min_samples"], chosen["xi"], limit, np.random.default_rng(0))


def test_far_groups_are_clusters():
    labels, _ = found(groups(12, 7, 5))
    assert [len(set(part)) for part in np.split(labels, [12, 19])] == [1, 1, 1]
    assert sorted(np.bincount(labels)) == [5, 7, 12]


def test_noise_joins_the_cluster_with_the_nearest_mean():
    g = np.random.default_rng(0)
    around = [centre + g.normal(size=(10, 2)) for centre in ([0, 0], [100, 0])]
    points = np.concatenate([*around, [[40.0, 30.0], [70.0, -40.0]]]).astype(np.float32)
    raw = fedssar._optics(points, 4, 0.3)
    assert raw[-2] == -1  # at distance 50 of the first group, 67 of the second
    labels, noise = found(points, min_samples=4, xi=0.3)
    assert noise == (raw < 0).sum()
    assert labels[-2] == labels[0] != labels[10]


@pytest.mark.parametrize("points", [np.ones((9, 4)), np.zeros((1, 3)), np.zeros((2, 3))], ids=["equal", "one", "two"])
def test_where_there_is_no_cluster_all_are_one(points):
    labels, _ = found(points.astype(np.float32))
    assert labels.tolist() == [0] * len(points)


def test_equal_clients_beside_others_are_clusters():
    """Reachability zero: OPTICS divides by it and warns; the tests make a warning an error."""
    points = np.repeat(np.array([[0.0, 0.0], [5.0, 0.0], [0.0, 9.0]], dtype=np.float32), [6, 6, 6], axis=0)
    labels, _ = found(points)
    assert len(set(labels)) == 3
    assert all(len(set(part)) == 1 for part in np.split(labels, 3))


def test_a_shift_of_all_models_changes_nothing():
    """Models differ by far less than they are long."""
    points = groups(9, 8, 7)
    np.testing.assert_array_equal(found(points)[0], found(points + np.float32(1e4))[0])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_the_ordering_is_scikit_learns(seed):
    """Also with many equal distances."""
    g = np.random.default_rng(seed)
    points = g.normal(size=(70, 3)) + 4 * g.integers(0, 4, size=(70, 1))
    points = np.round(points) if seed % 2 else points
    distances = np.linalg.norm(points[:, None] - points, axis=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        theirs = OPTICS(min_samples=2 + seed % 3, xi=0.1, metric="precomputed").fit(distances)
    ordering, reachability, predecessor = fedssar.optics_ordering(distances, 2 + seed % 3)
    np.testing.assert_array_equal(ordering, theirs.ordering_)
    np.testing.assert_array_equal(reachability, theirs.reachability_)
    np.testing.assert_array_equal(predecessor, theirs.predecessor_)


def test_above_the_limit_a_subset_is_clustered_and_the_rest_joins(monkeypatch):
    seen = []
    optics = fedssar._optics
    monkeypatch.setattr(fedssar, "_optics", lambda points, *rest: seen.append(len(points)) or optics(points, *rest))
    points = groups(40, 30, 50)
    labels, _ = found(points, limit=30)
    assert seen == [30]
    assert [len(set(part)) for part in np.split(labels, [40, 70])] == [1, 1, 1]
    assert len(set(labels)) == 3


def test_shares_are_proportional_with_at_least_one_each():
    generator = np.random.default_rng(0)
    sizes = np.array([50, 30, 18, 2])
    assert shares(10, sizes, sizes, generator).tolist() == [4, 3, 2, 1]
    assert shares(10, sizes, np.array([2, 30, 18, 0]), generator).tolist() == [2, 5, 3, 0]


@pytest.mark.slow
def test_with_more_clusters_than_places_shares_are_right_on_average():
    generator, sizes = np.random.default_rng(0), np.array([30, 1, 1, 1, 1, 1, 1, 1, 1, 2])
    drawn = np.array([shares(8, sizes, sizes, generator) for _ in range(3000)])
    assert (drawn.sum(axis=1) == 8).all()
    assert set(drawn[:, 0]) == {6}  # 8 · 30 / 40
    assert (drawn <= sizes).all()
    np.testing.assert_allclose(drawn.mean(axis=0), 8 * sizes / sizes.sum(), atol=4 * 0.5 / np.sqrt(3000))


@pytest.mark.slow
def test_with_more_clusters_than_places_every_client_that_is_there_is_as_likely():
    """One client of a cluster of ten and both of a cluster of two are available: each gets a third of the places."""
    generator = np.random.default_rng(0)
    drawn = np.array([shares(1, np.array([10, 2]), np.array([1, 2]), generator) for _ in range(3000)])
    assert drawn.mean(axis=0) == pytest.approx([1 / 3, 2 / 3], abs=0.04)


def test_everybody_introduces_itself_once(tiny):
    federation = tiny(6, clients_per_round=2)
    sampler = FedSSARSampler()
    state = sampler.init(federation)
    selection, state = sampler.select(federation, state, federation.weights)
    assert state.sketches.known.tolist() == list(range(6))
    assert len(selection.clients) == 2
    assert federation.log.bytes_up < 6 * 4 * (len(state.sketches.points[0]) + 60)
    federation.begin(2)
    sampler.select(federation, state, federation.weights)
    assert federation.log.invited == set()
    assert records.decode(records.encode(state)).sketches.known.tolist() == list(range(6))


def test_introducing_oneself_leaves_no_trace(tiny):
    federation = tiny(3, clients_per_round=2)
    sampler = FedSSARSampler()
    sampler.select(federation, sampler.init(federation), federation.weights)
    assert len(federation.store.clients) == 0


def test_the_sketch_of_a_small_model_is_the_model_after_training(tiny):
    federation = tiny(3, clients_per_round=2)
    sampler = FedSSARSampler()
    _, state = sampler.select(federation, sampler.init(federation), federation.weights)
    trained = federation.fit()
    for place, client in enumerate(state.sketches.known.tolist()):
        flat = torch.cat([tensor.reshape(-1) for tensor in trained[client].weights.params.values()])
        np.testing.assert_array_equal(state.sketches.points[place], flat.numpy())


@pytest.mark.slow
def test_who_was_away_is_asked_in_a_later_round(tiny):
    federation = tiny(12, availability=Bernoulli(p=0.5), clients_per_round=4)
    sampler = FedSSARSampler()
    state = sampler.init(federation)
    known = []
    for round in range(1, 12):
        federation.begin(round)
        selection, state = sampler.select(federation, state, federation.weights)
        assert np.isin(selection.clients, state.sketches.known).all()
        known.append(len(state.sketches.known))
    assert known[0] < 12
    assert known[-1] == 12


def test_participants_have_new_parameters_and_the_others_their_last(tiny):
    federation = tiny(5, clients_per_round=2)
    sampler = FedSSARSampler()
    _, state = sampler.select(federation, sampler.init(federation), federation.weights)
    replies = federation.fit(1, 3)
    doubled = {c: _scaled(reply, 2.0) for c, reply in replies.items()}
    after = sampler.observe(state, doubled)
    before = state.sketches.points
    np.testing.assert_array_equal(after.sketches.points[[0, 2, 4]], before[[0, 2, 4]])
    np.testing.assert_allclose(after.sketches.points[[1, 3]], 2 * before[[1, 3]])


@pytest.mark.parametrize("updates", [False, True])
def test_who_took_no_step_keeps_its_last_sketch(tiny, updates):
    """Such a client returns the model that it received, which says nothing about its data."""
    federation = tiny(3)
    before = no_sketches().with_rows(np.array([1]), np.full((1, 57), 7, dtype=np.float32))
    before = replace(before, sent=sketch(federation.weights.params, 0, 0))
    replies = federation.fit()
    assert {len(sketch(reply.weights.params, 0, 0)) for reply in replies.values()} == {57}
    idle = {1: FitReply(federation.weights, 0, 0, 0, 0.0, {}, trained=False)}
    assert update_sketches(before, idle, 0, 0, updates=updates) is before
    after = update_sketches(before, {**replies, **idle}, 0, 0, updates=updates)
    assert after.known.tolist() == [0, 1, 2]
    assert (after.points[1] == 7).all()
    assert (after.points[[0, 2]] != 7).any(axis=1).all()


def test_updates_are_relative_to_what_was_sent(tiny):
    federation = tiny(4, clients_per_round=2)
    parameters, updates = FedSSARSampler(), FedSSARSampler(features="updates")
    _, state = parameters.select(federation, parameters.init(federation), federation.weights)
    _, other = updates.select(federation, updates.init(federation), federation.weights)
    sent = sketch(federation.weights.params, 2048, 0)
    np.testing.assert_allclose(other.sketches.points, state.sketches.points - sent)
    replies = federation.fit(2)
    np.testing.assert_allclose(updates.observe(other, replies).sketches.points[2], other.sketches.points[2], atol=1e-6)


def _scaled(reply, factor):
    from dataclasses import replace

    params = {name: factor * w for name, w in reply.weights.params.items()}
    return replace(reply, weights=replace(reply.weights, params=params))


def test_a_sketch_keeps_distances_of_long_models():
    """The relative error of a squared distance is √(2/K) on average: 3 % for K = 2,048."""
    g = torch.Generator().manual_seed(0)
    one, two = (torch.randn(60_000, generator=g) for _ in range(2))
    truth = float((one - two).square().sum())
    errors = []
    for seed in range(60):
        a, b = sketch({"w": one}, 2048, seed), sketch({"w": two}, 2048, seed)
        errors.append(float(np.square(a - b).sum()) / truth - 1)
    assert abs(np.mean(errors)) < 4 * np.std(errors) / np.sqrt(60)
    assert 0.6 * np.sqrt(2 / 2048) < np.std(errors) < 1.5 * np.sqrt(2 / 2048)


def test_new_sketches_replace_old_ones():
    state = no_sketches().with_rows(np.array([2, 5]), np.array([[2.0], [5.0]], dtype=np.float32))
    state = state.with_rows(np.array([3, 5]), np.array([[3.0], [50.0]], dtype=np.float32))
    assert state.known.tolist() == [2, 3, 5]
    assert state.points.ravel().tolist() == [2, 3, 50]
    assert update_sketches(state, {}, 0, 0, False) is state
    assert isinstance(state, Sketches)


def clustered(federation, *sizes: int) -> fedssar.FedSSARState:
    """Return the state in which the clients form clusters of these sizes."""
    points, known = groups(*sizes, noise=0.01), np.arange(sum(sizes))
    return fedssar.FedSSARState(Sketches(known, points, np.zeros(points.shape[1], dtype=np.float32)), 0)


def drawn(federation, state: fedssar.FedSSARState, rounds: int) -> np.ndarray:
    """Return the weights of all clients with Horvitz-Thompson in each round, shape (rounds, N)."""
    weights = np.zeros((rounds, federation.config.clients))
    for round in range(rounds):
        federation.begin(round + 1)
        selection, _ = FedSSARSampler(coordinates=0).select(federation, state, federation.weights)
        places = np.arange(len(selection.clients))
        weights[round, selection.clients] = HorvitzThompson().coefficients(selection, places, np.ones(len(places), int))
    return weights


@pytest.mark.slow
def test_inclusion_probabilities_of_more_clusters_than_draws(tiny):
    """Clusters of 4, 2 and 2 clients and two draws: every client is drawn with probability 2 / 8, and a = 1/2."""
    federation = tiny(8, clients_per_round=2)
    weights = drawn(federation, clustered(federation, 4, 2, 2), 400)
    assert set(weights[weights > 0].round(12).tolist()) == {0.5}
    assert ((weights > 0).sum(axis=1) == 2).all()
    assert abs((weights > 0).mean(axis=0) - 0.25).max() < 4.5 * np.sqrt(0.25 * 0.75 / 400)


@pytest.mark.slow
def test_inclusion_probabilities_of_fewer_clusters_than_draws(tiny):
    """Clusters of 6 and 2 clients and three draws: each cluster is drawn for certain, so that a = N_h / (8 m_h)."""
    federation = tiny(8, clients_per_round=3)
    weights = drawn(federation, clustered(federation, 6, 2), 300)
    np.testing.assert_allclose(weights[:, :6].sum(axis=1), 6 / 8)
    np.testing.assert_allclose(weights[:, 6:].sum(axis=1), 2 / 8)
    error = weights.std(axis=0, ddof=1) / np.sqrt(300)
    assert (abs(weights.mean(axis=0) - 1 / 8) < 4.5 * error).all()


def test_the_setting_of_the_method_changes_only_the_weights():
    paper, unbiased = fs.FedSSAR(), fs.FedSSAR(aggregation="horvitz-thompson")
    assert (paper.aggregator.name, unbiased.aggregator.name) == ("size", "horvitz-thompson")
    assert paper.client_sampler == unbiased.client_sampler
    assert paper.objective == unbiased.objective
