"""k-means that goes on from round to round: its books against sums over all rows, its strata against all distances."""

from __future__ import annotations

import numpy as np
import pytest

from fedstrata.base import records
from fedstrata.sampling import incremental_kmeans
from fedstrata.sampling.allocation import spread
from fedstrata.sampling.incremental_kmeans import Clusters
from fedstrata.sampling.sketches import NO_POINTS, lengths, with_rows


def test_rows_are_what_a_matrix_would_be():
    g = np.random.default_rng(0)
    known, matrix = np.arange(0, 120, 2), g.normal(size=(60, 3)).astype(np.float32)
    points, expected = matrix, dict(zip(known.tolist(), matrix, strict=True))
    first = matrix.copy()
    for _ in range(40):
        clients = np.sort(g.choice(200 if g.random() < 0.2 else known, 2, replace=False))
        new = g.normal(size=(2, 3)).astype(np.float32)
        known, points = with_rows(known, points, clients, new)
        expected |= dict(zip(clients.tolist(), new, strict=True))
        whole = np.stack([expected[client] for client in sorted(expected)])
        assert known.tolist() == sorted(expected)
        np.testing.assert_array_equal(points, whole)
        np.testing.assert_allclose(lengths(points), np.linalg.norm(whole.astype(np.float64), axis=1), rtol=1e-12)
    np.testing.assert_array_equal(matrix, first)
    some, rows = with_rows(known[:0], NO_POINTS, known, points)
    np.testing.assert_array_equal(rows, points)
    assert some.tolist() == known.tolist()


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
def test_strata_and_deviations_are_those_of_all_rows(scale, monkeypatch):
    monkeypatch.setattr(incremental_kmeans, "STEPS", 100)
    g = np.random.default_rng(1)
    group = g.integers(4, size=200)
    matrix = (scale * (3 * np.eye(4, 6)[group] + g.normal(size=(200, 6)))).astype(np.float32)
    points, known, norms = matrix, np.arange(200), lengths(matrix)
    clusters = Clusters.of(points, norms, group).converged(points, norms)
    for step in range(12):
        n = len(known)
        places = np.sort(g.choice(n, 5, replace=False))
        new = (scale * (points[places] / scale + g.normal(size=(5, 6)))).astype(np.float32)
        clusters = clusters.without(places, points[places])
        known, points = with_rows(known, points, places, new)
        if step % 4 == 3:  # somebody new
            known, points = with_rows(known, points, np.array([n]), new[:1])
            clusters = clusters.among(np.arange(n), n + 1)
        norms = lengths(points)
        clusters = clusters.converged(points, norms)
        whole = points.astype(np.float64) / scale
        sums = np.stack([whole[clusters.labels == h].sum(axis=0) for h in range(4)])
        np.testing.assert_allclose(clusters.sums / scale, sums, atol=1e-5)
        assert clusters.sizes.tolist() == np.bincount(clusters.labels, minlength=4).tolist()
        distances = np.linalg.norm(whole[:, None] - sums / clusters.sizes[:, None, None].squeeze(-1), axis=2)
        own = distances[np.arange(len(whole)), clusters.labels]
        assert (own <= distances.min(axis=1) + 1e-4).all()
        each, together = clusters.spread(norms)
        np.testing.assert_allclose(each / scale, spread(whole.astype(np.float32), clusters.labels, 4), rtol=1e-4)
        assert together / scale == pytest.approx(spread(whole.astype(np.float32), 0 * clusters.labels, 1)[0], rel=1e-4)
    assert clusters.renewed == 12 * 5 + 3
    assert records.encode(records.decode(records.encode(clusters))) == records.encode(clusters)


def test_the_bounds_hold_for_every_row_however_the_centres_move():
    """Upper bounds are no smaller than the distance to the own centre, and lower ones no larger than any other."""
    g = np.random.default_rng(2)
    group = np.arange(90) % 3
    matrix = (2 * np.eye(3, 2)[group] + g.normal(size=(90, 2))).astype(np.float32)
    points, known = matrix, np.arange(90)
    clusters = Clusters.of(points, lengths(points), group).converged(points, lengths(points))
    for step in range(10):
        # One group of neighbours moves away: its centre moves far, and the others hardly do.
        places = np.sort(g.choice(np.flatnonzero(clusters.labels == step % 3), 8, replace=False))
        new = (points[places] + 3 * g.normal(size=2)).astype(np.float32)
        clusters = clusters.without(places, points[places])
        known, points = with_rows(known, points, places, new)
        clusters = clusters.converged(points, lengths(points))
        distances = np.linalg.norm(points.astype(np.float64)[:, None] - clusters.centres[None], axis=2)
        own = distances[np.arange(90), clusters.labels]
        distances[np.arange(90), clusters.labels] = np.inf
        assert (clusters.upper >= own - 1e-5).all()
        assert (clusters.lower <= distances.min(axis=1) + 1e-5).all()
