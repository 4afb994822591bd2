"""Read memory-mapped inputs: arrays in ``.npy`` files that may be larger than the RAM."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstrata.base.errors import DataError

CHUNK = 1 << 22
"""The number of values that are checked at once, to limit memory use."""

TYPES = ("uint8", "int8", "int16", "int32", "int64", "float32", "bool")
"""The accepted types of memory-mapped inputs. These types do not need a conversion."""


@dataclass(frozen=True)
class MappedFile:
    """An array in a memory-mapped file. Only the samples in use are read from the file.

    Args:
        path: The path of the file.
        dtype: The type of the values, one of ``TYPES``.
        shape: The shape of the array, (N, …).
        offset: The position of the array's first byte in the file.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, values: object) -> MappedFile | None:
        """Return the file of a ``numpy.memmap``, or None for a slice of a memmap or any other array."""
        if not isinstance(values, np.memmap) or not isinstance(values.base, mmap.mmap) or not values.flags.c_contiguous:
            return None
        return cls(str(values.filename), str(values.dtype), values.shape, values.offset)

    def of_shape(self, shape: tuple[int, ...]) -> MappedFile:
        """Return a copy that describes the array in another shape. The file itself does not change."""
        return replace(self, shape=tuple(shape))

    def open(self) -> Tensor:
        """Return the array as a tensor. Changes to the tensor do not change the file.

        Raises:
            DataError: The file is missing or too short, for example because it was not copied to this machine.
        """
        try:
            values = np.memmap(self.path, dtype=self.dtype, mode="c", offset=self.offset, shape=self.shape)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self.path} cannot be memory-mapped: {error}. Put the file at this path on each machine."
            ) from None
        return torch.from_numpy(values)

    def checked(self, key: str) -> Tensor:
        """Check the type and values of the array, and return it as a tensor. The check reads the whole file.

        Args:
            key: The name of the inputs in error messages.

        Raises:
            DataError: The type is not one of ``TYPES``, there are no samples, or some values are not finite.
        """
        if self.dtype not in TYPES or not all(self.shape):
            problem = f"the memory-mapped file has the type {self.dtype} and the shape {self.shape}"
            accepted = f"Use one of the types {', '.join(TYPES)}, and store at least one sample."
            raise DataError(f"{key}: {problem}. {accepted}")
        tensor = self.open()
        if tensor.is_floating_point():
            for start, chunk in enumerate(torch.split(tensor.view(-1), CHUNK)):
                if not (good := chunk.isfinite()).all():
                    first = np.unravel_index(start * CHUNK + int((~good).nonzero()[0]), self.shape)
                    place = tuple(int(axis) for axis in first)
                    raise DataError(f"{key}: the value at index {place} is NaN or infinite. Replace or remove it.")
        return tensor


def mapped_files(inputs: Mapping[str, Any]) -> dict[str, MappedFile]:
    """Return a mapping from the name of each memory-mapped input, such as ``x_train.ids``, to its file."""
    named = dict(inputs)
    for key, x in inputs.items():
        if isinstance(x, Mapping):
            named |= {f"{key}.{name}": part for name, part in x.items()}
    return {key: file for key, x in named.items() if (file := MappedFile.of(x)) is not None}
