"""The task ``segmentation``: losses, weights and rows by hand, and refusals in one line."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.base.errors import DataError, SpecError
from fedstrata.data.dataset import Dataset, from_arrays
from fedstrata.data.tasks.segmentation import Segmentation

LOGITS = torch.zeros(2, 3, 1, 2)
LOGITS[0, 2, 0, 0] = math.log(2)  # class 2 with one half, the others with a quarter
LOGITS[1, 1, 0, 1] = math.log(4)  # class 1 with two thirds, the others with a sixth
TARGETS = torch.tensor([[[2, 1]], [[255, 1]]])
TASK = Segmentation(ignore=255)


def test_losses_and_weights_by_hand():
    losses, weights = TASK.losses(LOGITS, TARGETS)
    assert torch.allclose(losses, torch.tensor([math.log(2) + math.log(3), math.log(1.5)]))
    assert weights.tolist() == TASK.weights(TARGETS).tolist() == [2, 1]
    assert float(TASK.mean_loss(LOGITS, TARGETS)) == pytest.approx((math.log(2) + math.log(3) + math.log(1.5)) / 3)


def test_losses_of_larger_pictures_are_those_of_pytorch():
    logits, targets = torch.randn(3, 4, 5, 6), torch.randint(0, 4, (3, 5, 6))
    targets[0, :2] = 255
    expected = nn.functional.cross_entropy(logits, targets, ignore_index=255)
    assert float(TASK.mean_loss(logits, targets)) == pytest.approx(float(expected), rel=1e-6)


def test_rows_count_hits_targets_and_predictions_of_each_class():
    """Picture 1: a hit of class 2, and a 1 taken for 0. Picture 2: a hit of class 1; the other pixel does not count."""
    assert TASK.rows(LOGITS, TARGETS)["counts"].tolist() == [
        [[0, 0, 1], [0, 1, 0], [1, 1, 1]],
        [[0, 0, 0], [1, 1, 1], [0, 0, 0]],
    ]


def test_predictions_are_the_likeliest_class_of_each_pixel():
    assert TASK.predictions(LOGITS)["labels"].tolist() == [[[2, 0]], [[0, 1]]]


def pictures(**changes: Any) -> Dataset:
    """Return a data set of four pictures of 2×3 pixels, with some arguments of ``from_arrays`` changed."""
    x, y = np.arange(24).reshape(4, 2, 3), np.arange(24).reshape(4, 2, 3) % 3
    given = {"x_train": x, "y_train": y, "x_test": x, "y_test": y, "task": "segmentation"}
    return from_arrays(**given | changes)


def test_a_data_set_of_pictures():
    data = pictures()
    assert (data.outputs, data.shape, data.strata) == (3, (1, 2, 3), None)
    assert pictures(task=Segmentation(outputs=5)).outputs == 5
    assert pictures(class_names=["sky", "road", "car", "tree"]).outputs == 4


BAD: list[tuple[dict[str, Any], str]] = [
    ({"y_train": np.full((4, 2, 3), 255), "task": TASK}, "y_train: every target is 255"),
    ({"y_test": np.full((4, 2, 3), -100)}, "y_test: every target is -100"),
    ({"y_train": np.zeros((5, 2, 3), dtype=int)}, "y_train has 5 values for 4 samples"),
    (
        {"y_train": np.zeros(4, dtype=int)},
        "y_train has shape (4,). Use shape (N, …), with one class for each",
    ),
    ({"y_test": np.zeros((4, 3, 2), dtype=int)}, "y_test: a sample has the shape (3, 2), but"),
    ({"y_train": np.zeros((4, 2, 3))}, "y_train is of type float64. The task needs integers as targets"),
    ({"task": Segmentation(outputs=2)}, "y_train contains 2. Use 0…1, or task.ignore = -100"),
    ({"y_test": np.full((4, 2, 3), -1)}, "y_test contains -1. Use 0…2, or task.ignore = -100"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message for _, message in BAD])
def test_arrays_are_refused_in_one_line(changes: dict[str, Any], message: str):
    with pytest.raises(DataError) as refusal:
        pictures(**changes)
    assert str(refusal.value).startswith(message)
    assert "\n" not in str(refusal.value)


ONE = fs.Experiment(partition=fs.IID(clients=1), training=fs.Training(rounds=1, batch_size=2))


def test_a_model_whose_outputs_have_another_shape_is_refused():
    """Two classes for three."""
    with pytest.raises(SpecError, match=r"outputs of shape \(B, 3, 2, 3\), but returned \(2, 2, 2, 3\)") as refusal:
        fs.run(ONE, data=pictures(), model=lambda: nn.Conv2d(1, 2, 1))
    assert "\n" not in str(refusal.value)
