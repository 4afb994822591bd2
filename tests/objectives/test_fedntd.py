"""FedNTD's not-true distillation by hand, and what it equals at the ends of its range."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.models.model import Model
from fedstrata.objectives.base import Batch, Context
from fedstrata.objectives.fedntd import NotTrue

TEACHER, STUDENT = [math.log(2), math.log(6), math.log(2)], [0.0, math.log(3), math.log(9)]


def begun(objective: NotTrue, model: Model) -> Context:
    received = objective.client_prepare(model, fs.Weights(model.params(), model.buffers()), lambda: [], {})
    return objective.client_init(model, Context(model.params(), torch.ones(3), received, None, 0.1))


def loss_and_gradient(objective: NotTrue, model: Model, label: int) -> tuple[float, list[float]]:
    """Return the loss of one sample, for which the global model has the logits TEACHER, and its gradient by logit."""
    context = begun(objective, model)
    params = {"head.weight": torch.tensor(STUDENT)[:, None].requires_grad_(True)}
    loss = objective.loss(model, params, Batch(torch.ones(1, 1), torch.tensor([label])), context)
    loss.backward()
    return loss.item(), params["head.weight"].grad.flatten().tolist()


def test_a_sample_of_class_0_by_hand(logits):
    """The cross-entropy is log 13. Of classes 1 and 2, the teacher says 3/4 and 1/4, and the student 1/4 and 3/4."""
    loss, gradient = loss_and_gradient(NotTrue(beta=2.0), logits(*TEACHER), 0)
    kl = 3 / 4 * math.log(3) + 1 / 4 * math.log(1 / 3)
    assert loss == pytest.approx(math.log(13) + 2 * kl, abs=1e-6)
    # The gradient of the divergence is q − p: −1/2 and 1/2. It leaves the true class alone.
    assert gradient == pytest.approx([1 / 13 - 1, 3 / 13 - 2 * 0.5, 9 / 13 + 2 * 0.5], abs=1e-6)


def test_the_temperature_by_hand(logits):
    """With τ = 1/2, odds are squared: 9/10 and 1/10 against 1/10 and 9/10. τ² = 1/4."""
    loss, gradient = loss_and_gradient(NotTrue(temperature=0.5), logits(*TEACHER), 0)
    assert loss == pytest.approx(math.log(13) + 0.25 * 0.8 * math.log(9), abs=1e-6)
    # The gradient is τ² (q − p) / τ = τ (q − p).
    assert gradient == pytest.approx([1 / 13 - 1, 3 / 13 - 0.5 * 0.8, 9 / 13 + 0.5 * 0.8], abs=1e-6)


@pytest.mark.parametrize("label", [0, 1, 2])
def test_it_has_no_effect_at_the_global_model(logits, label):
    model = logits(*STUDENT)
    loss, gradient = loss_and_gradient(NotTrue(beta=5.0), model, label)
    z = torch.tensor([STUDENT], requires_grad=True)
    plain = F.cross_entropy(z, torch.tensor([label]))
    plain.backward()
    assert loss == plain.item()
    assert gradient == pytest.approx(z.grad.flatten().tolist(), abs=1e-6)


def test_a_higher_logit_of_the_true_class_costs_nothing(logits):
    model = logits(*TEACHER)
    context = begun(NotTrue(), model)
    for raised in (0.0, 3.0, 30.0):
        z = torch.tensor([math.log(2) + raised, math.log(6), math.log(2)])
        batch = Batch(torch.ones(1, 1), torch.tensor([0]))
        (loss,) = NotTrue().losses(model, {"head.weight": z[:, None]}, batch, context).tolist()
        assert loss == pytest.approx(F.cross_entropy(z[None], batch.y).item(), abs=1e-6)


def test_the_teacher_is_in_evaluation_mode_with_the_buffers_that_were_sent():
    net = nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.Linear(2, 3))
    model, objective = Model(net), NotTrue()
    buffers = {
        **model.buffers(),
        "0.running_mean": torch.tensor([5.0, -5.0]),
        "0.running_var": torch.tensor([4.0, 9.0]),
    }
    received = objective.client_prepare(model, fs.Weights(model.params(), buffers), lambda: [], {})
    context = objective.client_init(model, Context(model.params(), torch.ones(3), received, None, 0.1))
    x = torch.tensor([[1.0, 2.0], [0.3, -0.4]])
    expected = net[1]((x - torch.tensor([5.0, -5.0])) / (torch.tensor([4.0, 9.0]) + 1e-5).sqrt())
    with model.loaded(model.params(), buffers, train=True) as params:
        objective.loss(model, params, Batch(x, torch.tensor([0, 1])), context).backward()
        updates = model.current_buffers()["0.num_batches_tracked"]
        teacher = objective.teacher_logits(model, Batch(x, torch.tensor([0, 1])), context)
        assert model.module.training
    assert updates == 1
    torch.testing.assert_close(teacher, expected.detach())


CNN = {"name": "cnn", "channels": [4, 8], "hidden": 16}
DIGITS = {
    "data": {"name": "digits", "limit": 400},
    "partition": {"name": "classes", "clients": 5, "per_client": 2},
    "training": {"rounds": 3, "clients_per_round": 3, "local_epochs": 2, "lr": 0.05},
}


@pytest.mark.slow
def test_with_beta_0_it_is_fedavg_bit_for_bit():
    plain = fs.run({**DIGITS, "model": CNN}).params
    none = fs.run({**DIGITS, "model": CNN, "method": {"name": "fedntd", "beta": 0}}).params
    some = fs.run({**DIGITS, "model": CNN, "method": "fedntd"}).params
    assert all(torch.equal(plain[name], none[name]) for name in plain)
    assert not torch.equal(plain["head.weight"], some["head.weight"])


@pytest.mark.slow
def test_it_learns_digits_from_clients_of_two_classes():
    spec = {
        **DIGITS,
        "data": "digits",
        "method": "fedntd",
        "training": {"rounds": 12, "clients_per_round": 2, "local_epochs": 3, "lr": 0.1},
    }
    assert fs.run(spec).column("accuracy")[1][-6:].mean() > 0.3


def test_two_classes_are_refused():
    data = fs.from_arrays([[0.0], [1.0]] * 6, [0, 1] * 6, [[0.0], [1.0]], [0, 1])
    spec = fs.Experiment(method="fedntd", partition={"clients": 2})
    with pytest.raises(
        SpecError, match=r"^method.objective = 'fedntd': needs at least 3 classes, but the data have 2\. U"
    ):
        fs.run(spec, data=data)
