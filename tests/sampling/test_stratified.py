"""Strata of compressed gradients, and draws within them."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedstrata as fs
from fedstrata.aggregation.base import HorvitzThompson
from fedstrata.base.errors import SpecError
from fedstrata.sampling import stratified
from fedstrata.sampling.stratified import draw, stratify


@pytest.mark.slow
@given(st.integers(1, 12), st.integers(1, 6), st.sampled_from([1e-30, 1e-6, 1.0, 1e25]), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_no_stratum_is_empty(clients, count, scale, seed):
    points = np.random.default_rng(seed).integers(-2, 3, size=(clients, 2)).astype(np.float32) * np.float32(scale)
    strata = stratify(points, min(count, clients), seed, 1)
    found = int(strata.max()) + 1
    assert np.bincount(strata).min() >= 1
    assert found <= min(count, len(np.unique(points, axis=0)))
    # Points that are alike are never apart.
    assert all(len(set(strata[(points == point).all(axis=1)])) == 1 for point in points)


@pytest.mark.parametrize(
    ("points", "strata"),
    [
        ([[1.0, 2.0]] * 5, 1),
        ([[0.0, 0.0]] * 3 + [[1.0, 1.0]] * 2, 2),
        ([[1.0], [1.0 + 2e-7], [1.0 + 4e-7], [9.0]], 2),  # alike but for the last bits
        ([[0.0], [0.0]], 1),
    ],
)
def test_more_strata_than_there_are_different_clients(points, strata):
    found = stratify(np.array(points, dtype=np.float32), len(points), 0, 1)
    assert strata <= len(np.unique(found)) <= len(np.unique(points, axis=0))


def test_groups_far_apart_are_found_whatever_their_scale():
    generator = np.random.default_rng(0)
    group = np.repeat([0, 1, 2], 8)
    points = 10 * np.eye(3, 6)[group] + 0.1 * generator.normal(size=(24, 6))
    for scale in (1e-20, 1.0, 1e20):
        strata = stratify((scale * points).astype(np.float32), 3, seed=4, round=2)
        assert len({(int(g), int(s)) for g, s in zip(group, strata, strict=True)}) == 3


PAIRS = np.array([[0.0], [1.0], [10.0], [11.0], [20.0], [21.0]], dtype=np.float32)


def lloyd(points, centres):
    """Algorithm 1 of FedSTaS as it is printed, from given centres: the groups of points at its end."""
    while True:
        nearest = np.abs(points[:, None] - centres[None]).sum(axis=2).argmin(axis=1)
        means = np.stack([points[nearest == stratum].mean(axis=0) for stratum in range(len(centres))])
        if (means == centres).all():
            return frozenset(frozenset(np.flatnonzero(nearest == stratum).tolist()) for stratum in range(len(centres)))
        centres = means


def groups(strata):
    return frozenset(frozenset(np.flatnonzero(strata == stratum).tolist()) for stratum in set(strata.tolist()))


def test_by_hand_two_clients_of_one_pair_keep_their_strata_for_themselves():
    # From the centres 0, 1 and 10: the means of {0}, {1} and {10, 11, 20, 21} are 0, 1 and 15.5, and nothing changes.
    assert lloyd(PAIRS, PAIRS[[0, 1, 2]]) == {frozenset({0}), frozenset({1}), frozenset({2, 3, 4, 5})}
    assert lloyd(PAIRS, PAIRS[[0, 2, 4]]) == {frozenset({0, 1}), frozenset({2, 3}), frozenset({4, 5})}


@pytest.mark.slow
def test_random_starts_are_random_clients_and_end_where_algorithm_1_ends():
    ends = Counter(lloyd(PAIRS, PAIRS[list(start)]) for start in combinations(range(6), 3))
    runs = 400
    drawn = Counter(groups(stratify(PAIRS, 3, seed, 1, "random")) for seed in range(runs))
    assert set(drawn) == set(ends)
    for end, starts in ends.items():
        share = starts / 20
        assert abs(drawn[end] / runs - share) < 4 * (share * (1 - share) / runs) ** 0.5


@pytest.mark.slow
def test_k_means_plus_plus_is_the_default_and_finds_groups_far_apart_more_often():
    pairs = frozenset(map(frozenset, [{0, 1}, {2, 3}, {4, 5}]))
    right = {start: sum(groups(stratify(PAIRS, 3, seed, 1, start)) == pairs for seed in range(100)) for start in STARTS}
    assert right["k-means++"] == right[None] > right["random"] + 10


@pytest.mark.slow
@given(st.integers(2, 30), st.integers(1, 8), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_from_a_random_start_every_client_ends_nearest_to_the_mean_of_its_stratum(clients, count, seed):
    points = np.random.default_rng(seed).normal(size=(clients, 3)).astype(np.float32)
    strata = stratify(points, min(count, clients), seed, 1, "random")
    means = np.stack([points[strata == stratum].mean(axis=0) for stratum in range(strata.max() + 1)])
    distances = np.linalg.norm(points[:, None] - means[None], axis=2)
    assert (distances[np.arange(clients), strata] <= distances.min(axis=1) + 1e-5).all()


STARTS = ("k-means++", None, "random")
STRATA = np.array([0, 0, 0, 1, 1, 1, 1, 2])
CLIENTS = np.array([2, 3, 5, 7, 11, 13, 17, 19])
NORMS = np.array([1.0, 2.0, 5.0, 1.0, 1.0, 0.0, 2.0, 3.0])
SIZES = np.array([3, 4, 1])


def test_a_draw_knows_how_it_was_made():
    found = draw(CLIENTS, STRATA, SIZES, np.array([2, 3, 0]), NORMS, False, np.random.default_rng(0))
    assert np.bincount(found.stratum, minlength=3).tolist() == [2, 3, 0]
    assert found.draws.tolist() == [1] * 5
    assert (np.diff(found.clients) > 0).all()
    place = np.searchsorted(CLIENTS, found.clients)
    np.testing.assert_allclose(found.probability, (NORMS / np.array([8, 4, 3])[STRATA])[place])
    assert found.stratum.tolist() == STRATA[place].tolist()
    assert found.stratum_sizes.tolist() == [3, 4, 1]


@pytest.mark.slow
@given(st.integers(0, 3), st.integers(0, 4), st.integers(0, 1), st.booleans(), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_each_stratum_gives_as_many_as_were_allocated(a, b, c, replacement, seed):
    allocation = np.array([a, b, c])
    found = draw(CLIENTS, STRATA, SIZES, allocation, NORMS, replacement, np.random.default_rng(seed))
    assert np.bincount(found.stratum, weights=found.draws, minlength=3).tolist() == allocation.tolist()
    assert (found.draws >= 1).all()
    assert replacement or (found.draws == 1).all()
    # A client whose gradient is zero comes in only where all others of its stratum are in already.
    assert (13 in found.clients) == (not replacement and b == 4)


@pytest.mark.slow
def test_systematic_draws_and_their_weights_by_hand():
    """Norms 1, 2 and 3 and two draws: π = 1/3, 2/3 and 1. The third client comes with the first or the second."""
    three, generator = np.array([4, 6, 9]), np.random.default_rng(0)
    first = 0
    for _ in range(900):
        found = draw(
            three, np.zeros(3, int), np.array([3]), np.array([2]), np.array([1.0, 2.0, 3.0]), False, generator,
            "systematic",
        )  # fmt: skip
        weights = HorvitzThompson().coefficients(found, np.arange(2), np.ones(2, int))
        if found.clients.tolist() == [4, 9]:
            np.testing.assert_allclose(weights, [1, 1 / 3])  # 1 / (N π) with N = 3
            first += 1
        else:
            assert found.clients.tolist() == [6, 9]
            np.testing.assert_allclose(weights, [1 / 2, 1 / 3])
        np.testing.assert_allclose(found.probability * 2, np.where(found.clients == 9, 1, found.clients / 6 - 1 / 3))
    assert 300 - 4.5 * 14.2 < first < 300 + 4.5 * 14.2


def test_if_a_client_drops_out_the_weights_of_its_stratum_grow():
    """π = 1/3, 2/3 and 1: if only one of two drawn clients returns, it counts twice as much."""
    norms, generator = np.array([1.0, 2.0, 3.0]), np.random.default_rng(0)
    found = draw(
        np.arange(3), np.zeros(3, int), np.array([3]), np.array([2]), norms, False, generator, "systematic"
    )  # fmt: skip
    np.testing.assert_allclose(HorvitzThompson().coefficients(found, np.array([1]), np.ones(1, int)), [2 / 3])


@pytest.mark.slow
@given(st.integers(0, 3), st.integers(0, 4), st.integers(0, 1), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_systematic_draws_give_as_many_as_were_allocated(a, b, c, seed):
    allocation = np.array([a, b, c])
    found = draw(CLIENTS, STRATA, SIZES, allocation, NORMS, False, np.random.default_rng(seed), "systematic")
    assert np.bincount(found.stratum, minlength=3).tolist() == allocation.tolist()
    assert (found.draws == 1).all()
    inclusion = found.probability * allocation[found.stratum]
    assert ((inclusion > 0) & (inclusion <= 1 + 1e-9)).all()
    assert (13 in found.clients) == (b == 4)


def test_systematic_draws_with_replacement_are_refused():
    sampler = {"name": "fedsts", "strata": 2, "replacement": True, "draws": "systematic"}
    with pytest.raises(SpecError, match=r"^method\.client_sampler\.draws = 'systematic': never draws a client twice"):
        fs.prepare(fs.Experiment(method={"name": "fedavg", "client_sampler": sampler}))


def test_horvitz_thompson_accepts_systematic_draws_only():
    for draws in ("sequential", "systematic"):
        sampler = {"name": "fedsts", "strata": 2, "draws": draws}
        spec = fs.Experiment(method={"name": "fedavg", "client_sampler": sampler, "aggregator": "horvitz-thompson"})
        if draws == "systematic":
            assert fs.prepare(spec).config.clients == 100
        else:
            with pytest.raises(SpecError, match=r"'horvitz-thompson' or 'inclusion' instead"):
                fs.prepare(spec)


def counts(norms: np.ndarray, allocation: list[int], replacement: bool, times: int = 4000) -> np.ndarray:
    generator, total = np.random.default_rng(5), np.zeros(20)
    for _ in range(times):
        found = draw(CLIENTS, STRATA, SIZES, np.array(allocation), norms, replacement, generator)
        total[found.clients] += found.draws
    return total[CLIENTS] / times


def close(found: np.ndarray, expected: np.ndarray, draws: np.ndarray, times: int = 4000) -> None:
    p = expected / np.maximum(draws, 1)
    assert (np.abs(found - expected) <= 4.5 * np.sqrt(draws * p * (1 - p) / times) + 1e-12).all()


@pytest.mark.slow
def test_with_replacement_counts_are_multinomial():
    allocation = np.array([5, 3, 2])  # more draws than clients are possible
    expected = allocation[STRATA] * NORMS / np.array([8, 4, 3])[STRATA]
    close(counts(NORMS, [5, 3, 2], True), expected, allocation[STRATA])


@pytest.mark.slow
@pytest.mark.parametrize("replacement", [True, False])
def test_clients_without_gradients_are_drawn_uniformly(replacement):
    allocation = np.array([2, 1, 1])
    found = counts(np.zeros(8), [2, 1, 1], replacement)
    close(found, (allocation / SIZES)[STRATA], allocation[STRATA])


@pytest.mark.slow
def test_one_without_replacement_is_importance_sampling():
    ones = np.array([1, 1, 1])
    close(counts(NORMS, [1, 1, 1], False), NORMS / np.array([8, 4, 3])[STRATA], ones[STRATA])


@pytest.mark.parametrize("rounds", [3, 6])
def test_strata_that_are_continued_are_a_fixed_point_of_lloyds_iteration(monkeypatch, rounds):
    """If few clients renew their gradients in a round, k-means continues from the centres of the last round."""
    monkeypatch.setattr(stratified, "FITTED", 6)
    spec = fs.Experiment(
        data={"name": "digits", "limit": 240},
        partition=fs.Dirichlet(alpha=0.1, clients=12),
        model={"name": "mlp", "hidden": []},
        method={"name": "fedsts", "strata": 3, "gradients": "updates"},
        training={"rounds": rounds, "clients_per_round": 4, "local_steps": 2},
        evaluation={"every": 0},
    )
    found = fs.strata_after(fs.prepare(spec), rounds)
    points, strata = found.points, found.strata
    centres = np.stack([points[strata == stratum].mean(axis=0) for stratum in range(strata.max() + 1)])
    distances = np.linalg.norm(points[:, None] - centres, axis=2)
    assert len(points) > 6
    assert (distances.argmin(axis=1) == strata).all()
