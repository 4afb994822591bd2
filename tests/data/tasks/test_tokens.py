"""The task ``next-token``: losses, weights and rows by hand, and refusals in one line."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.base.errors import DataError, FedstrataError, SpecError
from fedstrata.data.dataset import Dataset, from_arrays
from fedstrata.data.tasks.tokens import NextToken

TWO = torch.tensor([[[0.0, math.log(3)], [0.0, 0.0]], [[math.log(3), 0.0], [5.0, 1.0]]])
"""Logits of two sequences of two tokens: the first is certain of class 1 to three quarters, and so on."""

TARGETS = torch.tensor([[1, 0], [1, -100]])


def test_losses_and_weights_by_hand():
    losses, weights = NextToken().losses(TWO, TARGETS)
    assert torch.allclose(losses, torch.tensor([math.log(4 / 3) + math.log(2), math.log(4)]))
    assert weights.tolist() == NextToken().weights(TARGETS).tolist() == [2, 1]
    mean = (math.log(4 / 3) + math.log(2) + math.log(4)) / 3
    assert float(NextToken().mean_loss(TWO, TARGETS)) == pytest.approx(mean)


def test_rows_count_hits_and_tokens():
    """Token by token: right, a tie that argmax gives to class 0 (right), wrong, and padding."""
    assert NextToken().rows(TWO, TARGETS)["counts"].tolist() == [[[2, 2, 2]], [[0, 1, 1]]]


def test_a_sequence_of_padding_has_no_loss_and_no_weight():
    targets = torch.tensor([[0, 0]])
    task, outputs = NextToken(ignore=0), torch.randn(1, 2, 3, requires_grad=True)
    losses, weights = task.losses(outputs, targets)
    assert losses.tolist() == weights.tolist() == [0]
    task.mean_loss(outputs, targets).backward()
    assert not outputs.grad.any()


def test_predictions_are_the_likeliest_token_of_each_position():
    assert NextToken().predictions(TWO)["labels"].tolist() == [[1, 0], [0, 0]]


def tokens(**changes: Any) -> Dataset:
    """Return a data set of four sequences of three tokens, with some arguments of ``from_arrays`` changed."""
    x, y = np.arange(12).reshape(4, 3) % 5, np.arange(1, 13).reshape(4, 3) % 5
    given = {"x_train": x, "y_train": y, "x_test": x, "y_test": y, "normalize": "keep", "task": "next-token"}
    return from_arrays(**given | changes)


def test_ids_stay_as_they_are():
    data = tokens()
    assert data.inputs(slice(0, 1)).tolist() == [[0, 1, 2]]
    assert data.inputs(slice(0, 1)).dtype == torch.int64
    assert (data.outputs, data.shape, data.strata) == (5, (3,), None)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"y_train": np.full((4, 3), -100)}, "y_train: every target is -100"),
    ({"y_test": np.full((4, 3), -100)}, "y_test: every target is -100"),
    ({"y_train": np.zeros((3, 3), dtype=int)}, "y_train has 3 values for 4 samples"),
    (
        {"y_train": np.zeros(4, dtype=int)},
        "y_train has shape (4,). Use shape (N, …), with one class for each",
    ),
    ({"y_test": np.zeros((4, 2), dtype=int)}, "y_test: a sample has the shape (2,), but a sample of y_train has"),
    ({"y_train": np.zeros((4, 3))}, "y_train is of type float64. The task needs integers as targets"),
    ({"y_train": np.full((4, 3), "a")}, "y_train is of type <U1. The task needs integers as targets"),
    ({"task": NextToken(outputs=4)}, "y_train contains 4. Use 0…3, or task.ignore = -100"),
    ({"y_test": np.full((4, 3), -1)}, "y_test contains -1. Use 0…4, or task.ignore = -100"),
    ({"x_train": np.zeros((4, 3))}, "x_train is of type float64 and shape (4, 3). With normalize = 'keep'"),
    ({"x_test": np.zeros(4, dtype=int)}, "x_test is of type int64 and shape (4,). With normalize = 'keep'"),
    ({"x_test": np.zeros((4, 2), dtype=int)}, "a sample of x_train has size 3, but a sample of x_test has size 2"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message for _, message in BAD])
def test_arrays_are_refused_in_one_line(changes: dict[str, Any], message: str):
    with pytest.raises(DataError) as refusal:
        tokens(**changes)
    assert str(refusal.value).startswith(message)
    assert "\n" not in str(refusal.value)


ONE = fs.Experiment(partition=fs.IID(clients=1), training=fs.Training(rounds=1, batch_size=2))


class Flat(nn.Module):
    """Returns one row of logits for each sequence, where the task needs one for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 5)

    def forward(self, x):
        return self.embed(x).mean(dim=1)


def test_a_model_whose_outputs_have_another_shape_is_refused():
    with pytest.raises(SpecError, match=r"model: .*return outputs of shape \(B, 3, 5\), but returned \(2, 5\)") as bad:
        fs.run(ONE, data=tokens(), model=Flat)
    assert "\n" not in str(bad.value)


def test_an_id_that_the_model_does_not_know_is_refused_before_the_first_round():
    with pytest.raises(FedstrataError, match="index out of range") as bad:
        fs.run(ONE, data=tokens(x_train=np.full((4, 3), 7)), model=Flat)
    assert "\n" not in str(bad.value)


def test_a_metric_of_classes_is_refused():
    spec = ONE.model_copy(update={"evaluation": fs.Evaluation(metrics=["auroc"])})
    with pytest.raises(SpecError, match=r"metrics.*is not a metric of the task 'next-token'"):
        fs.run(spec, data=tokens(), model=lambda: nn.Embedding(5, 5))
