"""Transfer nested structures (trees) of tensors and other values through shared memory between a process and its forks.

The writer puts tensors and arrays into shared memory, where readers use them without copying them. All other values are
pickled, as in ``multiprocessing``. Pickling is safe here, because both processes run the same program on the same
machine.
"""

from __future__ import annotations

import io
import mmap
import pickle
import weakref
from bisect import bisect
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstrata.base.records import Tree

ALIGNMENT = 64
"""Alignment of each tensor, in bytes.

PyTorch's own allocator uses this alignment, too. Kernels therefore treat tensors in shared memory like other
tensors, and compute bit-identical results.
"""

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # the value on Linux; Python has a name for it since 3.13

LARGEST, SMALLEST = 1 << 36, 1 << 26
"""Maximum and minimum size, in bytes, of the reserved address range.

The operating system provides memory for a page of this range only when the process first writes to the page.
"""


class SharedMemory:
    """Memory that a process shares with processes that it forks later. One process writes, and others read.

    The tensors of each tree are in one block of the memory. When the reader deletes the last tensor of a block, the
    block is added to the reader's list ``free``. The reader must send this list to the writer, and the writer passes
    the list to ``reuse``.

    Raises:
        OSError: The operating system cannot reserve even the minimum size.
    """

    def __init__(self) -> None:
        size = LARGEST
        while True:
            try:
                self._map = mmap.mmap(-1, size, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NORESERVE)
                break
            except OSError:
                if size <= SMALLEST:
                    raise
                size //= 2
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._gaps: list[tuple[int, int]] = [(0, size)]
        """The free ranges (begin, end) in bytes, in ascending order. Adjacent ranges are merged."""
        self.free: list[tuple[int, int]] = []
        """The blocks (offset, size), in bytes, that the reader no longer needs."""

    @property
    def reach(self) -> int:
        """The end of the last block in use, in bytes. All memory after this block is free."""
        return self._gaps[-1][0]

    def reuse(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Mark blocks (offset, size) as free, so that the writer may reuse them."""
        for offset, size in blocks:
            begin, end = offset, offset + size
            place = bisect(self._gaps, (begin, end))
            if place < len(self._gaps) and self._gaps[place][0] == end:
                end = self._gaps.pop(place)[1]
            if place and self._gaps[place - 1][1] == begin:
                place -= 1
                begin = self._gaps.pop(place)[0]
            self._gaps.insert(place, (begin, end))

    def write(self, tree: Tree) -> bytes:
        """Write a tree's tensors to the memory, and return the bytes from which ``read`` restores the tree.

        Raises:
            MemoryError: No free range is large enough.
            Exception: A value in the tree cannot be pickled.
        """
        buffer = io.BytesIO()
        packer = _Packer(buffer)
        packer.dump(tree)
        offset = self._block(packer.size) if packer.size else 0
        for begin, tensor in packer.tensors:
            count = tensor.numel() * tensor.element_size()
            target = self._bytes[offset + begin : offset + begin + count].view(tensor.dtype)
            target.as_strided(tensor.shape, tensor.stride()).copy_(tensor)
        return pickle.dumps((offset, packer.size)) + buffer.getvalue()

    def read(self, data: bytes, *, copy: bool = False) -> Tree:
        """Return the tree that ``write`` wrote.

        Args:
            data: The result of ``write``.
            copy: Whether to copy the tensors. By default, the tensors use the shared memory.
        """
        stream = io.BytesIO(data)
        offset, size = pickle.load(stream)
        block = None
        if size:
            held = np.frombuffer(self._map, dtype=np.uint8, count=size, offset=offset)
            if not copy:
                weakref.finalize(held, self.free.append, (offset, size)).atexit = False
            block = torch.from_numpy(held)
        return _Unpacker(stream, block, copy).load()

    def done(self, data: bytes) -> None:
        """Mark a tree's block as free, after the reader has read the tree with ``copy=True``.

        Args:
            data: The result of ``write``.
        """
        offset, size = pickle.load(io.BytesIO(data))
        if size:
            self.reuse([(offset, size)])

    def _block(self, size: int) -> int:
        """Allocate ``size`` bytes from the first free range that is large enough.

        Return the offset of the block. Blocks at low addresses are reused first, so that the process writes to few
        pages.
        """
        for place, (begin, end) in enumerate(self._gaps):
            if end - begin >= size:
                self._gaps[place : place + 1] = [(begin + size, end)] if end - begin > size else []
                return begin
        raise MemoryError(
            f"the shared memory (/dev/shm) is too small for another {size} bytes. Reduce training.workers, or "
            "enlarge /dev/shm."
        )


class _Packer(pickle.Pickler):
    """A pickler that replaces each tensor or array by its position in a block of shared memory.

    The attribute ``tensors`` contains the tensors with their offsets (in bytes) in the block, and ``size`` is the size
    of the block.
    """

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=5)
        self.tensors: list[tuple[int, Tensor]] = []
        self.size = 0
        self._places: dict[int, int] = {}

    def persistent_id(self, node: Any) -> Any:
        if type(node) is np.ndarray and node.dtype.kind in "biuf" and node.flags.c_contiguous and node.size:
            kind, tensor = "array", torch.from_numpy(node if node.flags.writeable else node.copy())
        elif type(node) is Tensor and node.layout is torch.strided and node.device.type == "cpu" and node.numel():
            kind, tensor = "tensor", node.detach()
        else:
            return None
        if not _is_dense(tensor):
            tensor = tensor.contiguous()
        place = self._places.get(id(node))
        if place is None:
            place = self._places[id(node)] = self.size
            self.tensors.append((place, tensor))
            self.size += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        return kind, place, tensor.dtype, tuple(tensor.shape), tensor.stride()


class _Unpacker(pickle.Unpickler):
    """An unpickler that restores the tensors and arrays that ``_Packer`` replaced."""

    def __init__(self, stream: io.BytesIO, block: Tensor | None, copy: bool) -> None:
        super().__init__(stream)
        self._block, self._copy = block, copy
        self._made: dict[tuple[str, int], Any] = {}

    def persistent_load(self, where: Any) -> Any:
        kind, place, dtype, shape, stride = where
        if (kind, place) in self._made:
            return self._made[kind, place]
        assert self._block is not None
        count = dtype.itemsize
        for side in shape:
            count *= side
        tensor = self._block[place : place + count].view(dtype).as_strided(shape, stride, place // dtype.itemsize)
        if self._copy:
            tensor = tensor.clone()
        made = self._made[kind, place] = tensor.numpy() if kind == "array" else tensor
        return made


def _is_dense(tensor: Tensor) -> bool:
    """Return True if a tensor's elements, in any order of dimensions, fill its memory without gaps or overlaps."""
    expected = 1
    for stride, side in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= side
    return True
