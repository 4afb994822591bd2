"""FedProx's proximal term by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedstrata as fs
from fedstrata.objectives.base import Context
from fedstrata.objectives.fedprox import Proximal

X = [[0.5, -1.0], [1.5, 0.3], [-0.7, 0.8]]


def trained(objective, module: nn.Module, *, steps: int, lr: float = 0.2, **training) -> dict[str, torch.Tensor]:
    spec = fs.Experiment(
        partition={"name": "given", "indices": ((0, 1, 2),)},
        method={"name": "fedavg", "objective": objective},
        training={"rounds": 1, "lr": lr, "local_steps": steps, **training},
    )
    data = fs.from_arrays(X, [0, 1, 2], X, [0, 1, 2], normalize="none")
    return fs.run(spec, data=data, model=module).params


def linear() -> nn.Module:
    module = nn.Linear(2, 3)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[0.1, -0.2], [0.3, 0.4], [-0.5, 0.6]]))
        module.bias.copy_(torch.tensor([0.7, -0.8, 0.9]))
    return module


def test_the_correction_is_mu_times_the_distance():
    params = {"w": torch.tensor([1.0, 4.0]), "b": torch.tensor([-2.0])}
    start = {"w": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.5])}
    context = Context(start, torch.zeros(2), {}, None, 0.1)
    found = Proximal(mu=0.25).correction(params, context)
    assert {name: w.tolist() for name, w in found.items()} == {"w": [-0.5, 0.0], "b": [-0.625]}


def test_three_steps_are_those_of_the_penalised_loss():
    mu, lr = 0.5, 0.2
    start = {name: p.detach().clone() for name, p in linear().named_parameters()}
    w = {name: p.double().requires_grad_(True) for name, p in start.items()}
    x, y = torch.tensor(X).double(), torch.arange(3)
    for _ in range(3):
        penalty = sum((w[name] - start[name].double()).square().sum() for name in w)
        loss = F.cross_entropy(x @ w["weight"].T + w["bias"], y) + mu / 2 * penalty
        gradient = torch.autograd.grad(loss, list(w.values()))
        w = {name: (p - lr * g).detach().requires_grad_(True) for (name, p), g in zip(w.items(), gradient, strict=True)}
    found = trained({"name": "fedprox", "mu": mu}, linear(), steps=3)
    for name, expected in w.items():
        torch.testing.assert_close(found[name].double(), expected.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_without_strength_it_is_fedavg_and_with_much_it_stays_near():
    plain = trained("cross-entropy", linear(), steps=8)
    none = trained({"name": "fedprox", "mu": 0}, linear(), steps=8)
    # FedAvg's step goes straight into the weights of a linear layer: the same sums in another order.
    for name in plain:
        torch.testing.assert_close(none[name], plain[name], rtol=1e-5, atol=1e-6)
    # Where both go through autograd, they are the same bits.
    plain = trained("cross-entropy", linear(), steps=8, precision="bf16")
    none = trained({"name": "fedprox", "mu": 0}, linear(), steps=8, precision="bf16")
    assert all(torch.equal(plain[name], none[name]) for name in plain)
    moved = [
        float((trained({"name": "fedprox", "mu": mu}, linear(), steps=8)["weight"] - linear().weight).detach().norm())
        for mu in (0.0, 1.0, 4.0)
    ]
    assert moved[0] > 1.5 * moved[1] > 1.5 * 1.5 * moved[2] > 0


@pytest.mark.parametrize("steps", [1, 4])
def test_buffers_are_not_pulled(steps):
    def norm() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(2, affine=False), linear())

    pulled = trained({"name": "fedprox", "mu": 3.0}, norm(), steps=steps)
    plain = trained("cross-entropy", norm(), steps=steps)
    # BatchNorm comes first and has nothing to learn: its statistics are those of the data, pull or no pull.
    assert torch.equal(pulled["0.running_mean"], plain["0.running_mean"])
    assert float(pulled["0.running_var"].sub(1).abs().max()) > 0.01
    assert torch.equal(pulled["1.weight"], plain["1.weight"]) == (steps == 1)
