"""Server optimisers against their formulas (Reddi et al. 2021, Algorithm 2), written out in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.aggregation.base import Mean
from fedstrata.aggregation.optimizers import ServerOptimizer, Stepper
from fedstrata.base import records
from fedstrata.base.config import LARGEST, build
from fedstrata.base.errors import SpecError

W0 = np.array([1.0, -2.0, 0.5])
UPDATES = np.array([[0.3, -0.1, 0.02], [-0.4, 0.2, 0.0], [0.1, 0.1, -0.9]])
LR, EPS = 0.1, 1e-3


def momentum(w, g, s, t):
    s["v"] = 0.9 * s.get("v", 0) + g
    return w - LR * s["v"]


def adam(w, g, s, t):
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    s["v"] = 0.99 * s.get("v", EPS**2) + 0.01 * g**2
    return w - LR * s["m"] / (np.sqrt(s["v"]) + EPS)


def adagrad(w, g, s, t):
    s["v"] = s.get("v", EPS**2) + g**2
    return w - LR * g / (np.sqrt(s["v"]) + EPS)


def yogi(w, g, s, t):
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    v = s.get("v", EPS**2)
    s["v"] = v - 0.01 * g**2 * np.sign(v - g**2)
    return w - LR * s["m"] / (np.sqrt(s["v"]) + EPS)


RULES = {"sgd": momentum, "adam": adam, "adagrad": adagrad, "yogi": yogi}


def settings(name: str, **more) -> ServerOptimizer:
    return ServerOptimizer(optimizer=name, lr=LR, momentum=0.9 if name == "sgd" else 0.0, **more)


@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize("name", RULES)
def test_three_steps_across_a_checkpoint_each(name, decay):
    optimizer, state, memory = settings(name, weight_decay=decay), None, {}
    params, w = {"w": torch.tensor(W0, dtype=torch.float32)}, W0
    for t, update in enumerate(UPDATES, start=1):
        params, state = optimizer.apply(params, {"w": torch.tensor(update, dtype=torch.float32)}, state)
        # An update is a negative gradient; the penalty belongs to the gradient.
        w = RULES[name](w, -update + decay * w, memory, t)
        np.testing.assert_allclose(params["w"].double().numpy(), w, rtol=3e-5, atol=1e-6)
        state = records.decode(records.encode(state))


@pytest.mark.parametrize("name", RULES)
def test_a_step_changes_neither_the_parameters_nor_the_state_that_it_was_given(name):
    start = {"w": torch.tensor(W0)}
    update = {"w": torch.tensor(UPDATES[0])}
    params, state = settings(name).apply(start, update, None)
    before, kept = records.encode(state), params["w"].clone()
    once, _ = settings(name).apply(params, update, state)
    twice, _ = settings(name).apply(params, update, state)
    assert torch.equal(once["w"], twice["w"])
    assert records.encode(state) == before
    assert torch.equal(params["w"], kept)
    assert start["w"].tolist() == W0.tolist()


def test_plain_sgd_applies_the_update_as_it_is():
    params, state = ServerOptimizer().apply({"w": torch.tensor(W0)}, {"w": torch.tensor(UPDATES[0])}, None)
    assert params["w"].tolist() == (W0 + UPDATES[0]).tolist()
    assert state is None
    half, _ = ServerOptimizer(lr=0.5).apply({"w": torch.tensor(W0)}, {"w": torch.tensor(UPDATES[0])}, None)
    np.testing.assert_allclose(half["w"].numpy(), W0 + UPDATES[0] / 2)


@pytest.mark.slow
def test_a_stepper_of_many_steps_is_many_steppers_of_one():
    rule = settings("adam")
    long = Stepper(rule, {"w": torch.tensor(W0)}, None)
    params, state = {"w": torch.tensor(W0)}, None
    for update in UPDATES:
        long.step({"w": torch.tensor(-update)})
        params, state = rule.apply(params, {"w": torch.tensor(update)}, state)
    torch.testing.assert_close(long.params["w"], params["w"])
    faster = Stepper(ServerOptimizer(), {"w": torch.tensor(W0)}, None, lr=2.0)
    faster.step({"w": torch.ones(3, dtype=torch.float64)})
    np.testing.assert_allclose(faster.params["w"].numpy(), W0 - 2)


def test_adaptive_ones_have_a_rate_of_their_own():
    assert ServerOptimizer().rate == 1
    assert ServerOptimizer(optimizer="adam").rate == 0.01
    assert ServerOptimizer(optimizer="adam", lr=0.3).rate == 0.3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"optimizer": "adam", "momentum": 0.9},
            "momentum = 0.9: has an effect only with optimizer = 'sgd', not with 'adam'",
        ),
        ({"betas": (0.5, 0.9)}, r"betas = .*: has an effect only with optimizer = 'adam' or 'yogi', not with 'sgd'"),
        ({"optimizer": "yogi", "betas": (1.5, 0.9)}, r"betas\.0 = 1.5: must be less than 1"),
    ],
)
def test_what_would_be_ignored_or_diverge_is_refused(wrong, message):
    with pytest.raises(SpecError, match=message):
        build(ServerOptimizer, wrong)


@pytest.mark.parametrize("size", [LARGEST, 1e-300, 5e-324])
@pytest.mark.parametrize("name", RULES)
def test_any_settings_that_are_accepted_can_step(name, size):
    optimizer = ServerOptimizer(optimizer=name, lr=size, eps=size, weight_decay=size)
    params, state = {"w": torch.ones(3)}, None
    for _ in range(2):
        params, state = optimizer.apply(params, {"w": torch.ones(3)}, state)
    stepper = Stepper(optimizer, {"w": torch.ones(3)}, None, lr=size * size)  # the server's rate times the clients'
    stepper.step({"w": torch.ones(3)}, 2)
    with pytest.raises(SpecError, match=r"lr = 1.7e\+308: is too large\. Use at most 1e\+18\."):
        ServerOptimizer(optimizer=name, lr=1.7e308)


@pytest.mark.parametrize("name", RULES)
def test_a_schedule_is_a_constant_rate_of_the_round(name):
    rates = {"inverse": [LR, LR / 2, LR / 3], "cosine": [LR, LR * 0.75, LR * 0.25]}
    for schedule, expected in rates.items():
        for round, lr in enumerate(expected, start=1):
            params = {"w": torch.tensor(W0, dtype=torch.float32)}
            update = {"w": torch.tensor(UPDATES[0], dtype=torch.float32)}
            scheduled, _ = settings(name, schedule=schedule).apply(params, update, None, round, 3)
            constant, _ = settings(name).model_copy(update={"lr": lr}).apply(params, update, None)
            torch.testing.assert_close(scheduled["w"], constant["w"])


def test_the_round_reaches_the_aggregator_and_its_optimizer():
    rounds = []

    class Noting(Mean):
        def coefficients(self, selection, returned, samples):
            rounds.append((selection.round, selection.rounds))
            return super().coefficients(selection, returned, samples)

    def moved(**server):
        spec = fs.Experiment(
            method=fs.FedAvg(aggregator=Noting(server=server)),
            partition=fs.IID(clients=2),
            training={"rounds": 2, "local_steps": 1},
            evaluation={"every": 0},
        )
        with fs.Simulation(fs.prepare(spec)) as simulation:
            before = simulation.state.weights.params
            simulation.step()
            middle = simulation.state.weights.params
            simulation.step()
            after = simulation.state.weights.params
        return [{name: b[name] - a[name] for name in a} for a, b in ((before, middle), (middle, after))]

    constant, inverse = moved(), moved(schedule="inverse")
    assert rounds == [(1, 2), (2, 2)] * 2
    for name in constant[0]:
        torch.testing.assert_close(inverse[0][name], constant[0][name])  # the same model is sent in both rounds
        torch.testing.assert_close(inverse[1][name], constant[1][name] / 2, rtol=1e-3, atol=1e-6)
