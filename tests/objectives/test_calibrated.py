"""Restricted, calibrated and balanced softmax on three logits, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from skewed import ONE_CLASS
from torch import Tensor

import fedstrata as fs
from fedstrata.models.model import Model
from fedstrata.objectives.base import OBJECTIVES, Batch, Context, Objective
from fedstrata.objectives.calibrated import Balanced, LogitMargins, Restricted
from fedstrata.objectives.rebafl import Rebalanced

Z = (0.3, -1.2, 2.0)


def loss_and_gradient(objective: Objective, model: Model, context: Context, label: int) -> tuple[float, list[float]]:
    """Of one sample x = 1, by logit."""
    params = {name: p.requires_grad_(True) for name, p in model.params().items()}
    loss = objective.loss(model, params, Batch(torch.ones(1, 1), torch.tensor([label])), context)
    (gradient,) = torch.autograd.grad(loss, list(params.values()))
    return loss.item(), gradient.flatten().tolist()


def softmax(z: list[float]) -> list[float]:
    e = [math.exp(v) for v in z]
    return [v / sum(e) for v in e]


def test_restricted_softmax(logits, begun):
    objective, model = Restricted(alpha=0.5), logits(*Z)
    loss, gradient = loss_and_gradient(objective, model, begun(objective, model, [6.0, 2.0, 0.0]), 0)
    p = softmax([0.3, -1.2, 1.0])
    assert loss == pytest.approx(-math.log(p[0]), abs=1e-6)
    assert gradient == pytest.approx([p[0] - 1, p[1], 0.5 * p[2]], abs=1e-6)


@pytest.mark.parametrize(
    "objective", [Restricted(alpha=1.0), LogitMargins(tau=0.0, missing="one"), Rebalanced(mu=0, epsilon=1)]
)
@pytest.mark.parametrize("counts", [[6.0, 2.0, 0.0], [5.0, 0.0, 0.0]])
def test_each_has_plain_cross_entropy_at_the_end_of_its_range(objective, counts, logits, begun):
    model = logits(*Z)
    loss, gradient = loss_and_gradient(objective, model, begun(objective, model, counts), 0)
    p = softmax(list(Z))
    assert loss == pytest.approx(-math.log(p[0]), abs=1e-6)
    assert gradient == pytest.approx([p[0] - 1, p[1], p[2]], abs=1e-6)


def test_margins_with_and_without_the_missing_class(logits, begun):
    model = logits(*Z)
    # 16^(-1/4) = 1/2 and 81^(-1/4) = 1/3.
    shifted = [0.3 - 2 / 2, -1.2 - 2 / 3]
    excluded = LogitMargins(tau=2.0)
    loss, gradient = loss_and_gradient(excluded, model, begun(excluded, model, [16.0, 81.0, 0.0]), 1)
    p = softmax(shifted)
    assert loss == pytest.approx(-math.log(p[1]), abs=1e-6)
    assert gradient == pytest.approx([p[0], p[1] - 1, 0], abs=1e-6)
    assert gradient[2] == 0
    one = LogitMargins(tau=2.0, missing="one")
    loss, gradient = loss_and_gradient(one, model, begun(one, model, [16.0, 81.0, 0.0]), 1)
    p = softmax([*shifted, 2.0 - 2.0])
    assert loss == pytest.approx(-math.log(p[1]), abs=1e-6)
    assert gradient == pytest.approx([p[0], p[1] - 1, p[2]], abs=1e-6)


def test_balanced_softmax_with_a_missing_class(logits, begun):
    objective, model = Balanced(), logits(*Z)
    loss, gradient = loss_and_gradient(objective, model, begun(objective, model, [30.0, 10.0, 0.0]), 0)
    p0 = 0.75 * math.exp(0.3) / (0.75 * math.exp(0.3) + 0.25 * math.exp(-1.2))
    assert loss == pytest.approx(-math.log(p0), abs=1e-6)
    assert gradient == pytest.approx([p0 - 1, 1 - p0, 0], abs=1e-6)
    assert gradient[2] == 0


@pytest.mark.parametrize("objective", [Balanced(), LogitMargins(), Rebalanced(epsilon=0, mu=0)])
@pytest.mark.parametrize("z", [Z, (-80.0, 90.0, 3.0), (-1e4, 1e4, 0.0)])
def test_a_client_of_one_class_learns_exactly_nothing(objective, z, logits, begun):
    model = logits(*z)
    loss, gradient = loss_and_gradient(objective, model, begun(objective, model, [7.0, 0.0, 0.0]), 0)
    assert loss == 0
    assert gradient == [0, 0, 0]


@pytest.mark.parametrize("objective", [Restricted(), Rebalanced(mu=0), LogitMargins(missing="one")])
def test_others_do_learn_from_one_class(objective, logits, begun):
    model = logits(*Z)
    loss, gradient = loss_and_gradient(objective, model, begun(objective, model, [7.0, 0.0, 0.0]), 0)
    assert loss > 0
    assert gradient[0] < 0 < min(gradient[1:])


@pytest.mark.slow
@given(
    name=st.sampled_from(["fedrs", "fedlc", "bsm", "rebafl"]),
    counts=st.lists(st.integers(0, 10**6), min_size=3, max_size=3),
    z=st.lists(st.floats(-1e4, 1e4), min_size=3, max_size=3),
    label=st.integers(0, 2),
)
def test_nothing_is_ever_nan(name, counts, z, label):
    """Whatever the logits; the label is one that the client holds."""
    objective = OBJECTIVES.parse({"name": name, "mu": 0} if name == "rebafl" else name)
    counts[label] += 1
    head = torch.nn.Linear(1, 3, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor(z)[:, None])
    model = Model(head, head="")
    context = objective.client_init(model, Context(model.params(), torch.tensor(counts).float(), {}, None, 0.1))
    loss, gradient = loss_and_gradient(objective, model, context, label)
    assert math.isfinite(loss)
    assert loss >= 0
    assert all(map(math.isfinite, gradient))
    assert sum(gradient) == pytest.approx(0, abs=1e-5) or name == "fedrs"


def test_batches_are_means_of_their_samples(logits, begun):
    objective, model = Balanced(), logits(*Z)
    context = begun(objective, model, [3.0, 1.0, 2.0])
    batch = Batch(torch.tensor([[1.0], [-0.5]]), torch.tensor([2, 1]))
    losses: Tensor = objective.losses(model, model.params(), batch, context)
    assert losses.shape == (2,)
    assert objective.loss(model, model.params(), batch, context).item() == pytest.approx(losses.mean().item())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["bsm-fedavg", "fedlc", {"name": "rebafl", "epsilon": 0, "mu": 0}])
def test_clients_of_one_class_are_seen_to_learn_nothing(method, start):
    started = start(fs.Experiment.from_table({**ONE_CLASS, "method": method}))
    before = started.state.weights.params
    for _ in range(2):
        assert started.step()["idle_clients"] == 10
    assert all(torch.equal(w, before[name]) for name, w in started.state.weights.params.items())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["bsm-fedavg", "fedlc", {"name": "rebafl", "epsilon": 0}])
def test_clients_of_two_classes_learn(method):
    history = fs.run({**ONE_CLASS, "partition": {"name": "classes", "clients": 10, "per_client": 2}, "method": method})
    assert [record["idle_clients"] for record in history] == [0, 0]


@pytest.mark.parametrize("method", ["rebafl", "fedrs", {"name": "fedlc", "missing": "one"}])
def test_the_others_learn_from_one_class_too(method, start):
    started = start(fs.Experiment.from_table({**ONE_CLASS, "method": method}))
    before = started.state.weights.params
    started.step()
    assert not torch.equal(started.state.weights.params["head.weight"], before["head.weight"])
