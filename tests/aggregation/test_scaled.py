"""Aggregators that change the length of updates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.aggregation.scaled import Extrapolated, Normalised, gradient_weights
from fedstrata.federation.messages import FitReply, Weights
from fedstrata.sampling.base import Selection

LIMIT = {"rounds": 3, "clients_per_round": 3, "workers": 1, "lr": 0.5, "batch_size": 2}


def answer(update: Any, samples: int = 1, steps: int = 1, statistic: float = 0.0) -> FitReply:
    model = Weights({"w": torch.as_tensor(update)}, {"mean": torch.tensor([statistic])})
    return FitReply(model, samples, steps, samples, 0.0, {})


def combined(aggregator: Any, replies: list[FitReply], state: Any) -> tuple[Weights, Any]:
    """Return what an aggregator makes of w = 0 and the replies of clients 0, 1, …"""
    weights = Weights({"w": torch.zeros_like(replies[0].weights.params["w"])}, {"mean": torch.zeros(1)})
    chosen = Selection.plain(np.arange(len(replies)), len(replies))
    return aggregator.combine(weights, state, chosen, dict(enumerate(replies)))


def test_fednova_by_hand():
    """Clients of 1 and 3 samples take 2 and 4 steps: p = 1/4 and 3/4, and τ_eff = (2 + 3 · 4) / 4 = 3.5."""
    state = {"server": None, "momentum": 0.0}
    replies = [answer([2.0, 6.0], 1, 2, 1.0), answer([4.0, -8.0], 3, 4, 5.0)]
    after, same = combined(Normalised(), replies, state)
    assert after.params["w"].tolist() == [3.5 * (1 / 4 + 3 / 4), 3.5 * (3 / 4 - 2 * 3 / 4)]
    assert after.buffers["mean"].tolist() == [4.0]  # (1 + 3 · 5) / 4, as in FedAvg
    assert same == state


def test_fednova_with_momentum_by_hand():
    """ρ = 0.5: two steps weigh 1 + 1.5 = 2.5, and three steps 1 + 1.5 + 1.75 = 4.25."""
    replies = [answer([5.0], 1, 2), answer([8.5], 1, 3)]
    after, _ = combined(Normalised(), replies, {"server": None, "momentum": 0.5})
    assert after.params["w"].item() == pytest.approx((2.5 + 4.25) / 2 * (5 / 2.5 + 8.5 / 4.25) / 2)


def test_a_client_without_a_step_counts_as_one_that_does_not_move():
    after, _ = combined(Normalised(), [answer([0.0], 1, 0), answer([6.0], 1, 3)], {"server": None, "momentum": 0.9})
    length = 1 + 1.9 + 2.71
    assert after.params["w"].item() == pytest.approx(length / 2 * (6 / length) / 2)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_weights_of_gradients_are_those_of_sgd_with_momentum(momentum):
    """PyTorch's SGD moves by them if each gradient is −1 and the learning rate 1."""
    w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([w], lr=1.0, momentum=momentum)
    for steps in range(1, 8):
        w.grad = torch.full_like(w, -1.0)
        optimizer.step()
        assert gradient_weights(np.array([steps]), momentum)[0] == pytest.approx(w.item())


@pytest.mark.slow
def test_fednova_finds_the_minimum_of_the_mean_loss_and_fedavg_does_not():
    """Client k takes τ_k steps on (w − e_k)² / 2: FedAvg ends near Σ τ_k e_k / Σ τ_k, FedNova near Σ e_k / 3."""
    minima, steps, lr = (0.0, 3.0, 9.0), (2, 4, 20), 2e-3

    def limit(aggregator: Any, state: Any) -> float:
        w = 0.0
        for _ in range(500):
            moved = [(e - w) * (1 - (1 - lr) ** tau) for e, tau in zip(minima, steps, strict=True)]
            replies = [answer([u], 1, tau) for u, tau in zip(moved, steps, strict=True)]
            after, _ = combined(aggregator, replies, state)
            w += after.params["w"].item()
        return w

    assert limit(Normalised(), {"server": None, "momentum": 0.0}) == pytest.approx(4.0, abs=0.05)
    assert limit(fs.MeanBySize(), None) == pytest.approx((12 + 180) / 26, abs=0.05)


def spec(method: Any, **more: Any) -> dict[str, Any]:
    return {
        "partition": {"name": "given", "indices": [[0], [1, 2], [3, 4, 5, 6]]},
        "method": method,
        "training": {**LIMIT, **more},
        "evaluation": {"every": 0},
    }


def trained(method: Any, seven: fs.Dataset, **more: Any) -> torch.Tensor:
    linear = nn.Linear(2, 3, bias=False)
    linear.weight.data.fill_(0.1)
    return fs.run(spec(method, **more), data=seven, model=linear).params["weight"]


@pytest.mark.slow
def test_fednova_is_fedavg_if_all_clients_take_as_many_steps(seven):
    for momentum in (0.0, 0.9):
        nova, avg = (trained(method, seven, local_steps=3, momentum=momentum) for method in ("fednova", "fedavg"))
        torch.testing.assert_close(nova, avg)
    assert not torch.allclose(*(trained(method, seven, local_epochs=3) for method in ("fednova", "fedavg")))


@pytest.mark.parametrize(
    ("training", "problem"),
    [
        ({"optimizer": "adamw"}, r"^training\.optimizer = 'adamw': the aggregator 'fednova' works only with SGD"),
        (
            {"momentum": 0.9, "optimizer_state": "keep"},
            r"^training\.optimizer_state = 'keep': the aggregator 'fednova'",
        ),
    ],
)
def test_fednova_refuses_steps_that_it_cannot_weigh(training, problem, seven):
    with pytest.raises(fs.SpecError, match=problem):
        trained("fednova", seven, **training)


def extrapolated(*updates: Any, eps: float = 1e-9) -> list[float]:
    aggregator = Extrapolated(eps=eps)
    after, _ = combined(aggregator, [answer(update) for update in updates], aggregator.init(None))
    return after.params["w"].tolist()


def test_fedexp_by_hand():
    """Δ = (4, 2) and (−2, 0): their squared norms are 20 and 4, and that of the mean (1, 1) is 2."""
    eta = 24 / (2 * 2 * (2 + 0.5))
    assert extrapolated([4.0, 2.0], [-2.0, 0.0], eps=0.5) == [pytest.approx(eta), pytest.approx(eta)]
    assert extrapolated([4.0, 2.0], [-2.0, 0.0], eps=10.0) == [1.0, 1.0]  # 24 / 48 is less than 1


def test_fedexp_counts_a_client_that_was_drawn_twice_twice():
    weights, replies = Weights({"w": torch.zeros(1)}, {}), {0: answer([3.0]), 2: answer([-4.0])}
    twice = replace(Selection.plain(np.array([0, 2]), 3), draws=np.array([2, 1]))
    aggregator = Extrapolated(eps=1e-9)
    after, _ = aggregator.combine(weights, aggregator.init(None), twice, replies)
    assert after.params["w"].item() == pytest.approx(
        34 / 3 / (2 * 4 / 9) * 2 / 3
    )  # Δ̄ = 2 / 3, and ‖Δ‖² is 34 / 3 on average


def test_fedexp_multiplies_orthogonal_updates_by_half_their_number():
    for m in (1, 2, 3, 8):
        step = max(1, m / 2)
        np.testing.assert_allclose(
            extrapolated(*(3 * np.eye(8, dtype=np.float32)[:m])), [3 * step / m] * m + [0] * (8 - m), rtol=1e-6
        )


def test_fedexp_never_takes_a_shorter_step_than_the_mean_and_keeps_its_direction():
    generator = np.random.default_rng(0)
    for _ in range(20):
        updates = generator.normal(size=(4, 3)).astype(np.float32) + generator.normal(size=3).astype(np.float32)
        ratio = np.array(extrapolated(*updates)) / updates.mean(axis=0)
        assert ratio.min() == pytest.approx(ratio.max(), rel=1e-3)
        assert ratio.min() >= 1 - 1e-6


def test_fedexp_evaluates_the_average_of_the_last_two_models(start, seven, trace):
    """Round 3 has no reply, so that the last two models are those of rounds 1 and 2 until round 4."""

    def started(method: Any) -> Any:
        torch.manual_seed(0)
        table = {**spec(method, rounds=4), "availability": trace({client: [1, 2, 4] for client in range(3)})}
        return start(fs.Experiment.from_table(table), seven, nn.Linear(2, 3, bias=False))

    simulation, evaluated, models = started("fedexp"), [], []
    for _ in simulation:
        models.append(simulation.state.weights.params["weight"])
        evaluated.append(simulation.evaluated().params["weight"])
    assert torch.equal(models[2], models[1])
    expected = [models[0], (models[0] + models[1]) / 2, (models[0] + models[1]) / 2, (models[1] + models[3]) / 2]
    torch.testing.assert_close(evaluated, expected)
    plain = started({"name": "fedexp", "aggregator": "mean"})
    plain.step()
    plain.step()
    assert torch.equal(plain.evaluated().params["weight"], plain.state.weights.params["weight"])


DIGITS = {
    "data": "digits",
    "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 10},
    "model": {"name": "mlp", "hidden": [16]},
    "training": {"rounds": 5, "clients_per_round": 5, "local_epochs": 2, "workers": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fednova", "fedexp"])
def test_it_learns_digits(method):
    assert fs.run({**DIGITS, "method": method}).final_accuracy > 0.6
