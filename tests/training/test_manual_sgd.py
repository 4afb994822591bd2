from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedstrata.nn.zoo import CNN, MLP, Tabular
from fedstrata.training.manual_sgd import ManualSGD


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
        loss = chain.step(params, X[:size], Y[:size], 0.5, decay)
        torch.testing.assert_close(loss.clone(), expected.detach())
    for name, p in module.named_parameters():
        torch.testing.assert_close(params[name], p.detach(), rtol=1e-5, atol=1e-6)


def test_the_gradient_is_that_of_autograd_in_the_order_of_the_parameters():
    module = mlp()
    loss = F.cross_entropy(module(X), Y)
    expected = torch.autograd.grad(loss, list(module.parameters()))
    params = own(module)
    found, gradient = ManualSGD.of(module).gradient(params, X, Y)
    torch.testing.assert_close(found, loss.detach())
    for a, b in zip(gradient, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert all(torch.equal(w, p) for w, p in zip(params.values(), module.parameters(), strict=True))


def convolutional(convolution, pool=None):
    """A convolution and what stands after it, up to the logits of images of 9x9."""
    body = nn.Sequential(convolution, pool or nn.MaxPool2d(2), nn.ReLU(), nn.Flatten())
    return body.append(nn.Linear(body(torch.zeros(1, 1, 9, 9)).shape[1], 3))


def images(count, shape, *, ties=False):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, *shape, generator=generator)
    if ties:  # as in black margins: every value of a window is the bias
        x[:, :, 3:] = 0
    return x, torch.randint(3, (count,), generator=generator)


CONVOLUTIONAL = {
    "zoo": (lambda: CNN(channels=(4, 6), hidden=8).build((2, 9, 12), 3), (2, 9, 12)),
    "digits": (lambda: CNN(channels=(4, 5, 6), hidden=8).build((1, 8, 8), 3), (1, 8, 8)),
    "usual": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(4, 5, (2, 3), padding=(0, 1), stride=(1, 2)), nn.MaxPool2d((2, 2), 2), nn.ReLU(inplace=True)),
            *(nn.Flatten(), nn.Linear(5, 3)),
        ),
        (3, 11, 10),
    ),
}


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_convolutions_have_the_gradient_of_autograd(name, channels_last, ties):
    make, shape = CONVOLUTIONAL[name]
    torch.manual_seed(0)
    module = make().to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    x, y = images(7, shape, ties=ties)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    before = x.clone()
    loss = F.cross_entropy(module(x), y)
    expected = torch.autograd.grad(loss, list(module.parameters()))
    found, gradient = ManualSGD.of(module).gradient(own(module), x, y)
    torch.testing.assert_close(found, loss.detach())
    for a, b in zip(gradient, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert torch.equal(x, before)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_steps_with_convolutions_are_those_of_pytorchs_sgd(decay):
    make, shape = CONVOLUTIONAL["zoo"]
    torch.manual_seed(0)
    module = make()
    chain, params = ManualSGD.of(module), own(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2, weight_decay=decay)
    for size in (6, 4, 1):
        x, y = images(size, shape)
        optimizer.zero_grad()
        expected = F.cross_entropy(module(x), y)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(chain.step(params, x, y, 0.2, decay).clone(), expected.detach())
    for name, p in module.named_parameters():
        torch.testing.assert_close(params[name], p.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(16, 3)),
        nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(16, 4, bias=False), nn.ReLU()), nn.Linear(4, 3)),
        Tabular().build((16,), 3),
    ],
    ids=["linear", "nested", "tabular"],
)
def test_chains_of_ones_own(module):
    chain, params = ManualSGD.of(module), own(module)
    x = X.flatten(1) if isinstance(module, nn.Sequential) is False else X
    loss = F.cross_entropy(module(x), Y)
    torch.testing.assert_close(chain.step(params, x, Y, 0.1).clone(), loss.detach())


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
        convolutional(nn.Conv2d(1, 2, 3, bias=False)),
        convolutional(nn.Conv2d(1, 2, 3, dilation=2)),
        convolutional(nn.Conv2d(1, 2, 3, padding="same")),
        convolutional(nn.Conv2d(1, 2, 3, padding_mode="circular")),
        convolutional(nn.Conv2d(1, 2, 3), nn.AvgPool2d(2)),
        convolutional(nn.Conv2d(1, 2, 3), nn.MaxPool2d(3)),
        convolutional(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2, stride=1)),
        convolutional(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2, ceil_mode=True)),
        convolutional(nn.Conv2d(1, 2, 3), nn.Tanh()),
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
