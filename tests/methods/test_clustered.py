"""Clustered sampling end to end."""

from __future__ import annotations

import pytest
import torch

import fedstrata as fs
from fedstrata.methods.clustered import ClusteredSampling


def spec(method: object, **changes: object) -> fs.Experiment:
    settings: dict = {
        "method": method,
        "partition": fs.Dirichlet(alpha=0.1, clients=20),
        "training": fs.Training(rounds=12, clients_per_round=6, lr=0.1),
    }
    return fs.Experiment(**settings | changes)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [pytest.param(1, marks=pytest.mark.long), 2])
def test_it_learns(algorithm):
    history = fs.run(spec(ClusteredSampling(algorithm=algorithm)))
    assert history.summary["final_accuracy"] > 0.8
    # Six draws, some of them of the same client.
    assert all(1 <= record["clients_invited"] <= 6 for record in history)
    assert len({record["clients_invited"] for record in history}) > 1


@pytest.mark.slow
def test_groups_are_recorded():
    history = fs.run(spec(ClusteredSampling(coordinates=64), training=fs.Training(rounds=3, clients_per_round=6)))
    assert [sum(record["strata_sizes"]) for record in history] == [20] * 3


@pytest.mark.slow
def test_the_named_method_is_fedavg_with_another_sampler():
    """Also the aggregation: draws by size are not weighted by size again."""
    short = fs.Training(rounds=2, clients_per_round=6)
    named = fs.run(spec(ClusteredSampling(algorithm=1), training=short)).params
    spelled = fs.run(
        spec({"name": "fedavg", "client_sampler": {"name": "clustered", "algorithm": 1}}, training=short)
    ).params
    counted = fs.run(
        spec(
            {"name": "fedavg", "client_sampler": {"name": "clustered", "algorithm": 1}, "aggregator": "mean"},
            training=short,
        )
    ).params
    assert all(torch.equal(named[name], spelled[name]) for name in named)
    assert all(torch.allclose(named[name], counted[name], atol=1e-6) for name in named)


@pytest.mark.slow
def test_with_dropout_and_announced_availability():
    for availability in (fs.Bernoulli(p=0.4), fs.Bernoulli(p=0.4, announced=True)):
        history = fs.run(spec("clustered", availability=availability, training=fs.Training(rounds=4)))
        assert len(history) == 4
