"""FedEntOpt's sampler: which clients it adds, and which it leaves out because they were invited before."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.federation.availability import Availability
from fedstrata.sampling.entropy import Entropy, EntropyState, entropies, greedy
from fedstrata.sampling.label_counts import LabelCounts

COUNTS = np.array(
    [
        [6, 0, 0, 0],
        [0, 6, 0, 0],
        [3, 3, 0, 0],
        [0, 0, 5, 1],
        [0, 0, 1, 1],
    ]
)


def bits(*counts: float) -> float:
    p = np.array([c for c in counts if c]) / sum(counts)
    return float(-(p * np.log2(p)).sum())


def test_entropies_by_hand():
    expected = [0, 0, 1, bits(5, 1), 1]
    np.testing.assert_allclose(entropies(COUNTS), expected, atol=1e-12)
    np.testing.assert_allclose(entropies(np.array([[2, 1, 1, 0]])), [1.5])


def test_clients_are_added_by_hand():
    """After client 0, client 3 makes the entropy largest; after both, client 1, and then client 4."""
    after_one = [bits(6, 6), bits(9, 3), bits(6, 5, 1), bits(6, 1, 1)]  # of clients 1 to 4
    assert max(after_one) == after_one[2] == pytest.approx(1.325, abs=1e-3)
    after_two = [bits(6, 6, 5, 1), bits(9, 3, 5, 1), bits(6, 6, 2)]  # of clients 1, 2 and 4
    assert max(after_two) == after_two[0]
    assert bits(6, 6, 6, 2) > bits(9, 9, 5, 1)
    assert greedy(COUNTS, 4).tolist() == [0, 3, 1, 4]


@pytest.mark.slow
@given(st.integers(1, 6), st.integers(2, 5), st.integers(0, 999))
def test_each_addition_is_the_best_one(m, classes, seed):
    counts = np.random.default_rng(seed).integers(0, 6, (7, classes))
    chosen = greedy(counts, m)
    assert len(set(chosen.tolist())) == m
    assert chosen[0] == 0
    for place in range(1, m):
        total = counts[chosen[:place]].sum(axis=0)
        others = [k for k in range(7) if k not in chosen[:place]]
        best = max(bits(*(total + counts[k])) if (total + counts[k]).any() else 0.0 for k in others)
        assert entropies(total[None] + counts[chosen[place]])[0] == pytest.approx(best, abs=1e-9)


def started(federation: Any, counts: np.ndarray, recent: list[int] = ()) -> EntropyState:
    known = np.arange(federation.config.clients)
    return EntropyState(LabelCounts(known, np.asarray(counts)), np.array(recent, dtype=np.int64))


def rounds(federation: Any, sampler: Entropy, state: EntropyState, n: int) -> list[list[int]]:
    """Return the clients of n rounds."""
    chosen = []
    for round in range(1, n + 1):
        federation.begin(round)
        selection, state = sampler.select(federation, state, federation.weights)
        chosen.append(selection.clients.tolist())
    return chosen


def test_clients_of_a_pair_of_classes_are_completed(tiny):
    """Clients 0 to 2 hold class 0, and clients 3 to 5 class 1: each round has one of each."""
    federation = tiny(6, clients_per_round=2)
    state = started(federation, [[9, 0]] * 3 + [[0, 2]] * 3)
    for clients in rounds(federation, Entropy(), state, 20):
        assert sorted(client // 3 for client in clients) == [0, 1]


@pytest.mark.slow
def test_the_first_client_is_drawn_uniformly(tiny):
    """All holders of class 0 are equally good, and so are all others: each of the six is invited equally often."""
    federation = tiny(6, clients_per_round=1)
    state = started(federation, [[9, 0]] * 3 + [[0, 2]] * 3)
    drawn = np.bincount(np.concatenate(rounds(federation, Entropy(buffer=0), state, 300)), minlength=6)
    assert drawn.min() > 25  # 50 expected, with a standard deviation of 6.5
    assert drawn.max() < 75


def test_no_client_returns_before_the_buffer_lets_it(tiny):
    """Six clients, two per round, a buffer of four: every three rounds have all six clients."""
    federation = tiny(6, clients_per_round=2)
    chosen = rounds(federation, Entropy(buffer=0.7), started(federation, [[9, 0]] * 3 + [[0, 2]] * 3), 12)
    for k in range(10):
        assert sorted(itertools.chain(*chosen[k : k + 3])) == list(range(6))


def test_without_a_buffer_the_best_clients_return_in_every_round(tiny):
    federation = tiny(4, clients_per_round=3)
    counts = [[5, 0, 0], [0, 5, 0], [0, 0, 5], [5, 0, 0]]
    chosen = rounds(federation, Entropy(buffer=0), started(federation, counts), 10)
    assert all({1, 2} <= set(clients) for clients in chosen)
    fair = rounds(federation, Entropy(buffer=0.25), started(federation, counts), 10)
    assert not all({1, 2} <= set(clients) for clients in fair)


def test_the_buffer_keeps_the_last_clients(tiny):
    federation = tiny(6, clients_per_round=2)
    state = started(federation, np.eye(6, dtype=int), recent=[5, 4, 3])
    selection, state = Entropy(buffer=0.5).select(federation, state, federation.weights)
    assert set(selection.clients.tolist()) <= {0, 1, 2}
    assert state.recent.tolist()[0] == 3
    assert sorted(state.recent.tolist()[1:]) == selection.clients.tolist()


class OnlyTheFirst(Availability):
    """Only some clients are online, and the server knows it."""

    here: int = 3
    announced: bool = True

    def online(self, clients, round, seed):
        return clients < self.here


def test_those_that_waited_longest_return_if_too_few_others_are_there(tiny):
    federation = tiny(6, clients_per_round=2, availability=OnlyTheFirst())
    state = started(federation, [[1, 1]] * 6, recent=[1, 0, 5])
    selection, _ = Entropy().select(federation, state, federation.weights)
    assert selection.clients.tolist() == [1, 2]


def test_all_that_are_there_are_invited_if_they_are_too_few(tiny):
    federation = tiny(6, clients_per_round=4, availability=OnlyTheFirst())
    selection, _ = Entropy().select(federation, started(federation, [[1, 1]] * 6, [0, 1, 2]), federation.weights)
    assert selection.clients.tolist() == [0, 1, 2]
    federation = tiny(6, clients_per_round=4, availability=OnlyTheFirst(here=0))
    selection, _ = Entropy().select(federation, started(federation, [[1, 1]] * 6), federation.weights)
    assert selection.clients.tolist() == []


def test_clients_tell_their_labels(tiny):
    federation = tiny(4, clients_per_round=2)
    state = Entropy().init(federation)
    context = federation.engine.context
    for client in range(4):
        labels = context.data.y_train[torch.from_numpy(context.assignment[client].copy())]
        assert state.labels.counts[client].tolist() == torch.bincount(labels, minlength=3).tolist()
    selection, _ = Entropy().select(federation, state, federation.weights)
    assert selection.metrics["label_entropy"] == pytest.approx(
        bits(*state.labels.counts[selection.clients].sum(axis=0)), abs=1e-9
    )


@pytest.mark.slow
def test_the_labels_of_a_round_are_more_even_than_with_a_uniform_draw():
    table = {
        "data": {"name": "digits", "limit": 600},
        "partition": {"name": "classes", "clients": 20, "per_client": 1},
        "training": {"rounds": 8, "clients_per_round": 5, "local_steps": 1},
        "evaluation": {"every": 0},
    }
    greedily = [record["label_entropy"] for record in fs.run({**table, "method": "fedentopt"})]
    assert min(greedily) > 2.25  # five classes of about equal size: log2(5) = 2.32


def test_tasks_without_classes_are_refused():
    data = fs.from_arrays(np.zeros((9, 2)), np.arange(9.0), np.zeros((3, 2)), np.arange(3.0), task="regression")
    spec = fs.Experiment(method="fedentopt", partition={"name": "iid", "clients": 3})
    with pytest.raises(SpecError, match=r"^method\.client_sampler = .*: needs classes, but the task 'regression' has"):
        fs.prepare(spec, data=data)


def test_private_sizes_are_refused():
    sampler = {"name": "fedstas", "epsilon": 3.0}
    spec = fs.Experiment(method={"name": "fedentopt", "data_sampler": sampler})
    with pytest.raises(SpecError, match=r"^method\.client_sampler.*keeps private"):
        fs.prepare(spec)


@pytest.mark.parametrize("buffer", [-0.1, 1.0])
def test_a_buffer_of_all_clients_is_refused(buffer):
    with pytest.raises(SpecError, match=r"^method\.buffer = "):
        fs.Experiment.from_table({"method": {"name": "fedentopt", "buffer": buffer}})


@pytest.mark.slow
def test_digits_are_learned():
    table = {
        "method": "fedentopt",
        "partition": {"name": "classes", "clients": 20, "per_client": 2},
        "training": {"rounds": 15, "clients_per_round": 5, "local_epochs": 2, "lr": 0.1},
        "evaluation": {"every": 15},
    }
    assert fs.run(table).final_accuracy > 0.75
