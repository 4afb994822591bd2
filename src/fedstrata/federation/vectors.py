"""Convert model updates to vectors and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedstrata.federation.messages import Params


def changes(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Tensor:
    """Return the changes of all tensors as one vector, shape (d,), with dtype float32 or wider.

    Args:
        before: Named tensors, in the order in which the vector contains them.
        after: Tensors with the same names and shapes.
    """
    row = torch.cat([(after[name] - tensor).reshape(-1) for name, tensor in before.items()])
    return row.to(torch.promote_types(row.dtype, torch.float32))


def split(row: Tensor, like: Mapping[str, Tensor]) -> Params:
    """Split a vector, shape (d,), into tensors with the names, shapes and dtypes of ``like``.

    >>> split(torch.tensor([1.0, 2.0, 3.0]), {"w": torch.zeros(1, 2), "b": torch.zeros(1)})
    {'w': tensor([[1., 2.]]), 'b': tensor([3.])}
    """
    parts = torch.split_with_sizes(row, [tensor.numel() for tensor in like.values()])
    return {
        name: part.reshape(tensor.shape).to(tensor.dtype)
        for (name, tensor), part in zip(like.items(), parts, strict=True)
    }
