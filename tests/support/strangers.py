"""Unusual models of users ("strangers") to test the library with; each is called as ``factory(shape, classes)``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16


class Flat(nn.Module):
    """Base class of most of these models, with samples as vectors and a linear head."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.features = torch.Size(shape).numel()
        self.head = nn.Linear(WIDTH, classes)

    def body(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.flatten(1)))


class LoRA(Flat):
    """A layer with the weight W + A B, in which W is frozen and A and B are trained."""

    def __init__(self, shape: Any, classes: int) -> None:
        super().__init__(shape, classes)
        self.frozen = nn.Parameter(torch.randn(WIDTH, self.features) * 0.1, requires_grad=False)
        self.a, self.b = (nn.Parameter(torch.randn(*size) * 0.3) for size in ((WIDTH, 4), (4, self.features)))

    def body(self, x: Tensor) -> Tensor:
        return F.relu(F.linear(x, self.frozen + self.a @ self.b))


class LowRank(Flat):
    """A layer whose weight is a product of two parameters."""

    def __init__(self, shape: Any, classes: int) -> None:
        super().__init__(shape, classes)
        self.u, self.v = (nn.Parameter(torch.randn(*size) * 0.3) for size in ((WIDTH, 6), (6, self.features)))

    def body(self, x: Tensor) -> Tensor:
        return F.relu(F.linear(x, self.u @ self.v))


class Tied(Flat):
    """A model that uses one matrix in two layers, and its transpose in a third."""

    def __init__(self, shape: Any, classes: int) -> None:
        super().__init__(shape, classes)
        self.enter = nn.Linear(self.features, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def body(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.second(F.relu(self.first(self.enter(x)))))
        return hidden + F.linear(hidden, self.first.weight.t())


class Rebound(Flat):
    """A model with a buffer that every forward pass replaces by a new tensor."""

    def __init__(self, shape: Any, classes: int) -> None:
        super().__init__(shape, classes)
        self.enter = nn.Linear(self.features, WIDTH)
        self.register_buffer("ema", torch.zeros(WIDTH))

    def body(self, x: Tensor) -> Tensor:
        hidden = self.enter(x)
        if self.training:
            self.ema = 0.9 * self.ema + 0.1 * hidden.detach().mean(0)
        return torch.tanh(hidden - self.ema)


class RandomSlopes(Flat):
    """A model with a random layer that is not dropout."""

    def __init__(self, shape: Any, classes: int) -> None:
        super().__init__(shape, classes)
        self.enter, self.act = nn.Linear(self.features, WIDTH), nn.RReLU()

    def body(self, x: Tensor) -> Tensor:
        return self.act(self.enter(x))


class Dropped(Flat):
    """A model with dropout."""

    def __init__(self, shape: Any, classes: int) -> None:
        super().__init__(shape, classes)
        self.enter, self.drop = nn.Linear(self.features, WIDTH), nn.Dropout(0.3)

    def body(self, x: Tensor) -> Tensor:
        return self.drop(F.relu(self.enter(x)))


class Attention(Flat):
    """Attention over the rows of an image, with dropout inside the attention function."""

    def __init__(self, shape: Any, classes: int) -> None:
        super().__init__(shape, classes)
        self.enter = nn.Linear(8, WIDTH)
        self.attend = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)

    def body(self, x: Tensor) -> Tensor:
        rows = self.enter(x.view(len(x), -1, 8))
        return self.attend(rows, rows, rows, need_weights=False)[0].mean(1)


class Grouped(nn.Module):
    """Convolutions with GroupNorm."""

    def __init__(self, shape: Any, classes: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x.view(len(x), 1, 8, 8)))).mean((2, 3)))


class Embedded(Flat):
    """A model that converts its inputs to whole numbers, and looks these up in an embedding table."""

    def __init__(self, shape: Any, classes: int) -> None:
        super().__init__(shape, classes)
        self.table = nn.Embedding(17, WIDTH)
        self.mix = nn.Parameter(torch.randn(self.features, WIDTH) * 0.1)

    def body(self, x: Tensor) -> Tensor:
        return torch.tanh((self.table((16 * x).round().long().clamp(0, 16)) * self.mix).sum(1))


class TwoHeads(Flat):
    """A model that adds the outputs of two heads; part of its body is frozen."""

    def __init__(self, shape: Any, classes: int) -> None:
        super().__init__(shape, classes)
        self.fixed = nn.Linear(self.features, WIDTH).requires_grad_(False)
        self.enter, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, classes, bias=False)

    def body(self, x: Tensor) -> Tensor:
        return F.relu(self.enter(F.relu(self.fixed(x))))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x.flatten(1))
        return self.head(hidden) + 0.5 * self.other(hidden)


ZOO = (LoRA, LowRank, Tied, Rebound, RandomSlopes, Dropped, Attention, Grouped, Embedded, TwoHeads)
DRAWS = (RandomSlopes, Dropped, Attention)
"""The models whose forward pass draws random numbers."""


def _normed(base: type[Any]) -> type[Any]:
    """Return a variant of a model with BatchNorm over the samples of all clients."""

    class Normed(base):
        def __init__(self, shape: tuple[int, ...], classes: int) -> None:
            super().__init__(shape, classes)
            self.batch_norm = nn.BatchNorm2d(8) if base is Grouped else nn.BatchNorm1d(WIDTH)
            if base is Grouped:
                self.norm = nn.Sequential(self.batch_norm, self.norm)

        def body(self, x: Tensor) -> Tensor:
            return self.batch_norm(super().body(x))

    Normed.__name__ = Normed.__qualname__ = f"{base.__name__}Normed"
    return Normed


globals().update({f"{model.__name__}Normed": _normed(model) for model in ZOO})
