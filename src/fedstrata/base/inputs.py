"""Inputs of a model: one tensor, or several tensors with names, such as the ids of tokens and their mask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

Inputs = Tensor | Mapping[str, Tensor]
"""A batch: one tensor (B, …), or a mapping from the names of the module's arguments to tensors (B, …)."""

Shape = tuple[int, ...] | Mapping[str, tuple[int, ...]]
"""The shape of one sample: (channels, height, width), (features,) or another; or that of each of its tensors."""


def each(x: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Return inputs with a function applied to each tensor."""
    return change(x) if isinstance(x, Tensor) else {name: change(tensor) for name, tensor in x.items()}


def tensors_of(x: Inputs) -> list[Tensor]:
    """Return the tensors of inputs, in the order of their names in the mapping."""
    return [x] if isinstance(x, Tensor) else list(x.values())


def split(x: Inputs, parts: int) -> list[Inputs]:
    """Divide inputs into parts of nearly equal size along the first axis."""
    if isinstance(x, Tensor):
        return list(x.tensor_split(parts))
    pieces = {name: tensor.tensor_split(parts) for name, tensor in x.items()}
    return [{name: piece[part] for name, piece in pieces.items()} for part in range(parts)]


def single(x: Any) -> Tensor:
    """Return inputs that are one tensor.

    Raises:
        TypeError: They are several tensors.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"needs samples of one tensor, not of {len(x)}")
    return x


def described(shape: Shape) -> str:
    """Return a shape as text, for a batch.

    >>> described((3, 32, 32)), described({"ids": (80,), "mask": (80,)})
    ('(B, 3, 32, 32)', 'ids (B, 80), mask (B, 80)')
    """
    if isinstance(shape, Mapping):
        return ", ".join(f"{name} {described(part)}" for name, part in shape.items())
    return f"(B, {', '.join(map(str, shape))})" if shape else "(B,)"
