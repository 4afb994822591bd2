"""Prepare a process for training: set its number of threads, and let it keep freed memory."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

import torch

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # the numbers of three parameters of the C function mallopt
KEPT_FREE, GROWTH, LARGE = 256 << 20, 16 << 20, 32 << 20
"""The values of three parameters of ``mallopt``, in bytes. The parameters are the free memory that the heap keeps, the
step by which the heap grows, and the minimum size of blocks outside the heap. The third value is the maximum that the C
library accepts.
"""


def prepare_process(threads: int) -> None:
    """Set PyTorch's number of threads and default dtype (float32), and keep freed memory for later batches.

    Raises:
        RuntimeError: PyTorch does not accept the number of threads.
    """
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)
    keep_freed_memory()


@contextmanager
def training_process(threads: int) -> Iterator[None]:
    """Prepare this process for training during the ``with`` block, and restore PyTorch's settings afterwards."""
    before, dtype = torch.get_num_threads(), torch.get_default_dtype()
    prepare_process(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.set_default_dtype(dtype)


@cache
def keep_freed_memory() -> bool:
    """Let the C library keep freed memory for later batches. Return True if the library accepts the new settings.

    By default, glibc immediately returns blocks of a few megabytes, such as activations, to the operating system. If
    the C library keeps the memory, a small convolutional network trains 1.5 times as fast, and an MLP 1.3 times as fast
    (``benchmarks/fast_paths.py``). After training, the process keeps up to 256 MB of freed memory. This function does
    nothing if the environment already configures the allocator, or if the C library is not glibc.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if chosen or platform.libc_ver()[0] != "glibc":
        return False
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        settings = ((M_MMAP_THRESHOLD, LARGE), (M_TRIM_THRESHOLD, KEPT_FREE), (M_TOP_PAD, GROWTH))
        return all(mallopt(name, size) == 1 for name, size in settings)
    return False
