"""Trees of tensors between a process and its forks, through a pipe.

Both ends are one program, so that plain values are pickled here (``multiprocessing`` does nothing else). The memory of
a tensor goes into the pipe and out of it without a copy in between.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstrata.base.records import Tree

Packed = tuple[bytes, Sequence[pickle.PickleBuffer]]
"""A pickled tree, and the memory of its tensors and arrays."""


class _Packer(pickle.Pickler):
    """Leaves out the memory of tensors; pickle itself leaves out that of arrays."""

    def reducer_override(self, node: Any) -> Any:
        if type(node) is not Tensor or node.layout is not torch.strided or node.device.type != "cpu":
            return NotImplemented
        dense = node.detach()
        # A tensor with gaps or overlaps has other strides once it is copied; every other keeps its memory format.
        if torch.empty_like(dense, device="meta").stride() != dense.stride():
            dense = dense.contiguous()
        memory = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
        return _tensor, (memory.numpy(), dense.dtype, tuple(dense.shape), dense.stride())


def _tensor(memory: NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(memory).view(dtype).as_strided(shape, stride)


def pack(tree: Tree) -> Packed:
    """Return a tree as ``send`` takes it; its tensors must not change before they are sent.

    Raises:
        Exception: Something in the tree cannot be pickled.
    """
    stream, memory = io.BytesIO(), list[pickle.PickleBuffer]()
    _Packer(stream, 5, buffer_callback=memory.append).dump(tree)
    return stream.getvalue(), memory


def send(connection: Connection, packed: Packed) -> None:
    """Send a tree through a pipe."""
    data, memory = packed
    connection.send((data, [block.raw().nbytes for block in memory]))
    for block in memory:
        connection.send_bytes(block)


def receive(connection: Connection) -> Tree:
    """Return the tree that the other end sent.

    Raises:
        EOFError: The other end is closed.
    """
    data, sizes = connection.recv()
    # PyTorch's own memory, so that kernels meet the alignment that they meet elsewhere.
    memory = [torch.empty(size, dtype=torch.uint8).numpy() for size in sizes]
    for block in memory:
        connection.recv_bytes_into(block)
    return pickle.loads(data, buffers=memory)
