"""FedSampling end to end: everybody trains on a few samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.methods.fedsampling import FedSampling
from fedstrata.methods.power_of_choice import PowerOfChoice


@pytest.mark.slow
def test_a_round_trains_on_the_wanted_number_of_samples():
    """K = 300 of 1,437: the mean over 40 rounds within four standard deviations of a binomial mean."""
    spec = fs.Experiment(
        method=FedSampling(samples=300),
        partition=fs.Dirichlet(alpha=0.3, clients=15),
        training=fs.Training(rounds=40, lr=0.1, local_epochs=1),
        evaluation=fs.Evaluation(every=0),
    )
    history = fs.run(spec)
    seen = np.array([record["samples"] for record in history])
    p = 300 / 1437
    assert abs(seen.mean() - 300) < 4 * np.sqrt(1437 * p * (1 - p) / 40)
    assert {record["clients_invited"] for record in history} == {15}
    assert history.summary["final_accuracy"] > 0.8


@pytest.mark.slow
def test_keeping_everything_in_one_step_is_centralised_gradient_descent():
    """K above what there is, one full batch each: the update weighted by what was kept is the pooled gradient step."""
    training = fs.Training(rounds=3, batch_size=5000, lr=0.2, local_epochs=1)
    many = fs.Experiment(
        method=FedSampling(samples=10**6), partition=fs.Dirichlet(alpha=0.5, clients=9), training=training
    )
    one = fs.Experiment(method="fedavg", partition=fs.IID(clients=1), training=training)
    apart, together = fs.run(many).params, fs.run(one).params
    assert all(torch.allclose(apart[name], together[name], atol=2e-6) for name in apart)


@pytest.mark.slow
def test_it_learns_under_privacy():
    with pytest.warns(UserWarning, match="is clipped for 6 of 15 clients"):
        history = fs.run(
            fs.Experiment(
                method=FedSampling(samples=400, epsilon=3.0, bound=100),
                partition=fs.Dirichlet(alpha=0.3, clients=15),
                training=fs.Training(rounds=10, lr=0.1),
            )
        )
    assert history.summary["final_accuracy"] > 0.7
    assert len({record["estimated_samples"] for record in history}) == 1


@pytest.mark.slow
def test_power_of_choice_learns():
    history = fs.run(
        fs.Experiment(
            method=PowerOfChoice(candidates=8),
            partition=fs.Dirichlet(alpha=0.3, clients=15),
            training=fs.Training(rounds=12, clients_per_round=4, lr=0.1),
        )
    )
    assert history.summary["final_accuracy"] > 0.7
    assert {record["clients_invited"] for record in history} == {8}


@pytest.mark.slow
def test_fedprox_by_name_is_fedavg_with_its_objective():
    short = fs.Training(rounds=2)
    named = fs.run(fs.Experiment(method={"name": "fedprox", "mu": 0.5}, training=short)).params
    spelled = fs.run(
        fs.Experiment(method={"name": "fedavg", "objective": {"name": "fedprox", "mu": 0.5}}, training=short)
    ).params
    assert all(torch.equal(named[name], spelled[name]) for name in named)


@pytest.mark.slow
def test_clients_with_one_sample_and_batchnorm_take_no_step():
    """FedSampling often leaves a client a single sample: nobody's failure."""
    norm = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    spec = fs.Experiment(
        data={"name": "digits", "limit": 120},
        method={"name": "fedsampling", "samples": 16},
        partition=fs.IID(clients=8),
        training={"rounds": 6, "local_epochs": 1},
    )
    history = fs.run(spec, model=norm)
    assert [record["clients_failed"] for record in history] == [0] * 6
    assert history.total("samples") > 0
