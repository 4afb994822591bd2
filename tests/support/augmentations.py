"""Augmentations of a user's own, as ``"augmentations:function"``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

SEEN: list[torch.Tensor] = []
"""Copies of the batches that ``recorded`` returned."""


def same(x: Any, generator: torch.Generator) -> Any:
    """Return the batch."""
    return x


def noise(x: torch.Tensor, generator: torch.Generator, scale: float = 0.1) -> torch.Tensor:
    """Add noise."""
    return x + scale * torch.randn(x.shape, generator=generator)


def recorded(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Add noise, in place, and keep a copy."""
    x += torch.randn(x.shape, generator=generator)
    SEEN.append(x.clone())
    return x


def halved(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return fewer features."""
    return x[..., ::2]


def doubled(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return another type."""
    return x.double()


def nothing(x: torch.Tensor, generator: torch.Generator) -> None:
    """Return nothing."""


def listed(x: torch.Tensor, generator: torch.Generator) -> list[torch.Tensor]:
    """Return a list of samples."""
    return list(x)


def failing(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Fail."""
    raise ZeroDivisionError("no such batch")


def unseeded(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw from PyTorch's global generator."""
    return x + torch.randn(x.shape)


def unseeded_numpy(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw from a NumPy generator without a seed."""
    return x * np.random.default_rng().normal()


@dataclass
class Shift:
    """An object that is called like a function, and has no hash."""

    by: float

    def __call__(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return x + self.by


shift = Shift(1.0)
masked = {"share": 0.5}
"""Something that is not a function."""
