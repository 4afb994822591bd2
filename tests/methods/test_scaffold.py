"""SCAFFOLD: every number of its algorithm, computed independently, and what it is for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.base.rng import rng
from fedstrata.federation.messages import Params
from fedstrata.models.model import Model
from fedstrata.objectives.base import Batch, Context, CrossEntropy
from fedstrata.objectives.scaffold import Scaffold

LR, DECAY, BATCH, EPOCHS, SEED = 0.2, 0.01, 2, 2, 5


def spec(clients, availability="always", **training) -> fs.Experiment:
    settings = {"lr": LR, "weight_decay": DECAY, "batch_size": BATCH, "local_epochs": EPOCHS}
    return fs.Experiment(
        seed=SEED,
        partition={"name": "given", "indices": clients},
        availability=availability,
        method="scaffold",
        training={"clients_per_round": len(clients), **settings, **training},
    )


def softmax_gradient(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of the mean cross-entropy of x·wᵀ, where the last column of w is the bias."""
    x = np.column_stack([x, np.ones(len(x))])
    z = x @ w.T
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return p.T @ x / len(y)


def joined(params: dict[str, Tensor]) -> np.ndarray:
    return np.column_stack([params["weight"].double().numpy(), params["bias"].double().numpy()])


class ByHand:
    """Karimireddy et al., Algorithm 1, option II, in float64."""

    def __init__(self, data: fs.Dataset, clients, w: np.ndarray, epochs: int = EPOCHS) -> None:
        self.epochs = epochs
        self.x, self.y = data.x_train.double().numpy(), data.y_train.numpy()
        self.clients, self.w, self.c = clients, w, np.zeros_like(w)
        self.c_k = [np.zeros_like(w) for _ in clients]
        self.steps: list[int] = []

    def round(self, number: int, there: list[int]) -> None:
        models, deltas, self.steps = [], [], []
        for k in there:
            own, w, K = np.array(self.clients[k]), self.w.copy(), 0
            generator = rng(SEED, "batches", number, k)
            for _ in range(self.epochs):
                order = generator.permutation(len(own))
                for begin in range(0, len(own), BATCH):
                    part = own[order[begin : begin + BATCH]]
                    g = softmax_gradient(w, self.x[part], self.y[part]) + DECAY * w
                    w = w - LR * (g - self.c_k[k] + self.c)
                    K += 1
            new = self.c_k[k] - self.c + (self.w - w) / (K * LR)
            deltas.append(new - self.c_k[k])
            self.c_k[k] = new
            models.append(w)
            self.steps.append(K)
        if there:
            self.w = np.mean(models, axis=0)
            # c ← c + (|S| / N) · mean Δc
            self.c = self.c + len(there) / len(self.clients) * np.mean(deltas, axis=0)


def compare(started, hand: ByHand) -> None:
    close = {"rtol": 2e-5, "atol": 2e-6}
    np.testing.assert_allclose(joined(started.state.weights.params), hand.w, **close)
    np.testing.assert_allclose(joined(started.state.objective), hand.c, **close)
    for k, c_k in enumerate(hand.c_k):
        kept = started.store.get(k).get("objective")
        found = np.zeros_like(c_k) if kept is None else joined(kept)
        np.testing.assert_allclose(found, c_k, **close)


def test_two_rounds_of_two_clients_with_unequal_steps(start, seven):
    clients = ((0, 1, 2, 3, 4), (5, 6))
    started = start(spec(clients), seven, nn.Linear(2, 3))
    hand = ByHand(seven, clients, joined(started.state.weights.params))
    for number in (1, 2):
        metrics = started.step()
        hand.round(number, [0, 1])
        assert hand.steps == [6, 2]
        assert metrics["samples"] == 2 * 7
        compare(started, hand)
    assert np.abs(hand.c).max() > 0.01  # zeros would agree with anything


def test_a_single_local_step_is_a_step(start, seven):
    """K = 1: c_k becomes the client's own gradient at w_t."""
    clients = ((0, 1), (5,))
    started = start(spec(clients, local_epochs=1), seven, nn.Linear(2, 3))
    hand = ByHand(seven, clients, joined(started.state.weights.params), epochs=1)
    for number in (1, 2):
        started.step()
        hand.round(number, [0, 1])
        assert hand.steps == [1, 1]
        compare(started, hand)
    assert np.abs(hand.c).max() > 0.01


def test_with_dropout_only_those_who_return_count(start, seven, trace):
    clients = ((0, 1, 2), (3, 4), (5,), (6,))
    there = {0: [1, 3], 1: [1, 4], 2: [1, 3, 4], 3: []}
    started = start(spec(clients, trace(there)), seven, nn.Linear(2, 3))
    hand = ByHand(seven, clients, joined(started.state.weights.params))
    for number in (1, 2, 3, 4):
        metrics = started.step()
        hand.round(number, [k for k, rounds in there.items() if number in rounds])
        assert metrics["clients_returned"] == len(hand.steps)
        compare(started, hand)
    assert 3 not in started.store.clients


@pytest.mark.parametrize(("key", "value"), [("momentum", 0.5), ("clip", 1.0)])
def test_what_breaks_the_control_variates_is_refused(key, value, seven):
    with pytest.raises(SpecError, match=rf"^training\.{key} = {value}: .*SCAFFOLD"):
        fs.run(spec(((0,), (1,)), **{key: value}), data=seven)


class Quadratic(CrossEntropy):
    """½ ‖W x − onehot(y)‖²."""

    def loss(self, model: Model, params: Params, batch: Batch, context: Context) -> Tensor:
        target = torch.nn.functional.one_hot(batch.y, 2).float()
        return 0.5 * (model(params, batch.x) - target).square().sum(dim=1).mean()


class CorrectedQuadratic(Scaffold):
    """The same with control variates."""

    loss = Quadratic.loss


def solution(objective) -> Tensor:
    """W after training on x = 1 of class 0 at one client and x = 2 of class 1 at the other."""
    data = fs.from_arrays([[1.0], [2.0]], [0, 1], [[1.0]], [0], normalize="none")
    experiment = fs.Experiment(
        partition={"name": "given", "indices": ((0,), (1,))},
        method={"name": "scaffold", "objective": objective},
        training={"rounds": 60, "clients_per_round": 2, "local_steps": 10, "lr": 0.1},
        evaluation={"every": 0, "checkpoint_every": 0},
    )
    return fs.run(experiment, data=data, model=nn.Linear(1, 2, bias=False)).params["weight"].flatten()


@pytest.mark.slow
def test_it_reaches_the_optimum_where_fedavg_stays_biased():
    # argmin of ½ |W − (1, 0)|² + ½ |2 W − (0, 1)|² is Σ x t / Σ x² = (1, 2) / 5.
    optimum = torch.tensor([0.2, 0.4])
    torch.testing.assert_close(solution(CorrectedQuadratic()), optimum, atol=1e-5, rtol=0)
    # FedAvg's fixed point by hand: client k moves to o_k + a_k (w − o_k) with a_k = (1 − η x²)^10.
    a = torch.tensor([(1 - 0.1) ** 10, (1 - 0.1 * 4) ** 10])
    local = torch.tensor([[1.0, 0.0], [0.0, 0.5]])
    biased = ((1 - a)[:, None] * local).sum(0) / (1 - a).sum()
    torch.testing.assert_close(solution(Quadratic()), biased, atol=1e-5, rtol=0)
    assert (biased - optimum).norm() > 0.1
