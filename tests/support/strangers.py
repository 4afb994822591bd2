"""Models that the library does not have: what a stranger brings, called as ``factory(shape, classes)``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16


class Flat(nn.Module):
    """What most of them share: samples as vectors, and a head."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.features = torch.Size(shape).numel()
        self.head = nn.Linear(WIDTH, classes)

    def body(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.flatten(1)))


class LoRA(Flat):
    """A frozen matrix and a trained product beside it: W + A B."""

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
    """One matrix in two layers, and once more transposed."""

    def __init__(self, shape: Any, classes: int) -> None:
        super().__init__(shape, classes)
        self.enter = nn.Linear(self.features, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def body(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.second(F.relu(self.first(self.enter(x)))))
        return hidden + F.linear(hidden, self.first.weight.t())


class Rebound(Flat):
    """A buffer that every forward pass binds to a new tensor."""

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
    """A random layer that is no Dropout."""

    def __init__(self, shape: Any, classes: int) -> None:
        super().__init__(shape, classes)
        self.enter, self.act = nn.Linear(self.features, WIDTH), nn.RReLU()

    def body(self, x: Tensor) -> Tensor:
        return self.act(self.enter(x))


class Dropped(Flat):
    """Dropout."""

    def __init__(self, shape: Any, classes: int) -> None:
        super().__init__(shape, classes)
        self.enter, self.drop = nn.Linear(self.features, WIDTH), nn.Dropout(0.3)

    def body(self, x: Tensor) -> Tensor:
        return self.drop(F.relu(self.enter(x)))


class Attention(Flat):
    """Attention over rows, whose dropout is an argument and no layer."""

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
    """Whole numbers as inputs, looked up in a table."""

    def __init__(self, shape: Any, classes: int) -> None:
        super().__init__(shape, classes)
        self.table = nn.Embedding(17, WIDTH)
        self.mix = nn.Parameter(torch.randn(self.features, WIDTH) * 0.1)

    def body(self, x: Tensor) -> Tensor:
        return torch.tanh((self.table((16 * x).round().long().clamp(0, 16)) * self.mix).sum(1))


class TwoHeads(Flat):
    """Two heads that are added up, on a body of which a part is frozen."""

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
"""Those whose forward pass draws random numbers."""


def _normed(base: type[Any]) -> type[Any]:
    """The same with BatchNorm, whose batches are those of all clients together."""

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
