"""SFL: the model goes round, and nothing is averaged."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.runs.preparation import prepare


def spec_of(**training: object) -> fs.Experiment:
    return fs.Experiment.from_table(
        {
            "partition": {"name": "given", "indices": [[0, 1], [2, 3, 4], [5, 6]]},
            "method": "sfl",
            "training": {"local_epochs": 1, "lr": 0.2, "batch_size": 8, **training},
        }
    )


def test_three_clients_by_hand(start, seven):
    """One full batch a client, in the order of the journey: plain gradient steps one after another."""
    started = start(spec_of(), seven, nn.Linear(2, 3))
    w, b = (tensor.clone().requires_grad_() for tensor in started.state.weights.params.values())
    orders = []
    for round in (1, 2, 3, 4):
        metrics = started.step()
        order = started.federation.rng("journey").permutation(3).tolist()
        orders.append(order)
        assert metrics["hops"] == metrics["transfers"] == 3
        assert metrics["samples"] == 7
        for client in order:
            part = [[0, 1], [2, 3, 4], [5, 6]][client]
            x, y = seven.inputs(np.array(part)), seven.y_train[part]
            gradients = torch.autograd.grad(F.cross_entropy(x @ w.T + b, y), [w, b])
            w, b = ((p - 0.2 * g).detach().requires_grad_() for p, g in zip((w, b), gradients, strict=True))
        got = list(started.state.weights.params.values())
        torch.testing.assert_close(got, [w.detach(), b.detach()], rtol=1e-5, atol=1e-6)
        assert metrics["client_bytes"] == round * 9 * 4
    assert any(order != [0, 1, 2] for order in orders)


def test_journeys_differ_and_may_leave_clients_out(start, seven):
    started = start(spec_of(clients_per_round=2), seven, nn.Linear(2, 3))
    journeys = set()
    for _ in range(12):
        assert started.step()["clients_returned"] == 2
        chosen = started.federation.log.invited
        journeys.add(tuple(started.federation.rng("journey").permutation(sorted(chosen)).tolist()))
    assert len(journeys) > 2


def test_whoever_is_away_is_passed_over(start, seven, trace):
    table = spec_of().to_spec() | {"availability": trace({0: [1], 2: [1]})}
    started = start(fs.Experiment.from_table(table), seven, nn.Linear(2, 3))
    metrics = started.step()
    assert metrics["clients_dropped"] == 1
    assert metrics["samples"] == 4
    before = started.state.weights
    assert started.step()["train_loss"] is None
    assert started.state.weights is before


@pytest.mark.slow
def test_on_one_class_a_client_it_forgets(seven):
    """What the table of the paper shows: the model knows the class that it saw last."""
    spec = fs.Experiment.from_table(
        {
            "partition": {"name": "classes", "per_client": 1, "clients": 10},
            "method": "sfl",
            "model": {"name": "mlp", "hidden": [32]},
            "training": {"rounds": 2, "local_epochs": 2, "lr": 0.1},
        }
    )
    assert fs.run(spec)[-1]["accuracy"] < 0.3


def test_statistics_of_ones_own_do_not_travel(seven):
    with pytest.raises(SpecError, match=r"training\.batch_norm"):
        prepare(spec_of(batch_norm="local"), data=seven)


@pytest.mark.parametrize(
    ("sampler", "clients"),
    [
        ({"name": "clustered", "algorithm": 2}, 100),
        ("fedssar", 100),
        ({"name": "fedsts", "gradients": "updates"}, 100),
        ({"name": "fedsts", "refresh": "participants"}, 100),  # by updates, unless it says otherwise
        ("fedsts", 1001),  # by participants' updates, unless it says otherwise
    ],
    ids=str,
)
def test_a_relay_has_no_models_to_learn_from(sampler, clients):
    spec = fs.Experiment(method={"name": "sfl", "client_sampler": sampler}, partition=fs.IID(clients=clients))
    with pytest.raises(
        SpecError,
        match=r"^method\.client_sampler = '.*': learns from the model of every client, but SFL returns only one model",
    ):
        fs.prepare(spec)


def test_a_sampler_that_asks_participants_hears_who_they_were(start):
    sampler = {"name": "fedsts", "refresh": "participants", "gradients": "asked", "strata": 2}
    training = {"clients_per_round": 2, "local_epochs": 1, "lr": 0.05}
    spec = fs.Experiment(
        method={"name": "sfl", "client_sampler": sampler}, partition=fs.IID(clients=6), training=training
    )
    started = start(spec)
    started.step()
    assert len(started.state.clients.participants) == 2
