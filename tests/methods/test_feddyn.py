"""FedDyn: every number of its algorithm under dropout, and the optimum that FedAvg misses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.base.rng import torch_seeded
from fedstrata.federation.messages import Params
from fedstrata.models.model import Model
from fedstrata.objectives.base import Batch, Context, CrossEntropy
from fedstrata.objectives.feddyn import Dynamic

LR, STEPS, ALPHA = 0.05, 4, 0.5


class Quadratic(CrossEntropy):
    """½ ‖W x − onehot(y)‖²."""

    def loss(self, model: Model, params: Params, batch: Batch, context: Context) -> Tensor:
        target = torch.nn.functional.one_hot(batch.y, 2).float()
        return 0.5 * (model(params, batch.x) - target).square().sum(dim=1).mean()


class DynamicQuadratic(Dynamic):
    """The same, regularised dynamically."""

    loss = Quadratic.loss


@pytest.fixture
def two() -> fs.Dataset:
    """x = 1 of class 0, x = 2 of class 1, and a third sample."""
    return fs.from_arrays([[1.0], [2.0], [-1.0]], [0, 1, 1], [[1.0]], [0], normalize="none")


def spec(method, clients, availability="always", **training) -> fs.Experiment:
    return fs.Experiment(
        partition={"name": "given", "indices": clients},
        availability=availability,
        method=method,
        training={"clients_per_round": len(clients), "local_steps": STEPS, "lr": LR, **training},
        evaluation={"every": 0, "checkpoint_every": 0},
    )


def test_under_dropout_by_hand(start, two, trace):
    clients, there = ((0,), (1,), (2,)), {0: [1, 2], 1: [1, 4], 2: []}
    method = {"name": "feddyn", "objective": DynamicQuadratic(alpha=ALPHA)}
    with torch_seeded(0, "model"):
        model = nn.Linear(1, 2, bias=False)
    started = start(spec(method, clients, trace(there)), two, model)
    w = started.state.weights.params["weight"].flatten().double()
    h, lam = torch.zeros(2).double(), [torch.zeros(2).double() for _ in clients]
    x, target = [1.0, 2.0, -1.0], torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]).double()
    for number in (1, 2, 3, 4):
        back = [k for k, rounds in there.items() if number in rounds]
        models = []
        for k in back:
            v = w.clone()
            for _ in range(STEPS):
                v = v - LR * (x[k] * (x[k] * v - target[k]) - lam[k] + ALPHA * (v - w))
            lam[k] = lam[k] - ALPHA * (v - w)
            models.append(v)
        if back:
            h = h - ALPHA / 3 * sum(v - w for v in models)  # N = 3, although one of them never returns
            w = sum(models) / len(models) - h / ALPHA
        started.step()
        close = {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(started.state.weights.params["weight"].flatten().double(), w, **close)
        torch.testing.assert_close(started.state.objective["weight"].flatten().double(), h, **close)
        for k in (0, 1):
            kept = started.store.get(k).get("objective")
            found = torch.zeros(2).double() if kept is None else kept["weight"].flatten().double()
            torch.testing.assert_close(found, lam[k], **close)
    assert 2 not in started.store.clients
    assert h.abs().max() > 0.01


@pytest.mark.slow
def test_it_reaches_the_optimum_where_fedavg_stays_biased(two):
    # argmin of ½ |W − (1, 0)|² + ½ |2 W − (0, 1)|² is Σ x t / Σ x² = (1, 2) / 5.
    optimum = torch.tensor([0.2, 0.4])

    def solution(method) -> Tensor:
        experiment = spec(method, ((0,), (1,)), rounds=40, local_steps=10, lr=0.1)
        return fs.run(experiment, data=two, model=nn.Linear(1, 2, bias=False)).params["weight"].flatten()

    dynamic = solution({"name": "feddyn", "objective": DynamicQuadratic(alpha=1.0)})
    torch.testing.assert_close(dynamic, optimum, atol=1e-5, rtol=0)
    assert (solution({"name": "fedavg", "objective": Quadratic()}) - optimum).norm() > 0.1


def test_a_round_in_which_nobody_returns_changes_nothing(start, two, trace):
    started = start(spec("feddyn", ((0,), (1,)), trace({0: [1], 1: []})), two, nn.Linear(1, 2))
    started.step()
    before = started.state
    started.step()
    assert started.state.objective == before.objective
    assert all(torch.equal(w, before.weights.params[name]) for name, w in started.state.weights.params.items())
