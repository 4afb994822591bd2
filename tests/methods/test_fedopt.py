"""FedAvgM and the adaptive methods: FedAvg with a server optimiser."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs

SERVERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fedavgm": ({"beta": 0.5, "server_lr": 0.3}, {"optimizer": "sgd", "momentum": 0.5, "lr": 0.3}),
    "fedadagrad": ({"server_lr": 0.3, "tau": 0.1}, {"optimizer": "adagrad", "lr": 0.3, "eps": 0.1}),
    "fedadam": (
        {"server_lr": 0.3, "betas": [0.5, 0.8], "tau": 0.1},
        {"optimizer": "adam", "lr": 0.3, "betas": [0.5, 0.8], "eps": 0.1},
    ),
    "fedyogi": (
        {"server_lr": 0.3, "betas": [0.5, 0.8], "tau": 0.1},
        {"optimizer": "yogi", "lr": 0.3, "betas": [0.5, 0.8], "eps": 0.1},
    ),
}
"""The settings of each method, and those of the same server optimiser with FedAvg."""


def run(method: object, rounds: int = 3) -> fs.History:
    training = {"rounds": rounds, "local_steps": 2, "clients_per_round": 4}
    table = {"partition": {"name": "dirichlet", "clients": 6}, "training": training, "method": method}
    return fs.run(fs.Experiment.from_table(table))


@pytest.mark.slow
@pytest.mark.parametrize("method", SERVERS)
def test_each_method_is_fedavg_with_its_server_optimiser(method: str) -> None:
    own, server = SERVERS[method]
    here = run({"name": method, **own})
    there = run({"name": "fedavg", "aggregator": {"name": "size", "server": server}})
    assert all(torch.equal(here.params[name], w) for name, w in there.params.items())
    default = run(method)
    assert any(not torch.equal(default.params[name], w) for name, w in there.params.items())


def two_clients(method: object) -> float:
    """Train one weight w from 1 for two rounds, on two clients with the losses w² and (w − 4)²; return w."""
    x = np.array([[-1.0], [1.0]])
    data = {
        "x_train": np.concatenate([x, x]),
        "y_train": np.array([0.0, 0.0, -4.0, 4.0]),
        "x_test": x,
        "y_test": x[:, 0],
    }
    table = {
        "task": {"name": "regression", "mean": [0.0], "deviation": [1.0]},
        "partition": {"name": "given", "indices": [[0, 1], [2, 3]]},
        "training": {"rounds": 2, "local_steps": 1, "batch_size": 2, "lr": 0.1},
        "method": method,
    }
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    history = fs.run(fs.Experiment.from_table(table), data=data, model=model)
    return float(history.params["weight"])


def test_two_rounds_of_fedavgm_by_hand() -> None:
    """The gradients of the squared errors at w are 2 w and 2 (w − 4), so the mean update is −0.2 (w − 2)."""
    weight = two_clients({"name": "fedavgm", "beta": 0.5, "server_lr": 1.0})
    first = -0.2 * (1 - 2)
    after = 1 + first
    second = 0.5 * first - 0.2 * (after - 2)
    assert weight == pytest.approx(after + second, rel=1e-6)


def test_two_rounds_of_fedadam_by_hand() -> None:
    weight = two_clients({"name": "fedadam", "server_lr": 0.1, "betas": [0.5, 0.8], "tau": 0.01})
    w, m, v = 1.0, 0.0, 0.01**2
    for _ in range(2):
        delta = -0.2 * (w - 2)
        m, v = 0.5 * m + 0.5 * delta, 0.8 * v + 0.2 * delta**2
        w += 0.1 * m / (v**0.5 + 0.01)
    assert weight == pytest.approx(w, rel=1e-5)
