"""Differential privacy of single samples: the gradient by hand, its laws, ε, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quick import others_long
from torch import nn

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.clients.client import Client
from fedstrata.clients.training.private import CHUNK, NoisyGradient, poisson_draws, secret_noise
from fedstrata.evaluation.summary import summary_lines
from fedstrata.federation.settings import DPSGD, Training
from fedstrata.models.model import Model
from fedstrata.objectives.base import Batch, Context, CrossEntropy
from fedstrata.runs.accountant import Accountant
from fedstrata.runs.simulation import make_context

TABLE: dict[str, Any] = {
    "data": {"name": "digits", "limit": 400},
    "partition": {"name": "dirichlet", "alpha": 1.0, "clients": 5, "min_size": 2},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"rounds": 3, "clients_per_round": 3, "local_epochs": 1, "batch_size": 16, "lr": 0.3},
    "privacy": {"dp": {"clip": 1.0, "noise": 1.2}},
}


def spec(**changes: Any) -> fs.Experiment:
    """A spec with some keys changed; a section with a ``name`` is replaced."""
    table = {**TABLE, **{name: value for name, value in changes.items() if name not in TABLE or "name" in value}}
    kept = {name: changes[name] for name in TABLE.keys() & changes.keys() if "name" not in changes[name]}
    return fs.Experiment.from_table(table | {name: {**TABLE[name], **value} for name, value in kept.items()})


def gradient_of(x: list[list[float]], y: list[int], clip: float, noise: float, expected: float) -> torch.Tensor:
    """The noisy gradient of a linear model with two inputs, two classes and the weights 0."""
    model = Model(nn.Linear(2, 2, bias=False))
    params = {"weight": torch.zeros(2, 2)}
    context = Context(params, torch.zeros(0), {}, None, 1.0)
    gradient = NoisyGradient(model, CrossEntropy(), context, DPSGD(clip=clip, noise=noise), expected, secret_noise)
    with model.loaded(params) as loaded:
        _, (found,) = gradient(loaded, ["weight"], Batch(torch.tensor(x).reshape(-1, 2), torch.tensor(y, dtype=int)))
    return found


@pytest.mark.slow
def test_the_gradient_by_hand():
    # With the weights 0, both classes have probability 1/2: the gradient of a sample of class 0 is (−x/2, x/2), whose
    # norm is ‖x‖ / √2. The first sample has the norm 5 / √2 and is scaled to 1, the second one has 1 / √2 and is not.
    found = gradient_of([[3.0, 4.0], [0.6, 0.8]], [0, 1], clip=1.0, noise=1e-12, expected=4)
    first = torch.tensor([[-1.5, -2.0], [1.5, 2.0]]) / (5 / math.sqrt(2))
    second = torch.tensor([[0.3, 0.4], [-0.3, -0.4]])
    torch.testing.assert_close(found, (first + second) / 4)


def test_a_step_without_samples_is_noise_of_the_right_size():
    found = torch.stack([gradient_of([], [], clip=2.0, noise=3.0, expected=6)])
    assert found.abs().max() > 0
    model = Model(nn.Linear(200, 100, bias=False))
    params = {"weight": torch.zeros(100, 200)}
    context = Context(params, torch.zeros(0), {}, None, 1.0)
    gradient = NoisyGradient(model, CrossEntropy(), context, DPSGD(clip=2.0, noise=3.0), 6, secret_noise)
    with model.loaded(params) as loaded:
        _, (noise,) = gradient(loaded, ["weight"], Batch(torch.zeros(0, 200), torch.zeros(0, dtype=torch.int64)))
    # z C / b = 3 · 2 / 6 = 1, from 20,000 numbers
    assert abs(float(noise.std()) - 1) < 0.03
    assert abs(float(noise.mean())) < 0.03


@pytest.mark.slow
@given(
    st.lists(st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=2), min_size=1, max_size=CHUNK + 3),
    st.floats(0.1, 5),
)
def test_one_sample_changes_the_sum_by_at_most_the_largest_norm(x, clip):
    labels = [len(x) % 2, *(i % 2 for i in range(1, len(x)))]
    whole, without = (gradient_of(x[k:], labels[k:], clip, 1e-12, 1) for k in (0, 1))
    assert float((whole - without).norm()) <= clip * (1 + 1e-4)


@pytest.mark.slow
def test_each_sample_is_drawn_with_its_probability():
    client = Client(0, make_context(fs.prepare(spec())))
    draws = list(poisson_draws(client, Training(local_steps=4000, batch_size=5), 1, 20))
    counts = np.bincount(np.concatenate(draws), minlength=20) / len(draws)
    assert np.abs(counts - 0.25).max() < 0.03
    assert len({len(draw) for draw in draws}) > 5


@pytest.mark.slow
def test_without_clipping_and_noise_full_batches_are_those_of_fedavg():
    whole = {"batch_size": 1000, "local_epochs": 2}
    plain = fs.run(spec(training=whole, privacy={"dp": None}))
    private = fs.run(spec(training=whole, privacy={"dp": {"clip": 1e4, "noise": 1e-12}}))
    for name, w in plain.params.items():
        torch.testing.assert_close(private.params[name], w, atol=1e-6, rtol=0)


def test_epsilon_of_full_batches_is_that_of_gaussian_mechanisms():
    accountant = Accountant(
        DPSGD(clip=1.0, noise=2.0, delta=1e-5), Training(local_steps=3, batch_size=50), np.array([50, 20])
    )
    # The Rényi difference of k Gaussian mechanisms is k α / (2 z²); the conversion to ε is that of Canonne et al. 2020.
    steps, expected = 3 * 4, []
    for order in range(2, 65):
        difference = steps * order / (2 * 2.0**2)
        expected.append(difference + math.log1p(-1 / order) - (math.log(1e-5) + math.log(order)) / (order - 1))
    assert accountant.largest(np.array([4, 4])) == pytest.approx(min(expected), rel=1e-6)
    assert accountant.largest(np.array([0, 0])) == 0


@pytest.mark.slow
def test_epsilon_grows_with_rounds_and_batches_and_falls_with_noise():
    def largest(noise: float = 1.0, batch_size: int = 10, rounds: int = 5) -> float:
        training = Training(local_steps=10, batch_size=batch_size)
        return Accountant(DPSGD(clip=1.0, noise=noise), training, np.array([200])).largest(np.array([rounds]))

    assert largest(noise=2.0) < largest() < largest(rounds=6)
    assert largest() < largest(batch_size=20) < largest(batch_size=200)


@pytest.mark.slow
def test_a_run_records_the_largest_epsilon_and_no_loss(tmp_path: Path):
    made = spec(availability={"name": "bernoulli", "p": 0.6}, training={"rounds": 5})
    history = fs.run(made, out=tmp_path / "run")
    prepared = fs.prepare(made)
    rounds = np.zeros(5, dtype=np.int64)
    simulation = fs.Simulation(prepared)
    with simulation:
        for record, other in zip(simulation, history, strict=True):
            log = simulation.federation.log
            rounds[list(log.invited - log.dropped)] += 1
            assert record["epsilon"] == other["epsilon"]
    assert rounds.max() < 5, "somebody was away"
    dp, sizes = prepared.spec.privacy.dp, prepared.config.sizes
    assert dp is not None
    assert sizes is not None
    assert history[-1]["epsilon"] == Accountant(dp, made.training, sizes).largest(rounds)
    assert all(record["train_loss"] is None for record in history)
    assert dict(summary_lines(history))["privacy"].startswith(f"ε = {history[-1]['epsilon']:.2f} per sample")
    assert [record["epsilon"] for record in history] == sorted(record["epsilon"] for record in history)


@pytest.mark.slow
def test_the_number_of_drawn_samples_does_not_leave_a_client():
    history = fs.run(spec(training={"rounds": 1, "clients_per_round": 5, "local_steps": 3, "local_epochs": None}))
    sizes = fs.prepare(spec()).config.sizes
    assert sizes is not None
    assert history[0]["samples"] == 3 * np.minimum(16, sizes).sum()


@pytest.mark.long
@pytest.mark.slow
def test_a_run_ends_before_the_budget_is_exceeded():
    long = {"rounds": 40}
    free = fs.run(spec(training=long))
    budget = free[5]["epsilon"]
    limited = fs.run(spec(training=long, privacy={"dp": {"clip": 1.0, "noise": 1.2, "budget": budget}}))
    assert "privacy budget" in limited.stopped
    assert len(limited) <= 6
    assert limited[-1]["epsilon"] <= budget
    one_more = spec(training={"rounds": len(limited) + 1, "clients_per_round": 5})
    assert max(r["epsilon"] for r in fs.run(one_more)) > budget


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", others_long(["fedavg", "fedprox", "scaffold", "feddyn", "fedbabu"], ["fedavg", "scaffold"])
)
def test_methods_run_and_go_on_to_the_same_bytes(method: str, tmp_path: Path):
    made = spec(method=method, training={"rounds": 4}, evaluation={"checkpoint_every": 1})
    whole = fs.run(made, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fs.run(made, out=tmp_path / "part", callbacks=[stop_after_two])
    resumed = fs.run(made, out=tmp_path / "part", resume=True)
    assert (tmp_path / "part/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()
    assert [r["epsilon"] for r in resumed] == [r["epsilon"] for r in whole]
    two = fs.run(made.model_copy(update={"training": made.training.model_copy(update={"workers": 2})}))
    assert all(torch.equal(two.params[name], w) for name, w in whole.params.items())


def stop_after_two(record: Any) -> None:
    if record["round"] == 2:
        raise KeyboardInterrupt


@pytest.mark.long
@pytest.mark.slow
def test_digits_are_learned_with_a_moderate_epsilon():
    history = fs.run(
        spec(
            data={"name": "digits"},
            partition={"name": "iid", "clients": 4},
            training={"rounds": 10, "clients_per_round": 4, "batch_size": 64, "local_epochs": 3, "lr": 1.0},
            privacy={"dp": {"clip": 1.0, "noise": 1.0}},
        )
    )
    assert history.final_accuracy > 0.75
    assert 3 < history[-1]["epsilon"] < 30


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "bsm-fedavg"}, "is not a sum of losses of individual samples"),
        ({"method": "rebafl"}, "is not a sum of losses of individual samples"),
        ({"method": "moon"}, "is not a sum of losses of individual samples"),
        ({"method": "stratify"}, "but noise is added only to updates"),
        ({"method": {"name": "fedsts", "strata": 2}}, "but noise is added only to updates"),
        ({"method": "power-of-choice"}, "replies to SizeReport, LossReport"),
        ({"model": {"name": "resnet20"}}, "with BatchNorm, a sample affects"),
        ({"training": {"clip": 1.0}}, r"training\.clip = 1\.0: cannot be used with privacy\.dp"),
        ({"training": {"accumulate": 2}}, r"training\.accumulate = 2"),
        ({"privacy": {"dp": {"clip": 1.0, "noise": 0}}}, r"privacy\.dp\.noise = 0"),
        (
            {"privacy": {"dp": {"clip": 1.0, "noise": 1.2, "budget": 1.0}}},
            r"budget = 1\.0: is too small, because",
        ),
    ],
)
def test_what_would_break_privacy_is_refused_before_the_first_round(changes: dict[str, Any], message: str):
    with pytest.raises(SpecError, match=message):
        fs.prepare(spec(**changes))


class Recurrent(nn.Module):
    """A layer for which PyTorch has no gradients of individual samples."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(8, 4, batch_first=True), nn.Linear(4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x.squeeze(1))[0][:, -1])


def test_a_model_without_gradients_of_single_samples_is_refused():
    with pytest.raises(SpecError, match="cannot compute per-sample gradients"):
        fs.prepare(spec(), model=Recurrent)


def test_a_spec_without_it_has_no_new_key():
    assert "dp" not in str(fs.Experiment.from_table({"privacy": {"min_samples": 5}}).to_spec())
