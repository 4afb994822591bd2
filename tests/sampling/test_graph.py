"""FedGS's sampler: the graph of label similarity, the choice of clients, and the balance of their counts."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.federation.availability import Availability
from fedstrata.sampling import graph
from fedstrata.sampling.graph import Graph, GraphState, distances, farthest
from fedstrata.sampling.label_counts import LabelCounts


def edge(similarity: float, sigma: float) -> float:
    return math.exp(-(similarity**2) / sigma)


def test_distances_by_hand():
    """Cosines 0.8 between clients 0 and 1, 0.6 between 1 and 2, and 0 between 0 and 2; divided by 0.8."""
    counts = np.array([[5, 0], [4, 3], [0, 7]])
    near, far = edge(1.0, 0.5), edge(0.75, 0.5)
    expected = np.array([[0, near, near + far], [near, 0, far], [near + far, far, 0]]) / (near + far)
    np.testing.assert_allclose(distances(counts, 0.1, 0.5), expected)


def test_clients_without_a_path_are_farthest_apart():
    """With ε = 0.8, only clients 0 and 1 are joined; the others are as far apart as an edge of similarity ε."""
    near = edge(1.0, 0.5) / edge(0.8, 0.5)
    apart = distances(np.array([[5, 0], [4, 3], [0, 7]]), 0.8, 0.5)
    np.testing.assert_allclose(apart, [[0, near, 1], [near, 0, 1], [1, 1, 0]])


@pytest.mark.parametrize("counts", [[[3, 1]] * 3, [[0, 0]] * 3, [[3, 0], [0, 0], [0, 0]]])
def test_clients_without_any_difference_are_equally_far_apart(counts):
    apart = distances(np.array(counts), 0.01, 0.1)
    np.testing.assert_allclose(apart, 1 - np.eye(3))


def value(apart: np.ndarray, alpha: float, times: np.ndarray, chosen: Any) -> float:
    """α d(S) − Var(v + s)."""
    after = times.astype(float)
    after[list(chosen)] += 1
    pairs = [apart[i, j] for i, j in itertools.combinations(sorted(chosen), 2)]
    return alpha * (float(np.mean(pairs)) if pairs else 0.0) - float(np.var(after, ddof=1))


def solved(apart: np.ndarray, alpha: float, times: np.ndarray, m: int) -> np.ndarray:
    return farthest(alpha * apart, (2 * (times - times.mean()) + 1) / (len(times) - 1), m)


@pytest.mark.slow
@given(st.integers(1, 7), st.sampled_from([0.0, 0.1, 2.0]), st.integers(0, 999))
def test_no_exchange_of_two_clients_is_better(m, alpha, seed):
    generator = np.random.default_rng(seed)
    apart = distances(generator.integers(0, 4, (7, 3)), 0.01, 0.1)
    times = generator.integers(0, 4, 7)
    chosen = set(solved(apart, alpha, times, m).tolist())
    assert len(chosen) == m
    best = value(apart, alpha, times, chosen)
    for i, j in itertools.product(chosen, set(range(7)) - chosen):
        assert value(apart, alpha, times, chosen - {i} | {j}) <= best + 1e-7


@pytest.mark.slow
def test_the_choice_is_nearly_always_the_best_one():
    generator, best = np.random.default_rng(0), 0
    for _ in range(100):
        apart, times = distances(generator.integers(0, 4, (9, 3)), 0.01, 0.1), generator.integers(0, 3, 9)
        mine = value(apart, 1.0, times, solved(apart, 1.0, times, 4))
        exact = max(value(apart, 1.0, times, s) for s in itertools.combinations(range(9), 4))
        best += mine > exact - 1e-9
        assert mine > exact - 0.05
    assert best >= 90


def started(federation: Any, counts: Any, times: list[int] | None = None) -> GraphState:
    known = np.arange(federation.config.clients)
    return GraphState(LabelCounts(known, np.asarray(counts)), np.array(times or [0] * len(known)))


def rounds(federation: Any, sampler: Graph, state: GraphState, n: int) -> tuple[list[list[int]], GraphState]:
    """Return the clients of n rounds, and the last state."""
    chosen = []
    for round in range(1, n + 1):
        federation.begin(round)
        selection, state = sampler.select(federation, state, federation.weights)
        chosen.append(selection.clients.tolist())
    return chosen, state


PAIRS = [[9, 0, 0], [8, 0, 0], [0, 5, 0], [0, 9, 0], [0, 0, 3], [0, 0, 2]]
"""Two clients of each of three classes."""


@pytest.mark.slow
def test_clients_of_a_round_are_far_apart(tiny):
    federation = tiny(6, clients_per_round=3)
    chosen, _ = rounds(federation, Graph(), started(federation, PAIRS), 20)
    assert all(sorted(client // 2 for client in clients) == [0, 1, 2] for clients in chosen)


def test_counts_differ_by_at_most_one(tiny):
    federation = tiny(6, clients_per_round=4)
    state = started(federation, PAIRS)
    for alpha in (0.0, 0.1):
        _, after = rounds(federation, Graph(alpha=alpha), state, 7)
        assert after.times.sum() == 28
        assert after.times.max() - after.times.min() <= 1


def test_a_large_alpha_gives_up_the_balance(tiny):
    """Client 0 alone has its label, and the other clients the other one: it is in the farthest set of two always."""
    federation = tiny(4, clients_per_round=2)
    state = started(federation, [[4, 0], [0, 4], [0, 4], [0, 4]])
    far, _ = rounds(federation, Graph(alpha=1000.0), state, 9)
    assert all(0 in clients for clients in far)
    _, fair = rounds(federation, Graph(alpha=0.1), state, 8)
    assert fair.times.tolist() == [4, 4, 4, 4]


class Sometimes(Availability):
    """Client 0 is online in every fourth round only, and the server knows it."""

    announced: bool = True

    def online(self, clients, round, seed):
        return (clients != 0) | (round % 4 == 0)


def test_a_client_that_is_rarely_there_catches_up(tiny):
    """Of 40 rounds of one client each, client 0 is there in 10, and is chosen in all of them that it needs."""
    federation = tiny(4, clients_per_round=1, availability=Sometimes())
    _, after = rounds(federation, Graph(), started(federation, [[1, 1]] * 4), 40)
    assert after.times.tolist() == [10, 10, 10, 10]


def test_replies_are_counted_only_if_it_is_set(tiny):
    federation = tiny(4, clients_per_round=2)
    state = started(federation, [[1, 1]] * 4)
    selection, after = Graph(counted="returned").select(federation, state, federation.weights)
    assert after.times.tolist() == [0] * 4
    first = int(selection.clients[0])
    later = Graph(counted="returned").observe(after, {first: None})
    assert later.times.sum() == later.times[first] == 1
    _, invited = Graph().select(federation, state, federation.weights)
    assert np.flatnonzero(invited.times).tolist() == selection.clients.tolist()
    assert Graph().observe(invited, {first: None}) is invited


def test_nobody_is_there(tiny):
    class Nobody(Availability):
        announced: bool = True

        def online(self, clients, round, seed):
            return clients < 0

    federation = tiny(4, clients_per_round=2, availability=Nobody())
    selection, _ = Graph().select(federation, started(federation, [[1, 1]] * 4), federation.weights)
    assert selection.clients.tolist() == []


def test_metrics_by_hand(tiny):
    federation = tiny(6, clients_per_round=3)
    selection, _ = Graph().select(federation, started(federation, PAIRS, [5, 5, 0, 5, 0, 5]), federation.weights)
    assert {2, 4} < set(selection.clients.tolist())
    metrics = dict(selection.metrics)
    assert metrics["client_distance"] == pytest.approx(1.0)
    assert (metrics["most_invited"], metrics["least_invited"]) == (6, 1)


def test_tasks_without_classes_and_too_many_clients_are_refused(monkeypatch):
    data = fs.from_arrays(np.zeros((9, 2)), np.arange(9.0), np.zeros((3, 2)), np.arange(3.0), task="regression")
    spec = fs.Experiment(method="fedgs", partition={"name": "iid", "clients": 3})
    with pytest.raises(SpecError, match=r"^method\.client_sampler = .*: needs classes, but the task 'regression' has"):
        fs.prepare(spec, data=data)
    monkeypatch.setattr(graph, "MOST_CLIENTS", 9)
    with pytest.raises(SpecError, match=r"paths between 10 clients\. Use at most 9 clients"):
        fs.prepare(fs.Experiment(method="fedgs", partition={"name": "iid", "clients": 10}))


@pytest.mark.slow
def test_digits_are_learned():
    table = {
        "method": "fedgs",
        "partition": {"name": "classes", "clients": 20, "per_client": 2},
        "training": {"rounds": 15, "clients_per_round": 5, "local_epochs": 2, "lr": 0.1},
        "evaluation": {"every": 15},
    }
    assert fs.run(table).final_accuracy > 0.75
