"""FedSAM's and FedLESAM's gradients at another point: by hand, and together with other objectives."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from quick import others_long
from torch import nn

import fedstrata as fs
from fedstrata.federation.messages import Weights
from fedstrata.objectives.fedbabu import BodyOnly
from fedstrata.objectives.fedprox import Proximal
from fedstrata.objectives.scaffold import Scaffold
from fedstrata.objectives.sharpness import GloballySharpnessAware, SharpnessAware, scaled

OBJECTIVES = {"fedsam": SharpnessAware, "fedlesam": GloballySharpnessAware}


class Point(nn.Module):
    """A model whose output is its two parameters, for every input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([3.0, 4.0]))

    def forward(self, x):
        return self.w.expand(len(x), 2)


class Nearest(fs.Objective):
    """The loss ½ ‖w − x‖² for the sample x of a client, with the gradient w − x."""

    def loss(self, model, params, batch, context):
        return 0.5 * (model(params, batch.x) - batch.x).square().sum(1).mean()


class LocalNearest(SharpnessAware, Nearest):
    pass


class GlobalNearest(GloballySharpnessAware, Nearest):
    pass


class LocalProximal(SharpnessAware, Nearest, Proximal):
    pass


class GlobalProximal(GloballySharpnessAware, Nearest, Proximal):
    single_samples = True


def points(start, objective: fs.Objective, x: list[list[float]], availability: Any = "always", **training: Any) -> Any:
    """Start a run in which each client has one sample, and the server takes the plain mean."""
    labels = [0] * len(x)
    data = fs.from_arrays(x, labels, x, labels, normalize="none", class_names=["a", "b"])
    spec = fs.Experiment(
        partition={"name": "given", "indices": [[k] for k in range(len(x))]},
        availability=availability,
        method={"name": "fedavg", "objective": objective, "aggregator": "mean"},
        training={"clients_per_round": len(x), "local_steps": 1, "lr": 0.5, **training},
        evaluation={"every": 0},
    )
    return start(spec, data, Point())


def at(started: Any) -> list[float]:
    return pytest.approx(started.state.weights.params["w"].tolist(), abs=1e-6)


def test_fedsam_by_hand(start):
    """g = (3, 4) at w = (3, 4), so δ = 5 (0.6, 0.8) and the gradient at w + δ is (6, 8)."""
    started = points(start, LocalNearest(rho=5.0), [[0.0, 0.0]])
    record = started.step()
    assert at(started) == [0.0, 0.0]  # (3, 4) − 0.5 (6, 8)
    assert record["train_loss"] == pytest.approx(12.5)  # at w: ½ · 25
    started.step()
    assert at(started) == [0.0, 0.0]  # g = 0 has no direction


def test_fedsam_of_two_clients_by_hand(start):
    """Client 0 as above; client 1 has x = (3, 0), g = (0, 4), δ = (0, 5) and the gradient (0, 9)."""
    started = points(start, LocalNearest(rho=5.0), [[0.0, 0.0], [3.0, 0.0]])
    started.step()
    assert at(started) == [(0.0 + 3.0) / 2, (0.0 + 4.0 - 4.5) / 2]


def test_the_gradients_of_one_step_do_not_move_where_the_next_begins(start):
    """Two steps: (3, 4) → (3, 4) − 0.25 · (4.2, 5.6) = (1.95, 2.6) → − 0.25 · (3.15, 4.2) = (1.1625, 1.55)."""
    started = points(start, LocalNearest(rho=2.0), [[0.0, 0.0]], local_steps=2, lr=0.25)
    started.step()
    assert at(started) == [1.1625, 1.55]


def test_fedlesam_by_hand(start, trace):
    """Client 1 is absent in round 2, so that in round 3 its last global model is that of round 1."""
    there = trace({0: [1, 2, 3], 1: [1, 3]})
    started = points(start, GlobalNearest(rho=5.0), [[0.0, 0.0], [6.0, 0.0]], there)
    started.step()
    assert at(started) == [3.0, 2.0]  # without a last model: the mean of (3, 4) / 2 and ((3, 4) + (6, 0)) / 2
    assert started.step()["train_loss"] == pytest.approx((9 + 49) / 2)  # at w + δ = (3, 2) + (0, 5)
    assert at(started) == [1.5, 2 - 3.5]
    started.step()
    first = np.array([1.5, 3.5]) / np.hypot(1.5, 3.5) * 5  # client 0: (3, 2) − (1.5, −1.5)
    second = np.array([1.5, 5.5]) / np.hypot(1.5, 5.5) * 5  # client 1: (3, 4) − (1.5, −1.5)
    w = np.array([1.5, -1.5])
    ends = [w - 0.5 * (w + first), w - 0.5 * (w + second - [6.0, 0.0])]
    assert at(started) == np.mean(ends, axis=0).tolist()


def test_a_proximal_term_pulls_from_w_and_not_from_the_displaced_point(start):
    """In step 2, w = (1.5, 2): δ = ρ (0.6, 0.8), and the correction is μ ((1.5, 2) − (3, 4))."""
    started = points(start, LocalProximal(rho=2.5, mu=0.4), [[0.0, 0.0]], local_steps=2, lr=0.25)
    started.step()
    w = np.array([3.0, 4.0])
    for _ in range(2):
        w = w - 0.25 * (w + 2.5 * np.array([0.6, 0.8]) + 0.4 * (w - [3.0, 4.0]))
    assert at(started) == w.tolist()


def test_weight_decay_momentum_and_clipping_are_those_of_a_step_from_w(start):
    how = {"momentum": 0.5, "weight_decay": 0.2, "clip": 6.0, "local_steps": 2, "lr": 0.25}
    started = points(start, LocalNearest(rho=5.0), [[0.0, 0.0]], **how)
    started.step()
    w, v, unit = np.array([3.0, 4.0]), np.zeros(2), np.array([0.6, 0.8])
    for length in (6.0, 6.0):  # ‖w + δ‖ is 10, and then more than 6
        v = 0.5 * v + length * unit + 0.2 * w
        w = w - 0.25 * v
    assert at(started) == w.tolist()


@pytest.mark.parametrize("kind", ["chain", "autograd", "batch in parts"])
def test_steps_of_a_network_are_those_of_autograd(tiny, kind):
    hidden = nn.Tanh() if kind == "autograd" else nn.ReLU()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 6), hidden, nn.Linear(6, 3))
    parts = {"batch_size": 2, "accumulate": 4} if kind == "batch in parts" else {"batch_size": 8}
    mine, before = copy.deepcopy(module), copy.deepcopy(module)
    federation = tiny(module=module, objective=SharpnessAware(rho=0.3), lr=0.2, local_epochs=3, **parts)
    reply = federation.fit(0)[0]
    where = torch.from_numpy(federation.engine.context.assignment[0])
    x, y = federation.engine.context.data.inputs(where), federation.engine.context.data.y_train[where]
    for _ in range(3):
        g = torch.autograd.grad(F.cross_entropy(mine(x), y), list(mine.parameters()))
        norm = torch.cat([part.flatten() for part in g]).norm()
        there = copy.deepcopy(mine)
        with torch.no_grad():
            for w, part in zip(there.parameters(), g, strict=True):
                w += 0.3 * part / norm
        moved = torch.autograd.grad(F.cross_entropy(there(x), y), list(there.parameters()))
        with torch.no_grad():
            for w, part in zip(mine.parameters(), moved, strict=True):
                w -= 0.2 * part
    assert (reply.steps, reply.seen) == (3, 48)
    for (name, w), old in zip(mine.named_parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(reply.weights.params[name], w.detach(), rtol=1e-4, atol=1e-6)
        assert not torch.equal(w, old)


def test_only_trained_parameters_move(tiny):
    """The head stays, also while gradients are computed: its displacement would change those of the body."""

    class LocalBody(SharpnessAware, BodyOnly):
        pass

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    mine = copy.deepcopy(module)
    federation = tiny(module=module, objective=LocalBody(rho=0.5), lr=0.2, batch_size=8)
    reply = federation.fit(0)[0]
    where = torch.from_numpy(federation.engine.context.assignment[0])
    x, y = federation.engine.context.data.inputs(where), federation.engine.context.data.y_train[where]
    body = [mine[0].weight, mine[0].bias]
    g = torch.autograd.grad(F.cross_entropy(mine(x), y), body)
    norm, kept = torch.cat([part.flatten() for part in g]).norm(), [w.detach().clone() for w in body]
    with torch.no_grad():
        for w, part in zip(body, g, strict=True):
            w += 0.5 * part / norm
    moved = torch.autograd.grad(F.cross_entropy(mine(x), y), body)
    for name, w, part in zip(("0.weight", "0.bias"), kept, moved, strict=True):
        torch.testing.assert_close(reply.weights.params[name], w - 0.2 * part, rtol=1e-4, atol=1e-6)
    assert torch.equal(reply.weights.params["2.weight"], mine[2].weight)


def test_the_length_of_a_direction_is_that_over_all_tensors():
    moved = scaled({"a": torch.randn(4, 3), "b": torch.zeros(2), "c": torch.full((5,), 1e-4)}, 0.25)
    assert torch.cat([part.flatten() for part in moved.values()]).norm().item() == pytest.approx(0.25, rel=1e-5)
    assert scaled({"a": torch.zeros(3)}, 0.25)["a"].tolist() == [0.0, 0.0, 0.0]


def test_the_memory_format_of_a_last_model_does_not_matter():
    old = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(1))
    other = old.to(memory_format=torch.channels_last)
    assert torch.equal(scaled({"w": old}, 0.1)["w"], scaled({"w": other}, 0.1)["w"])


def norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))


def test_running_statistics_are_those_at_w_and_each_batch_counts_once(tiny):
    with_sam, plain = (
        tiny(module=norm(), objective=objective, batch_size=8).fit(0)[0].weights.buffers
        for objective in (SharpnessAware(rho=2.0), fs.Objective())
    )
    assert with_sam["1.num_batches_tracked"].item() == 1
    assert all(torch.equal(with_sam[name], plain[name]) for name in plain)


@pytest.mark.parametrize(("objective", "gradients"), [("fedsam", 2), ("fedlesam", 1)])
def test_every_gradient_is_counted(start, objective, gradients):
    started = points(start, OBJECTIVES[objective](), [[0.0, 0.0], [6.0, 0.0]], local_steps=3)
    record = started.step()
    assert record["samples"] == 2 * 3 * gradients
    work = fs.Objective.sample_gradients(OBJECTIVES[objective](), started.config.training, 1.0)
    assert work == 3 * gradients


DIGITS = {
    "data": {"name": "digits", "limit": 400},
    "model": {"name": "cnn", "channels": [4, 8], "hidden": 16},
    "partition": {"name": "classes", "clients": 5, "per_client": 3},
    "training": {"rounds": 3, "clients_per_round": 3, "local_epochs": 2, "lr": 0.1},
}


@pytest.mark.slow
@pytest.mark.parametrize("method", OBJECTIVES)
def test_with_rho_0_it_is_fedavg_bit_for_bit(method):
    plain, none, moved = (
        fs.run({**DIGITS, "method": each}).params for each in ("fedavg", {"name": method, "rho": 0}, method)
    )
    assert all(torch.equal(plain[name], none[name]) for name in plain)
    assert not all(torch.equal(plain[name], moved[name]) for name in plain)


@pytest.mark.slow
def test_the_first_round_of_fedlesam_is_that_of_fedavg(start):
    table = {**DIGITS, "training": {**DIGITS["training"], "rounds": 1, "local_epochs": 1}}
    plain, first = (fs.run({**table, "method": each}).params for each in ("fedavg", "fedlesam"))
    assert all(torch.equal(plain[name], first[name]) for name in plain)


class GlobalScaffold(GloballySharpnessAware, Scaffold):
    """FedLESAM-S of the paper: SCAFFOLD with FedLESAM's gradients."""


def test_two_objectives_that_keep_a_state_keep_both(start):
    """SCAFFOLD's c is the mean of the c_k, and FedLESAM's last model is the received one."""
    started = points(start, GlobalScaffold(rho=0.5), [[0.0, 0.0], [6.0, 0.0], [1.0, 9.0]], local_steps=2)
    for _ in range(3):
        before = started.state.weights.params["w"]
        started.step()
    states = [started.engine.store.get(k)["objective"] for k in range(3)]
    assert all(torch.equal(state["start"]["w"], before) for state in states)
    c = torch.stack([state["other"]["w"] for state in states]).mean(0)
    torch.testing.assert_close(started.state.objective["w"], c)
    alone = points(start, Scaffold(), [[0.0, 0.0], [6.0, 0.0], [1.0, 9.0]], local_steps=2)
    assert not torch.equal(started.state.weights.params["w"], alone.state.weights.params["w"])


@pytest.mark.parametrize("objective", [SharpnessAware(), GlobalProximal(rho=0.1)])
def test_differential_privacy_of_samples_is_refused(objective):
    spec = fs.Experiment(method={"name": "fedavg", "objective": objective}, privacy={"dp": {"clip": 1.0, "noise": 1.0}})
    with pytest.raises(
        fs.SpecError, match=r"^privacy\.dp = .*: the objective of 'fedavg' (is not a|computes gradients at perturbed)"
    ):
        fs.prepare(spec)


@pytest.mark.parametrize("method", OBJECTIVES)
def test_a_negative_distance_is_refused(method):
    with pytest.raises(fs.SpecError, match=r"^method\.rho = -1.*greater than or equal to 0"):
        fs.Experiment.from_table({"method": {"name": method, "rho": -1}})


@pytest.mark.slow
@pytest.mark.parametrize("method", others_long(OBJECTIVES, list(OBJECTIVES)[:1]))
def test_digits_are_learned(method):
    table = {
        "method": method,
        "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 20},
        "training": {"rounds": 15, "local_epochs": 2, "lr": 0.1},
        "evaluation": {"every": 15},
    }
    assert fs.run(table).final_accuracy > 0.85


def test_weights_that_were_sent_do_not_change(tiny):
    federation = tiny(objective=SharpnessAware(rho=1.0))
    sent = federation.weights
    before = Weights({name: w.clone() for name, w in sent.params.items()}, {})
    federation.fit()
    assert all(torch.equal(before.params[name], federation.weights.params[name]) for name in before.params)
