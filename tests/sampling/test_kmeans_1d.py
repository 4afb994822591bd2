"""The exact 1-D k-means of many values, against brute force and against an independent exact program."""

from __future__ import annotations

import itertools

import ckmeans
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.sampling import kmeans_1d, quantization
from fedstrata.sampling.kmeans_1d import segment


def cost(values: np.ndarray, weights: np.ndarray, cuts) -> float:
    parts = zip(np.split(values, cuts), np.split(weights, cuts), strict=True)
    return sum(float((w * (x - np.average(x, weights=w)) ** 2).sum()) for x, w in parts)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-40, 40), st.integers(1, 9)), min_size=4, max_size=11, unique_by=lambda p: p[0]),
    st.integers(2, 3),
)
def test_no_division_is_cheaper(points, count):
    values, weights = (np.array(column) for column in zip(*sorted(points), strict=True))
    found = segment(values.astype(np.float64), weights, count)
    every = itertools.combinations(range(1, len(values)), count - 1)
    cheapest = min(cost(values, weights, list(cuts)) for cuts in every)
    assert cost(values, weights, found) == pytest.approx(cheapest, rel=1e-9, abs=1e-9)


KINDS = {
    "heavy tails": lambda g, n: g.standard_t(2, size=n),
    "log-normal": lambda g, n: np.exp(2 * g.normal(size=n)),
    "evenly spaced": lambda g, n: np.arange(n) * 0.5,
    "two far groups": lambda g, n: np.concatenate([g.normal(size=n // 2), 1e4 + g.normal(size=n - n // 2)]),
    "few values, often": lambda g, n: g.integers(0, 40, size=n) * 1.0,
    "mirrored": lambda g, n: np.concatenate([v := g.exponential(size=n // 2), -v]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "count"), [(60, 2), (700, 5), (3000, 9)])
def test_as_cheap_as_the_plain_program(kind, size, count):
    values = KINDS[kind](np.random.default_rng(size), size)
    distinct, weights = np.unique(values, return_counts=True)
    found = segment(distinct, weights, count)
    cuts = np.cumsum([len(group) for group in ckmeans.ckmeans(values, count)[:-1]])
    theirs = cost(np.sort(values), np.ones(size), cuts)
    assert cost(distinct, weights, found) == pytest.approx(theirs, rel=1e-9)


def test_the_grid_is_refined_more_than_once(monkeypatch):
    """Or the tests above would only see the first grid, fine enough for a few values."""
    passes, bounds = [], kmeans_1d._bounds

    def counted(*arguments):
        passes.append(bounds(*arguments))
        return passes[-1]

    monkeypatch.setattr(kmeans_1d, "_bounds", counted)
    segment(np.sort(np.random.default_rng(0).normal(size=3000)), np.ones(3000, dtype=np.int64), 9)
    lower = [bound for bound, _, _ in passes]
    assert len(lower) >= 3
    assert lower == sorted(lower)


def test_gives_up_where_it_is_told_to(monkeypatch):
    monkeypatch.setattr(kmeans_1d, "MOST", 10)
    assert segment(np.arange(500.0), np.ones(500, dtype=np.int64), 4) is None


def test_long_gradients_are_squeezed_the_same_way(monkeypatch):
    """Both programs, on the same coordinates with repeated values and zeros."""
    g = np.random.default_rng(3)
    values = np.round(g.standard_t(3, size=30_000), 3).astype(np.float32)
    values[:9000] = 0
    monkeypatch.setattr(quantization, "SMALL", 100)
    fast = quantization.quantize(values, 9)
    monkeypatch.setattr(quantization, "SMALL", len(values))
    plain = quantization.quantize(values, 9)
    np.testing.assert_allclose(fast[0], plain[0], rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(fast[1], plain[1])
    assert (fast[0].dtype, fast[1].dtype) == (np.float32, np.uint8)
