"""FedAvg: its arithmetic by hand, and what aggregation does to buffers and to those who are absent."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedstrata as fs

CLIENTS = ((0, 1, 2, 3), (4, 5), (6,))


def spec(availability="always", clients=CLIENTS, **training) -> fs.Experiment:
    settings = {"lr": 0.3, "local_epochs": 1, "batch_size": 10, "clients_per_round": len(clients), **training}
    return fs.Experiment(
        partition={"name": "given", "indices": clients}, availability=availability, method="fedavg", training=settings
    )


def one_step(params: dict[str, Tensor], data: fs.Dataset, own: tuple[int, ...], lr: float) -> dict[str, Tensor]:
    """One full-batch step with autograd alone."""
    leaves = {name: w.double().requires_grad_(True) for name, w in params.items()}
    x, y = data.x_train[list(own)].double(), data.y_train[list(own)]
    F.cross_entropy(x @ leaves["weight"].T + leaves["bias"], y).backward()
    return {name: (w - lr * w.grad).detach() for name, w in leaves.items()}


def mean(models: list[dict[str, Tensor]], weights: list[float]) -> dict[str, Tensor]:
    return {name: sum(a * model[name] for a, model in zip(weights, models, strict=True)) for name in models[0]}


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, w in expected.items():
        torch.testing.assert_close(found[name].double(), w.double(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("there", "weights"),
    [([0, 1, 2], [4 / 7, 2 / 7, 1 / 7]), ([0, 2], [4 / 5, 1 / 5]), ([1], [1.0])],
    ids=["all", "two", "one"],
)
def test_a_round_is_the_mean_by_size_over_those_who_returned(start, seven, trace, there, weights):
    started = start(spec(trace({k: [1] for k in there})), seven, nn.Linear(2, 3))
    before = started.state.weights.params
    metrics = started.step()
    close(started.state.weights.params, mean([one_step(before, seven, CLIENTS[k], 0.3) for k in there], weights))
    assert (metrics["clients_invited"], metrics["clients_returned"]) == (3, len(there))
    assert metrics["clients_dropped"] == 3 - len(there)
    assert metrics["samples"] == sum(len(CLIENTS[k]) for k in there)


def test_nobody_returns_and_nothing_moves(start, seven, trace):
    started = start(spec(trace({0: [2], 1: [2]})), seven, nn.Linear(2, 3))
    before = {name: w.clone() for name, w in started.state.weights.params.items()}
    assert started.step()["train_loss"] is None
    assert all(torch.equal(w, before[name]) for name, w in started.state.weights.params.items())
    started.step()
    assert not torch.equal(started.state.weights.params["weight"], before["weight"])


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3))


def test_running_statistics_are_averaged_and_counters_take_the_largest(start, seven):
    # Two clients that take two steps and one: a single sample could not train BatchNorm.
    clients = ((0, 1, 2, 3), (4, 5))
    together = start(spec(clients=clients, batch_size=2), seven, net())
    together.step()
    found = together.state.weights.buffers
    # By hand: momentum 0.1 from mean 0; the first client's two batches depend on the order that it draws.
    alone = start(spec(clients=clients[:1], batch_size=2), seven, net())
    alone.step()
    first = alone.state.weights.buffers["0.running_mean"].double()
    second = 0.1 * seven.x_train[[4, 5]].double().mean(dim=0)
    torch.testing.assert_close(found["0.running_mean"].double(), 4 / 6 * first + 2 / 6 * second, rtol=1e-6, atol=1e-7)
    counter = found["0.num_batches_tracked"]
    assert (int(counter), counter.dtype) == (2, torch.int64)  # not the mean 1.67, and no float
