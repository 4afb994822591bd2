"""Algorithm 1: chunks, retained pools and longest runs."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.stratify.selection import assign_runs, retained, tasks_of


def table(*holders: str) -> np.ndarray:
    """One string a placeholder: '1' where a client has samples of it."""
    return np.array([[mark == "1" for mark in row] for row in holders])


@pytest.mark.parametrize(
    ("wanted", "available", "chunk_size", "expected"),
    [
        # Client 0 covers 0 1 0, client 1 only 1: one run, cut at the chunk's end.
        ([0, 1, 0, 1], table("10", "11"), 3, [0, 0, 0, None]),
        # At position 0 client 1 reaches two positions, client 0 one; the rest is client 0's.
        ([0, 1, 2], table("11", "01", "10"), 5, [1, 1, 0]),
        # Client 2 is not in the pool of position 0, so its longer run from position 1 does not count there.
        ([0, 1, 2, 3], table("110", "011", "001", "001"), 4, [1, 1, 2, 2]),
        # Nobody has placeholder 1: a hole, and the walk goes on behind it.
        ([0, 1, 0, 0], table("10", "00"), 4, [0, -1, 0, 0]),
        ([0, 0, 0], table("1"), 1, [0, 0, 0]),
        ([], table("1"), 5, []),
        ([0, 0], table("00"), 5, [-1, -1]),
    ],
)
def test_runs_by_hand(wanted, available, chunk_size, expected):
    generator = np.random.default_rng(0)
    found = assign_runs(
        np.array(wanted, dtype=np.int64), available, chunk_size=chunk_size, retain=1.0, generator=generator
    )
    assert [a if b is not None else None for a, b in zip(found.tolist(), expected, strict=True)] == expected


def brute_force(wanted: np.ndarray, available: np.ndarray, chunk_size: int, owner: np.ndarray) -> None:
    """Walk the chunks as printed; at every start the owner must be one of those with the longest run."""
    for begin in range(0, len(wanted), chunk_size):
        chunk = wanted[begin : begin + chunk_size]
        i = 0
        while i < len(chunk):
            lengths = {}
            for client in np.flatnonzero(available[chunk[i]]).tolist():
                end = i
                while end < len(chunk) and available[chunk[end], client]:
                    end += 1
                lengths[client] = end - i
            if not lengths:
                assert owner[begin + i] == -1
                i += 1
                continue
            longest = max(lengths.values())
            chosen = owner[begin + i : begin + i + longest]
            assert len(set(chosen.tolist())) == 1
            assert lengths.get(int(chosen[0])) == longest
            i += longest


@pytest.mark.slow
@given(
    st.integers(1, 5).flatmap(
        lambda p: st.tuples(
            st.lists(st.integers(0, p - 1), max_size=40),
            st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=p, max_size=p),
        )
    ),
    st.integers(1, 9),
    st.integers(0, 2**32),
)
def test_every_run_is_a_longest_one(case, chunk_size, seed):
    wanted, available = np.array(case[0], dtype=np.int64), np.array(case[1])
    owner = assign_runs(wanted, available, chunk_size=chunk_size, retain=1.0, generator=np.random.default_rng(seed))
    brute_force(wanted, available, chunk_size, owner)
    begins, ends = tasks_of(owner, chunk_size)
    served = np.concatenate([np.arange(b, e) for b, e in zip(begins, ends, strict=True)] or [np.empty(0)])
    assert served.tolist() == np.flatnonzero(owner >= 0).tolist()
    assert all((ends - begins) <= chunk_size)
    assert all(len(set(owner[b:e].tolist())) == 1 for b, e in zip(begins, ends, strict=True))


@pytest.mark.slow
@given(st.integers(1, 12), st.floats(0.01, 1.0), st.booleans(), st.integers(0, 2**32))
def test_pools_have_their_size_and_only_those_available(clients, retain, weighted, seed):
    generator = np.random.default_rng(seed)
    able = generator.random((6, clients)) < 0.6
    weights = generator.integers(1, 50, able.shape).astype(float) if weighted else None
    pools = retained(able, weights, retain, generator)
    assert not (pools & ~able).any()
    count = able.sum(axis=1)
    expected = np.where(count > 0, np.maximum(1, np.ceil(retain * count - 1e-9)), 0)
    assert pools.sum(axis=1).tolist() == expected.tolist()


def test_decimals_do_not_add_a_client():
    assert retained(np.ones((1, 30), dtype=bool), None, 0.1, np.random.default_rng(0)).sum() == 3


def test_pools_are_drawn_by_weight_or_evenly():
    generator, rounds = np.random.default_rng(1), 40_000
    able = np.ones((rounds, 3), dtype=bool)
    for weights, expected in ((None, [1 / 3] * 3), (np.tile([1.0, 2.0, 5.0], (rounds, 1)), [1 / 8, 2 / 8, 5 / 8])):
        share = retained(able, weights, 0.1, generator).mean(axis=0)
        error = np.sqrt(np.multiply(expected, np.subtract(1, expected)) / rounds)
        assert (np.abs(share - expected) < 4 * error).all()


def test_two_of_three_by_weight_are_drawn_one_after_another():
    # P(client 2 stays away) = P(0 then 1) + P(1 then 0) = 1/8 · 2/7 + 2/8 · 1/6.
    rounds = 40_000
    weights = np.tile([1.0, 2.0, 5.0], (rounds, 1))
    away = ~retained(np.ones((rounds, 3), dtype=bool), weights, 0.5, np.random.default_rng(2))[:, 2]
    p = 1 / 8 * 2 / 7 + 2 / 8 * 1 / 6
    assert abs(away.mean() - p) < 4 * np.sqrt(p * (1 - p) / rounds)


def test_ties_break_at_random():
    wanted, both = np.zeros(20_000, dtype=np.int64), table("11")
    owner = assign_runs(wanted, both, chunk_size=1, retain=1.0, generator=np.random.default_rng(3))
    assert abs(owner.mean() - 0.5) < 4 * 0.5 / np.sqrt(len(wanted))


def test_one_chunk_has_one_pool_a_placeholder():
    # With half of two clients retained, one of them trains a whole chunk of one label.
    wanted, both = np.zeros(400, dtype=np.int64), table("11")
    owner = assign_runs(wanted, both, chunk_size=4, retain=0.5, generator=np.random.default_rng(4)).reshape(-1, 4)
    assert (owner == owner[:, :1]).all()
    assert len(np.unique(owner)) == 2


def test_an_epoch_of_mnist_is_planned_at_once():
    generator = np.random.default_rng(5)
    wanted, available = generator.integers(0, 10, 60_000), generator.random((10, 10)) < 0.5
    began = time.process_time()
    assign_runs(wanted, available, chunk_size=5, retain=0.5, generator=generator)
    assert time.process_time() - began < 0.5  # 0.02 s on one core


@pytest.mark.slow
def test_a_chunk_much_longer_than_the_schedule_is_as_long_as_the_schedule():
    wanted, available = np.array([0, 1, 0, 1, 1, 0]), np.array([[True, True, False], [False, True, True]])
    owners = [
        assign_runs(wanted, available, chunk_size=size, retain=0.5, generator=np.random.default_rng(3))
        for size in (6, 100_000)
    ]
    assert owners[0].tolist() == owners[1].tolist()


def test_a_short_chunk_leaves_the_generator_where_one_that_is_filled_up_does():
    """Draws that follow must not depend on how the last chunk was planned: alone, or with others."""
    available, wanted = np.ones((1, 3), dtype=bool), np.zeros(4, dtype=np.int64)
    generator = np.random.default_rng(3)
    assign_runs(wanted, available, chunk_size=7, retain=1.0, generator=generator)
    # One run of four positions, then a draw for each of the three that are not there.
    assert generator.random() == np.random.default_rng(3).random((1 + 3 + 1, 3))[-1, 0]
