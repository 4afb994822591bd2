"""Membership inference: the score by hand, pairs of equal classes, and laws of the guesses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedstrata as fs
from fedstrata.audits.membership import CHUNK, cosines, matched_pairs, right_pairs
from fedstrata.base.rng import torch_seeded
from fedstrata.data.dataset import Dataset
from fedstrata.federation.messages import Params, Weights
from fedstrata.models.model import Model


def data_of(x: list[list[float]], y: list[int]) -> Dataset:
    return fs.from_arrays(np.array(x, dtype=np.float32), y, np.array(x, dtype=np.float32), y, normalize="none")


def linear(inputs: int, classes: int) -> Model:
    with torch_seeded(0, "module"):
        return Model(nn.Linear(inputs, classes))


def gradient_of(model: Model, x: torch.Tensor, y: torch.Tensor) -> Params:
    with model.loaded(model.params(), model.buffers()) as params:
        loss = F.cross_entropy(model(params, x), y)
        return dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))


def test_cosines_by_hand() -> None:
    """Two classes and zero weights: p = 1/2, so the gradient is (p − y) (x, 1)."""
    model, data = Model(nn.Linear(2, 2)), data_of([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], [0, 0, 1])
    weights = Weights({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, {})
    # The negative gradient of sample 0 is ½ in row 0 and −½ in row 1: (1, 0) in the weight, 1 in the bias.
    update = {"weight": torch.tensor([[2.0, 0.0], [-2.0, 0.0]]), "bias": torch.tensor([2.0, -2.0])}
    found = cosines(model, weights, update, data, np.array([0, 1, 2]))
    # Sample 1 shares only the bias, half of the squared length; sample 2 has the opposite gradient.
    torch.testing.assert_close(found, torch.tensor([1.0, 0.5, -1.0]))


def test_cosines_are_those_of_single_gradients() -> None:
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(CHUNK + 3, 4)).round(2).tolist(), (np.arange(CHUNK + 3) % 3).tolist()
    data, model = data_of(x, y), linear(4, 3)
    update = {name: torch.from_numpy(generator.normal(size=w.shape)).float() for name, w in model.params().items()}
    flat = torch.cat([w.flatten() for w in update.values()])
    wanted = []
    for sample in range(len(y)):
        gradient = gradient_of(model, data.inputs(slice(sample, sample + 1)), data.targets(slice(sample, sample + 1)))
        wanted.append(-F.cosine_similarity(torch.cat([g.flatten() for g in gradient.values()]), flat, dim=0))
    found = cosines(model, Weights(model.params(), {}), update, data, np.arange(len(y)))
    torch.testing.assert_close(found, torch.stack(wanted), rtol=1e-4, atol=1e-5)


def test_pairs_have_equal_classes_and_no_test_sample_twice() -> None:
    data = fs.from_arrays(np.zeros((7, 1)), [0, 0, 0, 1, 1, 2, 2], np.zeros((4, 1)), [0, 0, 1, 1])
    members, tests = matched_pairs(np.array([0, 1, 2, 3, 5]), data, np.random.default_rng(0))
    assert data.y_train[members].tolist() == data.y_test[tests].tolist() == [0, 0, 1]  # class 2 has no test sample
    assert len(set(tests.tolist())) == 3


@pytest.mark.slow
def test_updates_reveal_members_and_random_numbers_do_not() -> None:
    prepared = fs.prepare(fs.Experiment(data={"name": "digits"}, model={"name": "mlp", "hidden": [32]}))
    data, model = prepared.data, prepared.config.model
    weights, generator = Weights(model.params(), {}), np.random.default_rng(0)
    right, guessed, pairs, total = 0, 0, 0, 0
    for begin in range(0, 120, 6):
        members = np.arange(begin, begin + 6)
        gradient = gradient_of(model, data.inputs(torch.from_numpy(members)), data.y_train[members])
        update = {name: -0.1 * g for name, g in gradient.items()}
        found = right_pairs(model, weights, update, data, members, generator)
        right, pairs = right + found[0], pairs + found[1]
        noise = {name: torch.from_numpy(generator.normal(size=w.shape)).float() for name, w in update.items()}
        found = right_pairs(model, weights, noise, data, members, generator)
        guessed, total = guessed + found[0], total + found[1]
    assert pairs == total == 120
    assert right > 0.9 * pairs
    assert abs(guessed - total / 2) < 4 * math.sqrt(total / 4)
