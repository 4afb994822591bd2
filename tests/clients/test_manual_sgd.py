from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedstrata.clients.training.sgd import ManualSGD
from fedstrata.models.zoo import MLP, Tabular
from fedstrata.objectives.base import Batch


def mlp(hidden=(7, 5)):
    torch.manual_seed(0)
    return MLP(hidden=hidden).build((1, 4, 4), 3)


def own(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


X, Y = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 2, 1, 0])


@pytest.mark.parametrize("hidden", [(), (7,), (7, 5)])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_steps_are_those_of_pytorchs_sgd(hidden, decay):
    module = mlp(hidden)
    chain, params = ManualSGD.of(module), own(module)
    assert chain is not None
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, weight_decay=decay)
    for size in (6, 4, 1):
        optimizer.zero_grad()
        expected = F.cross_entropy(module(X[:size]), Y[:size])
        expected.backward()
        optimizer.step()
        loss = chain.step(params, Batch(X[:size], Y[:size]), 0.5, decay)
        torch.testing.assert_close(loss.clone(), expected.detach())
    for name, p in module.named_parameters():
        torch.testing.assert_close(params[name], p.detach(), rtol=1e-5, atol=1e-6)


def test_the_gradient_is_that_of_autograd_in_the_order_of_the_parameters():
    module = mlp()
    loss = F.cross_entropy(module(X), Y)
    expected = torch.autograd.grad(loss, list(module.parameters()))
    params = own(module)
    found, gradient = ManualSGD.of(module).gradient(params, Batch(X, Y))
    torch.testing.assert_close(found, loss.detach())
    for a, b in zip(gradient, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert all(torch.equal(w, p) for w, p in zip(params.values(), module.parameters(), strict=True))


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), X),
        (nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(16, 4, bias=False), nn.ReLU()), nn.Linear(4, 3)), X),
        (Tabular().build((16,), 3), X.flatten(1)),
    ],
    ids=["linear", "nested", "tabular"],
)
def test_chains_of_ones_own(module, x):
    chain, params = ManualSGD.of(module), own(module)
    loss = F.cross_entropy(module(x), Y)
    torch.testing.assert_close(chain.step(params, Batch(x, Y), 0.1).clone(), loss.detach())


def frozen():
    module = mlp()
    module.head.weight.requires_grad_(False)
    return module


def watched():
    module = mlp()
    module.head.register_forward_pre_hook(lambda part, args: (args[0] * 2,))
    return module


def tied():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), second)


def again(part):
    """A layer that comes twice."""
    return nn.Sequential(nn.Linear(3, 3), part, nn.Linear(3, 3), part)


class Doubled(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Linear(3, 3)),
        frozen(),
        watched(),
        tied(),
        again(nn.ReLU()),
        again(nn.Linear(3, 3)),
        Doubled(nn.Linear(3, 3)),
        nn.Sequential(Scaled(3, 3)),
        nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)),
        nn.Sequential(nn.Linear(3, 3), nn.ReLU()),
        nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)),
        nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.Linear(3, 3)),
        nn.Sequential(nn.Linear(3, 3).double()),
        nn.Sequential(nn.Flatten(2), nn.Linear(3, 3)),
    ],
    ids=str,
)
def test_everything_else_is_left_to_autograd(module):
    assert ManualSGD.of(module) is None
