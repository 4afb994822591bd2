"""A straight line of operations is SGD, whatever the model."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from quick import others_long
from torch import nn

from fedstrata.clients.training.traced_sgd import TracedSGD
from fedstrata.models.model import Model
from fedstrata.models.zoo import CNN, MLP


class Residual(nn.Module):
    """Shared weights, an in-place sum, an embedding that is used twice, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.idle = nn.Parameter(torch.ones(2))
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.inner(x))
        y = self.inner(y)
        y += x * self.scale
        logits: torch.Tensor = self.head(F.gelu(y) + y)
        return logits


def by_hand(module: nn.Module, x: torch.Tensor, y: torch.Tensor, lr: float, decay: float) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(module.parameters(), lr=lr, weight_decay=decay)
    losses = []
    for i in range(len(y)):
        optimizer.zero_grad()
        loss = F.cross_entropy(module(x[i : i + 1]), y[i : i + 1])
        loss.backward()
        # PyTorch's optimiser leaves alone what has no gradient; ours lets decay move it.
        for p in module.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        optimizer.step()
        losses.append(loss.detach())
    return losses


CASES = {
    "mlp": (lambda: MLP(hidden=(9, 7)).build((1, 4, 4), 3), (1, 4, 4)),
    "logistic": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(5, 3, bias=False)), (5,)),
    "cnn": (lambda: CNN(channels=(3, 4), hidden=8).build((1, 8, 8), 3), (1, 8, 8)),
    "colour": (lambda: CNN(channels=(3, 4), hidden=8).build((3, 8, 8), 3), (3, 8, 8)),
    "residual": (Residual, (6,)),
    "layernorm": (lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.SiLU(), nn.Linear(5, 3)), (6,)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "decay"),
    others_long(itertools.product(CASES, [0.0, 0.1]), [*((case, 0.1) for case in CASES), ("residual", 0.0)]),
)
def test_it_is_sgd(case, decay):
    torch.manual_seed(0)
    build, shape = CASES[case]
    model = Model(build())
    x, y = torch.randn(40, *shape), torch.randint(0, 3, (40,))
    if len(shape) == 3:
        x = x.to(memory_format=torch.channels_last)
    line = TracedSGD(lambda p, x, y: F.cross_entropy(model(p, x), y), model.params(), x[:1], y[:1], decay)
    first = line.run(x[:25], y[:25], lr=0.1)
    second = line.run(x[25:], y[25:], lr=0.05)
    losses = by_hand(model.module, x[:25], y[:25], 0.1, decay) + by_hand(model.module, x[25:], y[25:], 0.05, decay)
    torch.testing.assert_close(torch.cat([first, second]), torch.stack(losses), rtol=1e-4, atol=1e-5)
    for name, tensor in model.module.named_parameters():
        torch.testing.assert_close(line.params()[name], tensor.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_same_bits_in_one_go_or_in_many():
    torch.manual_seed(1)
    model = Model(MLP(hidden=(20,)).build((10,), 3))
    x, y = torch.randn(30, 10), torch.randint(0, 3, (30,))
    line = TracedSGD(lambda p, x, y: F.cross_entropy(model(p, x), y), model.params(), x[:1], y[:1])
    line.run(x, y, 0.1)
    whole = line.params()
    params = model.params()
    for part in (slice(0, 7), slice(7, 8), slice(8, 30)):
        line.load(params)
        line.run(x[part], y[part], 0.1)
        params = line.params()
    assert all(torch.equal(whole[name], params[name]) for name in whole)


@pytest.mark.slow
def test_weights_gradients_are_never_stored():
    model = Model(MLP(hidden=(9, 7)).build((6,), 3))
    x, y = torch.randn(1, 6), torch.zeros(1, dtype=torch.int64)
    line = TracedSGD(lambda p, x, y: F.cross_entropy(model(p, x), y), model.params(), x, y)
    code = line._step.__self__.code  # type: ignore[attr-defined]
    assert code.count("addmm_") - code.count("= addmm_") >= 3
    assert code.count("aten.mm.") == 2  # the two that carry the gradient to the layer below


@pytest.mark.slow
def test_dropout_is_random_and_said_to_be():
    model = Model(nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, 3)))
    model.module.train()
    x, y = torch.randn(20, 6), torch.randint(0, 3, (20,))
    line = TracedSGD(lambda p, x, y: F.cross_entropy(model(p, x), y), model.params(), x[:1], y[:1])
    assert line.random
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        line.load(model.params())
        line.run(x, y, 0.1)
        results.append(line.params()["0.weight"])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


class Looks(nn.Module):
    """Takes another way for some values, which no trace can know."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(x if x.sum() > 0 else -x)
        return logits


@pytest.mark.slow
@pytest.mark.parametrize(
    "build", [Looks, lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))]
)
def test_what_cannot_be_traced_is_refused(build):
    model = Model(build())
    model.module.train()
    x = torch.randn(1, 4) if isinstance(model.module, Looks) else torch.randn(1, 1, 4, 4)
    with pytest.raises(Exception, match=r".+"):
        TracedSGD(lambda p, x, y: F.cross_entropy(model(p, x), y), model.params(), x, torch.zeros(1, dtype=torch.int64))
