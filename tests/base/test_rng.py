from __future__ import annotations

import itertools

import numpy as np
import torch

from fedstrata.base.rng import SERVER, rng, torch_seeded, uniforms


def test_the_same_name_gives_the_same_numbers_whatever_was_drawn_before():
    first = rng(3, "batches", 2, 7).permutation(50)
    for purpose in ("batches", "keep"):
        rng(3, purpose, 1, 7).random(1000)
    np.random.default_rng(0).random(10)
    torch.rand(10)
    assert (rng(3, "batches", 2, 7).permutation(50) == first).all()


def test_every_part_of_the_name_matters():
    names = itertools.product((0, 1), ("a", "b"), (0, 1), (SERVER, 0, 1))
    drawn = [rng(*name).integers(2**62) for name in names]
    assert len(set(drawn)) == len(drawn)


def test_parts_of_the_name_do_not_run_together():
    assert rng(1, "a", 11, 1).random() != rng(1, "a", 1, 11).random()
    assert rng(1, "a|1", 1, 0).random() != rng(1, "a", 1, 10).random()


def test_uniforms_are_a_function_of_their_own_client():
    everybody = uniforms(5, "online", 3, np.arange(1000))
    some = np.array([999, 3, 500])
    assert (uniforms(5, "online", 3, some) == everybody[some]).all()
    assert (uniforms(5, "online", 3, np.arange(2000))[:1000] == everybody).all()
    assert uniforms(5, "online", 3, some.reshape(3, 1)).shape == (3, 1)


def test_uniforms_differ_between_rounds_seeds_and_purposes_and_are_uniform():
    clients = np.arange(20_000)
    draws = [uniforms(s, p, r, clients) for s, p, r in ((0, "a", 1), (1, "a", 1), (0, "b", 1), (0, "a", 2))]
    for u in draws:
        assert (u >= 0).all()
        assert (u < 1).all()
        counts = np.histogram(u, bins=20, range=(0, 1))[0]
        # 43.8 is the 99.9 % quantile of chi-squared with 19 degrees of freedom.
        assert ((counts - 1000) ** 2 / 1000).sum() < 43.8
    correlations = np.corrcoef([*draws, np.roll(draws[0], 1)])[np.triu_indices(5, 1)]
    assert np.abs(correlations).max() < 4.5 / np.sqrt(len(clients))


def test_neighbouring_generators_are_independent():
    drawn = np.array([rng(0, "x", 1, client).random(50) for client in range(200)])
    correlations = np.corrcoef(drawn)[np.triu_indices(200, 1)]
    assert abs(correlations.mean()) < 0.01
    assert abs(drawn.mean() - 0.5) < 0.015


def test_pytorchs_own_generator_is_put_back():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with torch_seeded(0, "model"):
        inside = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with torch_seeded(0, "model"):
        assert torch.equal(torch.rand(3), inside)
    try:
        with torch_seeded(0, "model"):
            raise KeyError
    except KeyError:
        pass
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), expected)
