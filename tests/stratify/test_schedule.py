"""The stratified label schedule and who is asked for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.sampling.label_counts import LabelReply
from fedstrata.stratify.schedule import Holders, frequencies, schedule
from fedstrata.stratify.selection import select_batch, select_batches

TOTALS = st.lists(st.integers(1, 500), min_size=1, max_size=12).map(np.array)


def reply(counts: dict[int, int]) -> LabelReply:
    labels = sorted(counts)
    return LabelReply(torch.tensor(labels, dtype=torch.int64), torch.tensor([counts[c] for c in labels]).long())


def test_holders_by_hand():
    holders = Holders.of({0: reply({7: 5}), 3: reply({2: 1, 7: 4, 9: 6}), 4: reply({}), 8: reply({2: 3})})
    assert holders.placeholders.tolist() == [2, 7, 9]
    assert holders.totals.tolist() == [4, 9, 6]
    found = [tuple(part.tolist() for part in holders.of_placeholder(p)) for p in range(3)]
    assert found == [([3, 8], [1, 3]), ([0, 3], [5, 4]), ([3], [6])]


def test_a_uniform_schedule_has_the_mean_of_the_totals_rounded():
    assert frequencies(np.array([2, 3, 3]), "uniform").tolist() == [3, 3, 3]
    assert frequencies(np.array([2, 2, 3]), "uniform").tolist() == [2, 2, 2]


@pytest.mark.parametrize("replies", [{}, {0: reply({}), 1: reply({})}])
def test_nobody_holds_anything(replies):
    holders = Holders.of(replies)
    assert len(holders.placeholders) == len(holders.totals) == len(frequencies(holders.totals)) == 0
    assert len(schedule(frequencies(holders.totals), np.random.default_rng(0))) == 0


@pytest.mark.slow
@given(st.lists(st.dictionaries(st.integers(0, 9), st.integers(1, 50), max_size=6), min_size=1, max_size=8))
def test_holders_lose_nothing(clients):
    holders = Holders.of({k: reply(counts) for k, counts in enumerate(clients)})
    back: list[dict[int, int]] = [{} for _ in clients]
    for p, label in enumerate(holders.placeholders.tolist()):
        for k, n in zip(*holders.of_placeholder(p), strict=True):
            back[k][label] = int(n)
    assert back == clients
    assert holders.totals.sum() == sum(sum(counts.values()) for counts in clients)


@pytest.mark.parametrize(
    ("totals", "rule", "cap", "expected"),
    [
        ([100, 10, 1], "capped", None, [10, 10, 1]),
        ([100, 10, 4, 1], "capped", None, [7, 7, 4, 1]),
        ([100, 10, 1], "capped", 40, [40, 10, 1]),
        ([100, 10, 1], "uncapped", None, [100, 10, 1]),
        ([100, 10, 1], "uniform", None, [37, 37, 37]),
        ([8], "capped", None, [8]),
    ],
)
def test_frequencies_by_hand(totals, rule, cap, expected):
    assert frequencies(np.array(totals), rule, cap).tolist() == expected


@pytest.mark.slow
@given(TOTALS)
def test_a_cap_only_takes_away_and_keeps_every_label(totals):
    found = frequencies(totals)
    assert (found <= totals).all()
    assert (found >= 1).all()
    assert (found == totals).sum() >= len(totals) / 2  # at least half lie at the median or below


@pytest.mark.slow
@given(st.integers(1, 300), st.integers(1, 10))
def test_on_balanced_data_all_rules_agree(count, labels):
    totals = np.full(labels, count)
    assert all(frequencies(totals, rule).tolist() == totals.tolist() for rule in ("capped", "uniform", "uncapped"))


@pytest.mark.slow
@given(st.lists(st.integers(0, 30), min_size=1, max_size=8).map(np.array), st.integers(0, 10**6))
def test_a_schedule_is_a_permutation_of_the_frequencies(frequency, seed):
    found = schedule(frequency, np.random.default_rng(seed))
    assert np.bincount(found, minlength=len(frequency)).tolist() == frequency.tolist()


def test_a_schedule_is_shuffled():
    draws = np.array([schedule(np.array([30, 10]), np.random.default_rng(s)) for s in range(2000)])
    share = (draws == 1).mean(axis=0)
    assert (np.abs(share - 0.25) < 4.5 * np.sqrt(0.25 * 0.75 / 2000)).all()  # at every position


AVAILABLE = {0: np.array([1, 4, 6, 9]), 1: np.array([5]), 2: np.array([], dtype=np.int64)}


def test_a_batch_by_hand():
    wanted = np.array([1, 0, 2, 0, 1, 2, 0])
    found = select_batch(wanted, AVAILABLE, None, np.random.default_rng(0))
    assert found[wanted == 1].tolist() == [5, 5]  # fewer clients than positions: with replacement
    assert found[wanted == 2].tolist() == [-1, -1]  # nobody is there
    assert len(set(found[wanted == 0])) == 3  # enough clients: nobody twice
    assert set(found[wanted == 0]) <= {1, 4, 6, 9}


@pytest.mark.slow
@given(
    st.lists(st.integers(0, 2), max_size=12).map(lambda w: np.array(w, dtype=np.int64)),
    st.booleans(),
    st.integers(0, 99),
)
def test_only_holders_are_chosen(wanted, weighted, seed):
    weights = {p: np.arange(1.0, 1 + len(clients)) for p, clients in AVAILABLE.items()} if weighted else None
    found = select_batch(wanted, AVAILABLE, weights, np.random.default_rng(seed))
    for client, p in zip(found, wanted, strict=True):
        assert client in AVAILABLE[p] if len(AVAILABLE[p]) else client == -1
    zeros = found[wanted == 0]
    assert len(set(zeros)) == len(zeros) or len(zeros) > 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "chances"), [(None, [0.25] * 4), ({0: np.array([1.0, 2.0, 5.0, 0.0])}, [1 / 8, 2 / 8, 5 / 8, 0])]
)
def test_selection_is_uniform_or_by_weight(weights, chances):
    generator, times = np.random.default_rng(2), 4000
    drawn = [int(select_batch(np.array([0]), AVAILABLE, weights, generator)[0]) for _ in range(times)]
    share = np.array([drawn.count(client) for client in AVAILABLE[0]]) / times
    p = np.array(chances)
    assert (np.abs(share - p) <= 4.5 * np.sqrt(p * (1 - p) / times)).all()


def test_more_positions_than_clients_with_a_weight():
    wanted, weights = np.zeros(5, dtype=np.int64), {0: np.array([1.0, 2.0, 0.0, 0.0])}
    assert set(select_batch(wanted, AVAILABLE, weights, np.random.default_rng(0))) == {1, 4}


@pytest.mark.slow
@given(
    st.lists(st.integers(0, 3), max_size=60),
    st.integers(1, 9),
    st.lists(st.integers(0, 6), min_size=4, max_size=4),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_many_batches_at_once_obey_the_rules_of_each(wanted, size, holders, weighted, seed):
    generator = np.random.default_rng(seed)
    available = {p: generator.choice(10, count, replace=False) for p, count in enumerate(holders)}
    weights = {p: generator.integers(1, 9, len(clients)).astype(float) for p, clients in available.items()}
    positions = np.array(wanted, dtype=np.int64)
    batch_of = np.arange(len(positions)) // size
    chosen = select_batches(positions, batch_of, available, weights if weighted else None, generator)
    for batch in np.unique(batch_of).tolist():
        for p in range(4):
            theirs = chosen[(batch_of == batch) & (positions == p)]
            assert np.isin(theirs, available[p] if len(available[p]) else [-1]).all()
            if len(theirs) <= len(available[p]):
                assert len(np.unique(theirs)) == len(theirs)


@pytest.mark.slow
def test_among_very_many_holders_draws_are_even_and_without_replacement():
    available = {0: np.arange(1000)}
    positions = np.zeros(40_000, dtype=np.int64)
    chosen = select_batches(positions, np.arange(40_000) // 4, available, None, np.random.default_rng(0)).reshape(-1, 4)
    assert (np.diff(np.sort(chosen, axis=1), axis=1) > 0).all()
    # Each client is drawn 40 times; the extremes of a thousand such counts lie within six standard deviations.
    assert np.abs(np.bincount(chosen.reshape(-1), minlength=1000) - 40).max() < 6 * 40**0.5
