"""Handle a model's inputs: one tensor, or several named tensors such as token ids and their mask."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Inputs = Tensor | Mapping[str, Tensor]
"""The inputs of a batch: one tensor with shape (B, …), or a mapping from the model's argument names to such tensors."""

Shape = tuple[int, ...] | Mapping[str, tuple[int, ...]]
"""The shape of one sample, such as (channels, height, width) or (features,). For several named inputs, a mapping from
names to shapes."""


def each(x: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Apply a function to each tensor of the inputs, and return the results in the structure of the inputs."""
    return change(x) if isinstance(x, Tensor) else {name: change(tensor) for name, tensor in x.items()}


def tensors_of(x: Inputs) -> list[Tensor]:
    """Return a list of the inputs' tensors, in the order of the mapping."""
    return [x] if isinstance(x, Tensor) else list(x.values())


def split(x: Inputs, parts: int | list[int]) -> list[Inputs]:
    """Divide inputs along the first axis into nearly equal parts, or into parts of given sizes."""
    if not isinstance(x, Tensor):
        columns = [split(tensor, parts) for tensor in x.values()]
        return [dict(zip(x, column, strict=True)) for column in zip(*columns, strict=True)]
    return list(x.tensor_split(parts) if isinstance(parts, int) else torch.split(x, parts))


def joined(parts: Sequence[Inputs]) -> Inputs:
    """Concatenate several inputs along the first axis. They have the same names and shapes."""
    named = [part for part in parts if not isinstance(part, Tensor)]
    if named:
        return {name: torch.cat([part[name] for part in named]) for name in named[0]}
    return torch.cat([single(part) for part in parts])


def single(x: Any) -> Tensor:
    """Return the inputs if they are a single tensor.

    Raises:
        TypeError: The inputs are several tensors.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"the inputs must be one tensor, but are a mapping of {len(x)} tensors")
    return x


def described(shape: Shape) -> str:
    """Format the shape of a batch of samples for messages.

    >>> described((3, 32, 32)), described({"ids": (80,), "mask": (80,)})
    ('(B, 3, 32, 32)', 'ids (B, 80), mask (B, 80)')
    """
    if isinstance(shape, Mapping):
        return ", ".join(f"{name} {described(part)}" for name, part in shape.items())
    return f"(B, {', '.join(map(str, shape))})" if shape else "(B,)"
