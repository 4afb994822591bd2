"""FedSTS without questions: updates stand for gradients, strangers are a stratum."""

from __future__ import annotations

import numpy as np
import pytest

import fedstrata as fs
from fedstrata.aggregation.base import HorvitzThompson
from fedstrata.base import records
from fedstrata.base.errors import SpecError
from fedstrata.sampling import stratified
from fedstrata.sampling.sketches import Compress, restore
from fedstrata.sampling.stratified import Stratified, stratify


def test_one_full_batch_step_gives_the_clients_gradient(tiny):
    federation = tiny(5, clients_per_round=3, batch_size=8, lr=0.25)
    sampler = Stratified(strata=2, refresh="participants", centres=255)
    selection, state = sampler.select(federation, sampler.init(federation), federation.weights)
    replies = federation.fit(*selection.clients.tolist())
    state = sampler.observe(state, replies)
    assert state.known.tolist() == selection.clients.tolist()
    asked = federation.ask(selection.clients.tolist(), Compress(1, federation.weights, 255, 2048))
    for point, reply in zip(state.points, asked.values(), strict=True):
        gradient = restore(reply.centres.numpy(), reply.codes.numpy(), reply.length)
        np.testing.assert_allclose(point, gradient, atol=1e-5)
    assert np.abs(state.points).max() > 0.01


def test_an_update_counts_by_the_step(tiny):
    """Two steps at a rate of their own: the mean of two gradients, about as long as one."""
    federation = tiny(4, clients_per_round=4, batch_size=4, lr=1e-4)
    sampler = Stratified(strata=2, refresh="participants")
    _, state = sampler.select(federation, sampler.init(federation), federation.weights)
    replies = federation.fit()
    assert {reply.steps for reply in replies.values()} == {2}
    few = np.linalg.norm(sampler.observe(state, replies).points, axis=1)
    asked = federation.ask(range(4), Compress(1, federation.weights, 255, 2048))
    gradients = [restore(r.centres.numpy(), r.codes.numpy(), r.length) for r in asked.values()]
    np.testing.assert_allclose(few, np.linalg.norm(gradients, axis=1), rtol=0.05)


@pytest.mark.slow
def test_nobody_is_asked_and_everybody_becomes_known(tiny):
    federation = tiny(12, clients_per_round=4)
    sampler = Stratified(strata=3, refresh="participants")
    state, unknown = sampler.init(federation), []
    for round in range(1, 12):
        federation.begin(round)
        selection, state = sampler.select(federation, state, federation.weights)
        assert federation.log.invited == set()
        unknown.append(selection.metrics.get("strata_unknown", 0))
        sizes = selection.metrics["strata_sizes"]
        assert sum(sizes) == 12
        assert len(sizes) <= 3
        assert unknown[-1] in (0, sizes[-1])
        assert sum(selection.metrics["strata_allocation"]) == 4
        state = sampler.observe(state, federation.fit(*selection.clients.tolist()))
        assert records.encode(records.decode(records.encode(state))) == records.encode(state)
    assert unknown[0] == 12
    assert unknown == sorted(unknown, reverse=True)
    assert unknown[-1] == 0


@pytest.mark.slow
def test_strangers_are_drawn_alike_and_the_aggregate_stays_unbiased(tiny):
    """Six known clients and six strangers: E[a_k] = 1/N for each of them, over 400 rounds."""
    federation = tiny(12, clients_per_round=4)
    sampler = Stratified(strata=3, refresh="participants", replacement=True)
    _, state = sampler.select(federation, sampler.init(federation), federation.weights)
    state = sampler.observe(state, federation.fit(0, 2, 4, 6, 8, 10))
    total, squares = np.zeros(12), np.zeros(12)
    for round in range(2, 402):
        federation.begin(round)
        selection, _ = sampler.select(federation, state, federation.weights)
        a = np.zeros(12)
        places = np.arange(len(selection.clients))
        a[selection.clients] = HorvitzThompson().coefficients(selection, places, np.ones(len(places)))
        total, squares = total + a, squares + a * a
    mean = total / 400
    error = np.sqrt((squares / 400 - mean**2) / 400)
    assert (np.abs(mean - 1 / 12) < 4.5 * error).all()


@pytest.mark.parametrize(("clients", "renewal", "asked"), [(1000, "all", "all"), (1001, "updates", "participants")])
def test_who_is_asked_by_default(clients, renewal, asked):
    config = fs.prepare(fs.Experiment(method="fedsts", partition=fs.IID(clients=clients))).config
    assert Stratified()._renewal(config) == renewal
    assert Stratified(gradients="updates")._renewal(config) == "updates"
    assert Stratified(gradients="asked")._renewal(config) == asked


def test_there_are_no_updates_of_everybody():
    spec = fs.Experiment(method={"name": "fedsts", "refresh": "all", "gradients": "updates"})
    with pytest.raises(
        SpecError,
        match=r"method\.gradients = 'updates': only participants send updates\. Set method\.refresh = 'participants',",
    ):
        fs.prepare(spec)


def test_many_points_are_clustered_by_a_subset(monkeypatch):
    g = np.random.default_rng(0)
    group = g.integers(4, size=400)
    points = (20 * np.eye(4, 6)[group] + g.normal(size=(400, 6))).astype(np.float32)
    whole = stratify(points, 4, 0, 1)
    monkeypatch.setattr(stratified, "FITTED", 50)
    part = stratify(points, 4, 0, 1)
    for found in (whole, part):
        assert len(set(zip(found.tolist(), group.tolist(), strict=True))) == 4


@pytest.mark.slow
def test_it_learns():
    history = fs.run(
        fs.Experiment(
            method={"name": "fedsts", "gradients": "updates", "strata": 5},
            partition=fs.Dirichlet(alpha=0.1, clients=30),
            training=fs.Training(rounds=25, lr=0.2, clients_per_round=10),
        )
    )
    assert history.final_accuracy > 0.75
    assert {record["clients_invited"] for record in history} == {10}
