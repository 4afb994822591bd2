"""Aggregators that remember clients between rounds."""

from __future__ import annotations

import copy
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.aggregation.base import Aggregator, Mean
from fedstrata.aggregation.memory import Echoes, Intervals, LastUpdates, VarianceReduced
from fedstrata.federation.messages import FitReply, Weights
from fedstrata.sampling.base import Selection


class Absences(Mean):
    """The plain mean, which counts for each client the rounds in which it was invited but did not answer."""

    def init(self, config):
        return {"server": None, "absences": np.zeros(config.clients, dtype=np.int64)}

    def combine(self, weights, state, selection, replies):
        absences = state["absences"].copy()
        absences[np.setdiff1d(selection.clients, list(replies))] += 1
        after, server = super().combine(weights, state["server"], selection, replies)
        return after, {"server": server, "absences": absences}


def spec(aggregator: Aggregator, availability: Any = "always", **training: Any) -> fs.Experiment:
    """Three clients with one, two and four of the seven samples, all invited in each round."""
    return fs.Experiment(
        partition={"name": "given", "indices": [[0], [1, 2], [3, 4, 5, 6]]},
        availability=availability,
        method={"name": "fedavg", "aggregator": aggregator},
        training={"clients_per_round": 3, "local_steps": 2, "lr": 0.5, **training},
        evaluation={"every": 0, "checkpoint_every": 1},
    )


def test_a_memory_sees_who_was_absent_also_if_nobody_answers(start, seven, trace):
    started = start(spec(Absences(), trace({0: [1, 3], 1: [3], 2: [1, 3]})), seven, nn.Linear(2, 3))
    seen = [started.state.aggregator["absences"].tolist()]
    for _ in range(3):
        started.step()
        seen.append(started.state.aggregator["absences"].tolist())
    assert seen == [[0, 0, 0], [0, 1, 0], [1, 2, 1], [1, 2, 1]]


def test_a_client_whose_reply_is_late_or_refused_is_absent(start, seven):
    late = {"name": "always", "deadline": 1.0, "seconds_per_sample": 0.2}
    started = start(spec(Absences(), late, local_steps=None, local_epochs=2), seven, nn.Linear(2, 3))
    started.step()
    assert started.state.aggregator["absences"].tolist() == [0, 0, 1]  # 2 × 4 × 0.2 s is more than 1 s


def answer(weights: Weights, update: Any) -> FitReply:
    model = {name: w + torch.as_tensor(update) for name, w in weights.params.items()}
    return FitReply(Weights(model, weights.buffers), 1, 1, 1, 0.0, {})


class Server:
    """An aggregator with its state, and the global model w of a few numbers."""

    def __init__(self, aggregator: Aggregator, clients: int, numbers: int = 1) -> None:
        self.aggregator, self.clients = aggregator, np.arange(clients)
        model = type("Model", (), {"params": lambda _: {"w": torch.zeros(numbers)}})()
        self.state = aggregator.init(type("Config", (), {"clients": clients, "model": model}))
        self.weights = Weights({"w": torch.zeros(numbers)}, {})

    def round(self, updates: dict[int, Any], invited: Any = None) -> list[float]:
        """Run a round in which some clients answer with updates; return the change of w."""
        chosen = Selection.plain(self.clients if invited is None else np.array(invited), len(self.clients))
        before = self.weights
        replies = {client: answer(before, update) for client, update in updates.items()}
        self.weights, self.state = self.aggregator.combine(before, self.state, chosen, replies)
        return (self.weights.params["w"] - before.params["w"]).tolist()


def test_fedau_by_hand():
    """Two clients, K = 3: the intervals of client 0 are 1, 2, 1, and those of client 1 are 3 (cut off), 2."""
    server = Server(Intervals(cutoff=3), 2)
    assert server.round({0: 4.0}) == [2.0]  # ω = 1 without an interval, divided by N = 2
    assert server.round({}) == [0.0]  # the interval of client 0 has lasted one round
    assert server.round({0: 4.0}) == [2.0]  # ω = 1; the interval of client 1 is cut off after this round
    assert server.round({0: 4.0}) == [pytest.approx(3.0)]  # ω = (1 + 2) / 2
    assert server.round({1: 4.0}) == [pytest.approx(6.0)]  # ω = 3
    assert server.round({1: 4.0}) == [pytest.approx(5.0)]  # ω = (3 + 2) / 2
    assert server.state["intervals"].tolist() == [3, 3]
    assert server.state["rounds"].tolist() == [1 + 2 + 1, 3 + 2 + 1]
    assert server.state["waited"].tolist() == [2, 0]


def test_fedau_counts_a_client_that_is_not_invited_as_absent():
    invited, absent = Server(Intervals(), 3), Server(Intervals(), 3)
    for updates in ({0: 1.0}, {1: 2.0, 2: 1.0}, {0: 3.0}, {1: 1.0}):
        assert invited.round(updates, sorted(updates)) == absent.round(updates)


@pytest.mark.slow
def test_fedau_estimates_the_inverse_of_each_probability():
    """Clients reply with p = 0.9, 0.5 and 0.2: ω is near 1/p, and the mean step is near the mean update."""
    generator, p, updates = np.random.default_rng(0), np.array([0.9, 0.5, 0.2]), np.array([1.0, -2.0, 7.0])
    server, steps = Server(Intervals(), 3), []
    for _ in range(3000):
        there = np.flatnonzero(generator.random(3) < p)
        steps.append(server.round({int(k): updates[k] for k in there})[0])
    omega = server.state["rounds"] / server.state["intervals"]
    np.testing.assert_allclose(omega, 1 / p, rtol=0.1)
    assert np.mean(steps) == pytest.approx(updates.mean(), abs=4 * np.std(steps) / np.sqrt(len(steps)))


def test_mifa_by_hand():
    """Three clients: the last update of each counts, also in a round in which nobody answers."""
    server = Server(LastUpdates(), 3)
    assert server.round({}) == [0.0]
    assert server.round({0: 3.0, 1: 6.0}) == [3.0]  # (3 + 6 + 0) / 3
    assert server.round({2: -6.0}) == [1.0]  # (3 + 6 − 6) / 3
    assert server.round({}) == [1.0]
    assert server.round({0: 0.0, 2: 9.0}) == [5.0]  # (0 + 6 + 9) / 3


def test_fedvarp_by_hand():
    """Three clients: (1/3) Σ y_j + mean of (Δ_k − y_k), and y is replaced afterwards."""
    server = Server(VarianceReduced(), 3)
    assert server.round({0: 3.0, 1: 6.0}) == [4.5]  # y = 0
    assert server.round({2: -6.0}) == [-3.0]  # (3 + 6) / 3 − 6
    assert server.round({}) == [0.0]
    assert server.round({0: 0.0, 2: 9.0}) == [7.0]  # (3 + 6 − 6) / 3 + ((0 − 3) + (9 + 6)) / 2
    assert server.round({1: 6.0}) == [5.0]  # (0 + 6 + 9) / 3 + 0


def test_fedvarp_counts_a_client_that_was_drawn_twice_twice():
    server = Server(VarianceReduced(), 3)
    twice = replace(Selection.plain(np.array([0, 2]), 3), draws=np.array([2, 1]))
    replies = {0: answer(server.weights, 3.0), 2: answer(server.weights, 9.0)}
    after, _ = server.aggregator.combine(server.weights, server.state, twice, replies)
    assert after.params["w"].tolist() == [5.0]


def test_fedvarp_is_unbiased_over_draws_and_nearer_than_the_plain_mean():
    """All ten draws of two from five clients, after a round with updates that are near those of this round."""
    updates = np.array([1.0, -2.0, 7.0, 4.0, 0.0])
    near = updates + np.array([0.5, 0.0, -0.5, 0.25, 0.25])
    draws = list(itertools.combinations(range(5), 2))
    steps = []
    for drawn in draws:
        server = Server(VarianceReduced(), 5)
        server.round(dict(enumerate(near)))
        steps.append(server.round({k: updates[k] for k in drawn})[0])
    assert np.mean(steps) == pytest.approx(updates.mean(), abs=1e-6)
    assert np.std(steps) < 0.2 * np.std([updates[list(drawn)].mean() for drawn in draws])


@pytest.mark.parametrize("method", ["mifa", "fedvarp"])
def test_updates_that_do_not_fit_into_memory_are_refused(method, seven):
    """Three clients with a linear model of nine parameters: 108 bytes."""

    def prepared(limit: float) -> Any:
        return fs.prepare(spec({"name": method, "memory_gb": limit}), data=seven, model=nn.Linear(2, 3))

    prepared(109e-9)
    problem = r"^method\.aggregator\.memory_gb = 1\.07e-07: the last updates of 3 clients need up to 1\.08e-07 GB\. Inc"
    with pytest.raises(fs.SpecError, match=problem):
        prepared(107e-9)


class Gossip(Server):
    """FedAWE's server: clients answer with the change of their own model."""

    def __init__(self, clients: int, clip: float = 1e9) -> None:
        super().__init__(Echoes(clip=clip), clients)

    def models(self) -> list[float]:
        """Return the model at which each client would start."""
        starts = self.aggregator.starts(self.weights, self.state, self.clients.tolist())
        return [starts[client].params["w"].item() for client in starts]

    def round(self, updates: dict[int, float], invited: Any = None) -> list[float]:
        """Run a round in which some clients change their models by updates; return the global model after it."""
        starts = self.aggregator.starts(self.weights, self.state, list(updates))
        replies = {client: answer(starts[client], update) for client, update in updates.items()}
        chosen = Selection.plain(self.clients if invited is None else np.array(invited), len(self.clients))
        self.weights, self.state = self.aggregator.combine(self.weights, self.state, chosen, replies)
        return self.weights.params["w"].tolist()


def test_fedawe_by_hand():
    """Three clients. Client 2 replies in round 4 for the first time, and then starts at the initial model."""
    server = Gossip(3)
    assert server.round({0: 2.0, 1: 4.0}) == [3.0]
    assert server.models() == [3.0, 3.0, 0.0]
    assert server.round({0: 1.0}) == [4.0]
    assert server.round({}) == [4.0]
    assert server.models() == [4.0, 3.0, 0.0]
    assert server.round({1: 1.0, 2: 2.0}) == [(3 + 3 * 1 + 0 + 4 * 2) / 2]  # t − τ is 4 − 1 and 4 − 0
    assert server.models() == [4.0, 7.0, 7.0]
    assert server.aggregator.evaluated(server.weights, server.state).params["w"].item() == 6.0
    assert sorted(server.state["models"]) == [2]  # the model of client 0; the newest is the global model


def test_fedawe_is_algorithm_1_of_the_paper():
    """The paper's clients store x_i and τ_i, and take two steps of rate 0.2 on (x − u_i)² / 2; rounds count from 0."""
    generator, server = np.random.default_rng(2), Gossip(4)
    minima, x, tau, newest = np.array([1.0, -2.0, 7.0, 4.0]), np.zeros(4), np.full(4, -1), 0.0
    for t in range(50):
        active = np.flatnonzero(generator.random(4) < [0.8, 0.5, 0.3, 0.2])
        np.testing.assert_allclose(server.models(), x, atol=1e-3)
        starts = np.array(server.models())
        trained = minima + 0.8**2 * (x - minima)
        reported = x - (t - tau) * (x - trained)
        if len(active):
            newest = reported[active].mean()
            x[active], tau[active] = newest, t
        server.round({int(k): 0.36 * (minima[k] - starts[k]) for k in active})
        assert server.weights.params["w"].item() == pytest.approx(newest, abs=1e-3)
    evaluated = server.aggregator.evaluated(server.weights, server.state).params["w"].item()
    assert evaluated == pytest.approx(x.mean(), abs=1e-3)


def test_fedawe_limits_the_length_of_the_mean_update():
    server = Gossip(2, clip=0.5)
    assert server.round({0: 0.2, 1: 0.4}) == [pytest.approx(0.3)]
    assert server.round({0: 0.9}) == [pytest.approx(0.8)]
    assert server.round({1: -2.0}) == [pytest.approx(-0.2)]  # from 0.3; two rounds count, and −4 is cut to −0.5


def test_fedawe_counts_every_round_once_for_each_client():
    """Proposition 1: until a round in which a client replies, its factors t − τ have the sum t."""
    generator, server = np.random.default_rng(0), Gossip(4)
    factors = np.zeros(4)
    for t in range(1, 60):
        there = np.flatnonzero(generator.random(4) < [0.9, 0.5, 0.2, 0.1])
        last = server.state["last"].copy()
        server.round(dict.fromkeys(there.tolist(), 1.0))
        factors[there] += t - last[there]
        assert (factors[there] == t).all()


@pytest.mark.slow
def test_fedawe_averages_models_without_losing_any_of_them():
    """The sum of the clients' models grows by the sum of (t − τ) Δ; without updates, all models become equal."""
    generator, server, total = np.random.default_rng(1), Gossip(5), 0.0
    for t in range(1, 40):
        there = np.flatnonzero(generator.random(5) < [0.9, 0.7, 0.5, 0.3, 0.2]).tolist()
        updates = {k: float(generator.normal()) for k in there}
        total += sum((t - server.state["last"][k]) * update for k, update in updates.items())
        server.round(updates)
        assert sum(server.models()) == pytest.approx(total, abs=1e-4)
    assert np.ptp(server.models()) > 0.1
    for _ in range(200):
        server.round(dict.fromkeys(np.flatnonzero(generator.random(5) < 0.5).tolist(), 0.0))
    np.testing.assert_allclose(server.models(), total / 5, atol=1e-3)


class Slope(fs.Objective):
    """A loss with the gradient 1 for every parameter, so that two steps with the rate 0.5 change each by −1."""

    def loss(self, model, params, batch, context):
        return sum(w.sum() for w in params.values())


def test_a_client_trains_from_the_model_of_its_last_round(start, seven, trace):
    """In round 4, the clients start at the models after rounds 3, 1 and 0; together, each has made four updates."""
    availability = trace({0: [1, 2, 3, 4], 1: [1, 4], 2: [4]})
    table = {**spec("size", availability).to_spec(), "method": {"name": "fedawe", "clip": 1e9, "objective": Slope()}}
    started, seen = start(fs.Experiment.from_table(table), seven, nn.Linear(2, 3)), []
    started.federation.listener = lambda _, replies: seen.append(replies)
    first = started.state.weights.params["weight"]
    for _ in range(4):
        started.step()
    moved = {client: reply.weights.params["weight"] - first for client, reply in seen[3].items()}
    for client, steps in {0: -4.0, 1: -2.0, 2: -1.0}.items():
        torch.testing.assert_close(moved[client], torch.full((3, 2), steps))
    torch.testing.assert_close(started.state.weights.params["weight"] - first, torch.full((3, 2), -4.0))
    assert started.federation.log.exchanges == 1


def test_codecs_and_fedtan_are_refused_because_clients_start_at_different_models(seven):
    compressed = spec(Echoes()).model_copy(update={"communication": fs.Communication(up="bf16")})
    with pytest.raises(fs.SpecError, match=r"^communication.*does not send the same model to all clients"):
        fs.prepare(compressed, data=seven, model=nn.Linear(2, 3))
    tan = spec(Echoes()).model_copy(update={"method": fs.FedTAN(aggregator=Echoes())})
    norm = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    with pytest.raises(fs.SpecError, match=r"^method\.aggregator = 'fedawe': FedTAN requires that all clients"):
        fs.prepare(tan, data=seven, model=norm)


def test_fedawe_refuses_more_models_than_fit_into_memory(seven):
    """There are at most as many models as rounds: two of 36 bytes."""

    def prepared(limit: float) -> Any:
        table = spec(Echoes(memory_gb=limit), rounds=2)
        return fs.prepare(table, data=seven, model=nn.Linear(2, 3))

    prepared(73e-9)
    with pytest.raises(
        fs.SpecError,
        match=r"^method\.aggregator\.memory_gb = 7e-08: the [0-9]+ models that the server may have to store",
    ):
        prepared(70e-9)


ORACLE = json.loads((Path(__file__).parent / "ibm_fedau.json").read_text())
"""Updates of four clients over eight rounds, and the models that main.py of IBM/fedau makes of them.

The program ran unchanged, with clients that return these updates in the rounds in which they are there.
"""
ALIKE = {"fedau": Intervals(cutoff=ORACLE["cutoff"]), "mifa": LastUpdates(), "fedvarp": VarianceReduced()}
"""The aggregators that IBM/fedau has, too."""


@pytest.mark.parametrize("empty", [False, True], ids=["", "with a round in which nobody answers"])
@pytest.mark.parametrize("method", ALIKE)
def test_each_equals_the_program_of_ibm(method, empty):
    server, there = Server(ALIKE[method], 4, numbers=3), np.array(ORACLE["there"])
    if empty:
        there[ORACLE["empty_round"] - 1] = False
    for updates, here, expected in zip(
        ORACLE["deltas"], there, ORACLE[f"{method}, empty round" if empty else method], strict=True
    ):
        server.round({int(k): updates[k] for k in np.flatnonzero(here)})
        np.testing.assert_allclose(server.weights.params["w"], expected, atol=1e-6)


@pytest.mark.parametrize("aggregator", [*ALIKE, {"name": "fedawe", "clip": 1e9}])
def test_with_everybody_present_each_is_the_plain_mean(aggregator, seven):
    linear = nn.Linear(2, 3, bias=False)
    own, mean = (
        fs.run(spec(each, rounds=3), data=seven, model=copy.deepcopy(linear)).params["weight"]
        for each in (aggregator, "mean")
    )
    torch.testing.assert_close(own, mean)


@pytest.mark.slow
def test_fedawe_learns_digits_with_dropouts():
    """With the settings of the page, but fewer rounds."""
    table = {
        "data": "digits",
        "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 10},
        "model": {"name": "mlp", "hidden": [16]},
        "method": "fedawe",
        "availability": {"name": "label-correlated", "mean": 0.5},
        "training": {"rounds": 40, "clients_per_round": 10, "local_steps": 10, "schedule": "cosine", "workers": 1},
    }
    assert fs.run(table).final_accuracy > 0.6
