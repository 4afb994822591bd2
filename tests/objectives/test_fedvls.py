"""FedVLS's three parts by hand, and which method it equals without two of them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from skewed import ONE_CLASS
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.models.model import Model
from fedstrata.objectives.base import Batch, Context
from fedstrata.objectives.calibrated import Balanced
from fedstrata.objectives.fedvls import Vacant

TEACHER = [0.0, 0.0, math.log(3), 0.0]
Z = torch.tensor([[math.log(2), 0.0, 0.0, math.log(3)], [0.0, math.log(4), 0.0, 0.0], [math.log(6), 0.0, 0.0, 0.0]])
"""The logits of three samples, one row each, for which the teacher's logits are all TEACHER."""
LABELS = torch.tensor([0, 0, 1])


class Table(nn.Module):
    """A model whose logits for the three samples, given as one-hot vectors, are the rows of a table."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.head = nn.Linear(3, table.shape[1], bias=False)
        with torch.no_grad():
            self.head.weight.copy_(table.T)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def loss_and_gradient(objective: Vacant, counts: list[float]) -> tuple[float, Tensor]:
    """Return the loss of the three samples, and its gradient by their logits, shape (3, 4)."""
    model = Model(Table(torch.tensor([TEACHER] * 3)))
    received = objective.client_prepare(model, fs.Weights(model.params(), {}), lambda: [], {})
    context = Context(model.params(), torch.tensor(counts), received, None, 0.1)
    context = objective.client_init(model, context)
    params = {"head.weight": Z.T.clone().requires_grad_(True)}
    loss = objective.loss(model, params, Batch(torch.eye(3), LABELS), context)
    loss.backward()
    return loss.item(), params["head.weight"].grad.T


COUNTS = [2.0, 1.0, 0.0, 0.0]
# With the shares 2/3 and 1/3, the probabilities of class 0 are (2·2)/(2·2 + 1), 2/(2 + 4) and (2·6)/(2·6 + 1).
CALIBRATED = -(math.log(4 / 5) + math.log(1 / 3) + math.log(1 / 13)) / 3
# Class 0: the mean of e^z over sample 3 is 6. Class 1: over samples 1 and 2, it is (1 + 4) / 2.
SUPPRESSED = 2 / 3 * math.log(6) + 1 / 3 * math.log(2.5)
# Classes 2 and 3: the teacher says 3/4 and 1/4. The student says 1/4 and 3/4, and twice 1/2 and 1/2.
DISTILLED = (0.5 * math.log(3) + 2 * (0.75 * math.log(1.5) + 0.25 * math.log(0.5))) / 3


def test_calibrated_cross_entropy_by_hand():
    loss, gradient = loss_and_gradient(Vacant(distillation=0, suppression=0), COUNTS)
    assert loss == pytest.approx(CALIBRATED, abs=1e-6)
    expected = torch.tensor([[4 / 5 - 1, 1 / 5, 0, 0], [1 / 3 - 1, 2 / 3, 0, 0], [12 / 13, 1 / 13 - 1, 0, 0]]) / 3
    torch.testing.assert_close(gradient, expected)


def test_suppression_by_hand():
    loss, gradient = loss_and_gradient(Vacant(distillation=0, suppression=2.0), COUNTS)
    assert loss == pytest.approx(CALIBRATED + 2 * SUPPRESSED, abs=1e-6)
    _, plain = loss_and_gradient(Vacant(distillation=0, suppression=0), COUNTS)
    # The logits of other classes fall: of class 0 for sample 3, and of class 1 for samples 1 and 2.
    expected = torch.tensor([[0, 1 / 3 * 1 / 5, 0, 0], [0, 1 / 3 * 4 / 5, 0, 0], [2 / 3, 0, 0, 0]])
    torch.testing.assert_close(gradient - plain, 2 * expected)


def test_distillation_by_hand():
    loss, gradient = loss_and_gradient(Vacant(distillation=1.5, suppression=0), COUNTS)
    assert loss == pytest.approx(CALIBRATED + 1.5 * DISTILLED, abs=1e-6)
    _, plain = loss_and_gradient(Vacant(distillation=0, suppression=0), COUNTS)
    expected = torch.tensor([[0, 0, -1 / 2, 1 / 2], [0, 0, -1 / 4, 1 / 4], [0, 0, -1 / 4, 1 / 4]]) / 3
    torch.testing.assert_close(gradient - plain, 1.5 * expected)


def test_all_parts_together():
    loss, _ = loss_and_gradient(Vacant(), COUNTS)
    assert loss == pytest.approx(CALIBRATED + 0.005 * SUPPRESSED + DISTILLED, abs=1e-6)


@pytest.mark.parametrize("counts", [[2.0, 1.0, 3.0, 2.0], [2.0, 1.0, 3.0, 0.0]])
def test_with_fewer_than_two_vacant_classes_nothing_is_distilled(counts):
    loss, gradient = loss_and_gradient(Vacant(distillation=9.0, suppression=0), counts)
    alone, same = loss_and_gradient(Vacant(distillation=0, suppression=0), counts)
    assert loss == alone
    assert torch.equal(gradient, same)


def test_with_equal_counts_and_nothing_else_it_is_cross_entropy():
    loss, _ = loss_and_gradient(Vacant(suppression=0), [3.0] * 4)
    assert loss == pytest.approx(F.cross_entropy(Z, LABELS).item(), abs=1e-6)
    model = Model(Table(Z))
    context = Balanced().client_init(model, Context(model.params(), torch.full((4,), 3.0), {}, None, 0.1))
    balanced = Balanced().loss(model, model.params(), Batch(torch.eye(3), LABELS), context)
    assert loss == balanced.item()


DIGITS = {
    "data": {"name": "digits", "limit": 400},
    "partition": {"name": "classes", "clients": 5, "per_client": 3},
    "training": {"rounds": 3, "clients_per_round": 3, "local_epochs": 2, "lr": 0.1},
}


@pytest.mark.slow
def test_without_distillation_and_suppression_it_is_balanced_softmax_bit_for_bit():
    alone = {"name": "fedvls", "distillation": 0, "suppression": 0}
    balanced, none, both = (fs.run({**DIGITS, "method": method}).params for method in ("bsm-fedavg", alone, "fedvls"))
    assert all(torch.equal(balanced[name], none[name]) for name in none)
    assert not all(torch.equal(balanced[name], both[name]) for name in none)


def test_clients_of_one_class_learn_nothing(start):
    started = start(fs.Experiment.from_table({**ONE_CLASS, "method": "fedvls"}))
    before = started.state.weights.params
    assert started.step()["train_loss"] == pytest.approx(0, abs=1e-9)
    for name, w in started.state.weights.params.items():
        torch.testing.assert_close(w, before[name], rtol=0, atol=1e-6)
