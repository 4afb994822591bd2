"""FedDecorr's correlation of features by hand, and its range."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.models.model import Model
from fedstrata.objectives.base import Batch, Context
from fedstrata.objectives.feddecorr import Decorrelated, correlation

X = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, -1.0], [2.0, 3.0, 1.0], [3.0, 3.0, -1.0]])
"""Three features of four samples, with the correlations 2 / √5, −1 / √5 and 0."""


class Plain(nn.Module):
    """A model whose features are its inputs, times a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3, bias=False)
        self.head = nn.Linear(3, 2)
        with torch.no_grad():
            self.body.weight.copy_(torch.eye(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def test_three_features_by_hand():
    """‖K‖² = 3 + 2 (4/5 + 1/5 + 0) = 5, and d² = 9."""
    torch.testing.assert_close(torch.corrcoef(X.T)[0], torch.tensor([1, 2 / 5**0.5, -1 / 5**0.5]))
    assert correlation(X).item() == pytest.approx(5 / 9, abs=1e-6)


def test_scale_and_offset_do_not_matter():
    moved = X * torch.tensor([3.0, -0.5, 20.0]) + torch.tensor([7.0, -1.0, 0.0])
    assert correlation(moved).item() == pytest.approx(5 / 9, abs=1e-5)


@pytest.mark.slow
@given(st.integers(2, 9), st.integers(1, 12), st.integers(0, 999))
def test_it_lies_between_0_and_1_and_is_the_norm_of_the_correlation_matrix(samples, features, seed):
    x = torch.randn(samples, features, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assume(x.var(dim=0).min() > 0.01)  # otherwise EPSILON is not negligible
    expected = torch.corrcoef(x.T).reshape(features, features).square().mean()
    torch.testing.assert_close(correlation(x), expected, rtol=1e-4, atol=1e-6)
    assert 1 / features - 1e-4 <= correlation(x).item() <= 1 + 1e-6


def test_uncorrelated_features_are_a_minimum():
    x = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    least = correlation(x)
    (gradient,) = torch.autograd.grad(least, x)
    assert least.item() == pytest.approx(1 / 2)
    assert gradient.abs().max().item() < 1e-7


def test_features_that_are_the_same_for_all_samples_have_no_correlation():
    x = torch.tensor([[2.0, 0.0], [2.0, 1.0]], requires_grad=True)
    value = correlation(x)
    value.backward()
    assert value.item() == pytest.approx(1 / 4)
    assert torch.isfinite(x.grad).all()


def test_the_loss_by_hand():
    model, objective = Model(Plain()), Decorrelated(beta=0.9)
    batch = Batch(X, torch.tensor([0, 1, 0, 1]))
    context = Context(model.params(), torch.ones(2), {}, None, 0.1)
    plain = F.cross_entropy(model(model.params(), X), batch.y).item()
    assert objective.loss(model, model.params(), batch, context).item() == pytest.approx(plain + 0.9 * 5 / 9, abs=1e-6)
    one = F.cross_entropy(model(model.params(), X[:1]), batch.y[:1]).item()
    assert objective.loss(model, model.params(), batch[:1], context).item() == pytest.approx(one)


CNN = {"name": "cnn", "channels": [4, 8], "hidden": 16}
DIGITS = {
    "data": {"name": "digits", "limit": 400},
    "model": CNN,
    "partition": {"name": "classes", "clients": 5, "per_client": 2},
    "training": {"rounds": 3, "clients_per_round": 3, "local_epochs": 2, "lr": 0.05},
}


@pytest.mark.slow
def test_with_beta_0_it_is_fedavg_bit_for_bit():
    plain = fs.run(DIGITS).params
    none = fs.run({**DIGITS, "method": {"name": "feddecorr", "beta": 0}}).params
    assert all(torch.equal(plain[name], none[name]) for name in plain)


@pytest.mark.slow
def test_features_of_digits_correlate_less_than_with_fedavg():
    prepared = fs.prepare(fs.Experiment.from_table(DIGITS))
    x = prepared.data.inputs(torch.arange(400))

    def of_digits(method: Any) -> float:
        params = fs.run({**DIGITS, "method": method}).params
        with torch.no_grad():
            return correlation(prepared.config.model.with_features(params, x)[0]).item()

    assert of_digits({"name": "feddecorr", "beta": 1.0}) < 0.9 * of_digits("fedavg")
