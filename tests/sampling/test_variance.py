"""The laws of the samplers, by 4,000 draws on frozen updates of clients that differ in size and length."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from aggregate_moments import Moments, moments, scattered

from fedstrata.aggregation.base import Aggregator, HorvitzThompson, Mean, MeanBySize, StratumMean
from fedstrata.sampling.allocation import allocated, spread
from fedstrata.sampling.base import Selection
from fedstrata.sampling.clustered import Distributions, by_group, by_size, group
from fedstrata.sampling.fedssar import shares
from fedstrata.sampling.stratified import draw as draw_strata
from fedstrata.sampling.stratified import stratify
from fedstrata.sampling.weighted import with_replacement, without_replacement

N, M, D, DRAWS = 24, 6, 5, 4_000
EVERYBODY = np.arange(N)


@pytest.fixture(scope="module")
def frozen() -> tuple[np.ndarray, np.ndarray]:
    """Sizes 1 … 300 and updates in four directions with lengths from 0.05 to 20."""
    g = np.random.default_rng(5)
    sizes = np.round(np.exp(g.uniform(0, np.log(300), size=N))).astype(np.int64)
    directions = g.normal(size=(4, D))[np.arange(N) % 4]
    lengths = np.exp(g.uniform(-3, 3, size=(N, 1)))
    return sizes, (directions + 0.3 * g.normal(size=(N, D))) * lengths


def simulate(select, aggregator: Aggregator, sizes: np.ndarray, updates: np.ndarray, draws: int = DRAWS) -> Moments:
    def weights(g: np.random.Generator) -> np.ndarray:
        chosen: Selection = select(g)
        a = aggregator.coefficients(chosen, np.arange(len(chosen.clients)), sizes[chosen.clients])
        return scattered(chosen.clients, a, len(sizes))

    return moments(weights, updates, draws, np.random.default_rng(0))


def strata_of(updates: np.ndarray, replacement: bool):
    points = updates.astype(np.float32)
    strata = stratify(points, 4, seed=0, round=1)
    counts = np.bincount(strata)
    allocation = allocated("neyman-at-least-one", M, counts, spread(points, strata, len(counts)))[0]
    norms = np.linalg.norm(updates, axis=1)
    return lambda g: draw_strata(EVERYBODY, strata, counts, allocation, norms, replacement, g)


def by_rule(updates: np.ndarray, rule, strata: int = 8, *, systematic: bool = False):
    """FedSTS with more strata than places (and one of a single client), by a rule of allocation."""
    points = updates.astype(np.float32)
    labels = stratify(points, strata, seed=0, round=1)
    counts = np.bincount(labels)
    deviations, norms = spread(points, labels, len(counts)), np.linalg.norm(updates, axis=1)

    def select(g: np.random.Generator) -> Selection:
        allocation, chance = allocated(rule, M, counts, deviations, g)
        how = "systematic" if systematic else "sequential"
        found = draw_strata(EVERYBODY, labels, counts, allocation, norms, not systematic, g, how)
        return replace(found, stratum_chance=chance if rule == "neyman-random" else None)

    return select


def drawn_from(made: Distributions, sizes: np.ndarray):
    return lambda g: Selection.from_draws(EVERYBODY, np.bincount(made.draw(g), minlength=N), sizes)


UNBIASED = {
    "uniform": (lambda s, u: lambda g: Selection.plain(g.choice(N, M, replace=False), N), Mean(), "clients"),
    "uniform-replacement": (
        lambda s, u: lambda g: with_replacement(EVERYBODY, np.ones(N, np.int64), M, g, by_size=False),
        Mean(),
        "clients",
    ),
    "size": (lambda s, u: lambda g: with_replacement(EVERYBODY, s, M, g), MeanBySize(), "samples"),
    "size-distinct": (lambda s, u: lambda g: without_replacement(EVERYBODY, s, M, g), MeanBySize(), "samples"),
    "clustered-1": (
        lambda s, u: drawn_from(by_size(s, M), s),
        MeanBySize(),
        "samples",
    ),
    "clustered-2": (
        lambda s, u: drawn_from(by_group(group(u, s, M), s, M), s),
        MeanBySize(),
        "samples",
    ),
    "fedsts": (lambda s, u: strata_of(u, True), HorvitzThompson(), "clients"),
    "fedsts, random allocation": (lambda s, u: by_rule(u, "neyman-random"), HorvitzThompson(), "clients"),
    "fedsts, inclusion probabilities": (
        lambda s, u: by_rule(u, "neyman-random", systematic=True),
        HorvitzThompson(),
        "clients",
    ),
    "fedssar": (lambda s, u: similar(np.sort(np.arange(N) % 5) % 4, M), HorvitzThompson(), "clients"),
    "fedssar, more clusters than draws": (
        lambda s, u: similar(np.minimum(np.arange(N) // 2, 9), M),
        HorvitzThompson(),
        "clients",
    ),
}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", UNBIASED)
def test_the_mean_aggregate_is_the_full_one(name, frozen):
    sizes, updates = frozen
    make, aggregator, over = UNBIASED[name]
    target = updates.mean(axis=0) if over == "clients" else sizes @ updates / sizes.sum()
    found = simulate(make(sizes, updates), aggregator, sizes, updates)
    assert found.deviation(target) < 4
    assert found.variance > 0
    # Four standard errors are no free pass: the other kind of mean, which differs, is far outside of them.
    other = sizes @ updates / sizes.sum() if over == "clients" else updates.mean(axis=0)
    assert found.deviation(other) > 8


@pytest.mark.long
@pytest.mark.slow
def test_the_papers_aggregate_of_importance_samples_is_biased(frozen):
    """FedSTS: long updates are drawn more often and not weighted down, so that the aggregate is too long."""
    sizes, updates = frozen
    target = updates.mean(axis=0)
    paper = simulate(strata_of(updates, False), StratumMean(), sizes, updates)
    repaired = simulate(strata_of(updates, True), HorvitzThompson(), sizes, updates)
    assert paper.deviation(target) > 50
    assert np.linalg.norm(paper.mean) > 1.2 * np.linalg.norm(target)
    lengths = np.linalg.norm(updates, axis=1)
    assert paper.weight @ lengths > 1.2 * lengths.mean()
    assert repaired.deviation(target) < 4
    # The weights of a mean add up to one in every draw, those of Horvitz and Thompson on average.
    assert paper.weight.sum() == pytest.approx(1)
    assert repaired.weight == pytest.approx(np.full(N, 1 / N), rel=0.25)


@pytest.mark.long
@pytest.mark.slow
def test_strata_without_a_draw_bias_the_aggregate(frozen):
    """Neyman's allocation as published: of eight strata and six places some never get one."""
    sizes, updates = frozen
    target = updates.mean(axis=0)
    published = simulate(by_rule(updates, "neyman"), HorvitzThompson(), sizes, updates)
    assert (published.weight == 0).sum() > 0
    assert published.deviation(target) > 8
    found = simulate(by_rule(updates, "neyman-random"), HorvitzThompson(), sizes, updates)
    assert (found.weight > 0).all()
    assert found.deviation(target) < 4


def similar(clusters: np.ndarray, m: int):
    counts = np.bincount(clusters)
    everybody = np.arange(len(clusters))
    # With places for all clusters nothing about the allocation is random.
    fixed = shares(m, counts, counts, np.random.default_rng(0)) if len(counts) <= m else None

    def select(g: np.random.Generator) -> Selection:
        allocation = shares(m, counts, counts, g) if fixed is None else fixed
        found = draw_strata(everybody, clusters, counts, allocation, np.zeros(len(clusters)), False, g)
        return replace(found, stratum_chance=None if fixed is not None else np.minimum(m * counts / counts.sum(), 1))

    return select


@pytest.mark.slow
def test_fedssar_on_homogeneous_clusters_is_unbiased_and_without_variance(frozen):
    """Clusters of 12, 8 and 4 equal clients get 3, 2 and 1 of the 6 places: every draw is the full mean."""
    clusters = np.repeat([0, 1, 2], [12, 8, 4])[np.random.default_rng(1).permutation(N)]
    updates = frozen[1][clusters]
    found = simulate(similar(clusters, M), MeanBySize(), np.full(N, 7), updates)
    assert found.deviation(updates.mean(axis=0)) < 4
    plain = simulate(lambda g: Selection.plain(g.choice(N, M, replace=False), N), Mean(), np.full(N, 7), updates)
    assert found.variance < 1e-9 * plain.variance
    assert found.weight == pytest.approx(np.full(N, 1 / N), rel=0.15)


@pytest.mark.long
@pytest.mark.slow
def test_variance_of_a_clients_weight_is_the_papers():
    """FedSSAR, Eq. 10 and 11: (1/mN)(1 − 1/N) by independent draws, (1/mN)(1 − m/N) by one of each of m clusters."""
    n, m = 20, 5
    clusters, sizes, one = np.arange(n) % m, np.full(n, 3), np.eye(n)
    random = simulate(lambda g: with_replacement(np.arange(n), sizes, m, g), MeanBySize(), sizes, one, 5000)
    stratified = simulate(similar(clusters, m), MeanBySize(), sizes, one, 5000)
    each = 1 / (m * n)
    assert random.variance / n == pytest.approx(each * (1 - 1 / n), rel=0.05)
    assert stratified.variance / n == pytest.approx(each * (1 - m / n), rel=0.05)


@pytest.mark.slow
def test_more_clusters_than_places_leave_nobody_out(frozen):
    """Nine clusters, six places: unbiased even where clusters are not homogeneous."""
    sizes, updates = np.full(N, 3), frozen[1]
    clusters = np.array([0] * 12 + [1] * 4 + [2, 3, 4, 5, 6, 6, 7, 8])
    found = simulate(similar(clusters, M), MeanBySize(), sizes, updates, draws=4000)
    assert found.deviation(updates.mean(axis=0)) < 4


def test_moments_by_hand():
    """One of two clients by a coin: mean 1.5, variance (3/2)²."""
    found = moments(lambda g: np.eye(2)[g.integers(2)], np.array([[0.0], [3.0]]), 4000, np.random.default_rng(0))
    assert found.variance == pytest.approx(2.25, rel=0.01)
    assert found.error[0] == pytest.approx(1.5 / np.sqrt(4000), rel=0.01)
    assert found.deviation(np.array([1.5])) < 4 < found.deviation(np.array([1.8]))


def test_a_constant_that_is_wrong_is_infinitely_wrong():
    found = moments(lambda g: np.array([1.0, 0.0]), np.array([[2.0], [3.0]]), 10, np.random.default_rng(0))
    assert found.variance == 0
    assert found.deviation(np.array([2.0])) == 0
    assert found.deviation(np.array([2.5])) == np.inf
