"""The process that trains: how many threads it uses, and what it does with freed memory."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

import torch

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # of mallopt(3)
KEPT_FREE, GROWTH, LARGE = 256 << 20, 16 << 20, 32 << 20
"""Bytes at the end of the heap beyond which some go back to the system, that it grows by, and of a block that is
mapped by itself (the most that the C library allows)."""


def prepare_process(threads: int) -> None:
    """Get this process ready to train with so many threads.

    Raises:
        RuntimeError: PyTorch does not take that number.
    """
    torch.set_num_threads(threads)
    keep_freed_memory()


@contextmanager
def training_process(threads: int) -> Iterator[None]:
    """Like ``prepare_process``, with the former number of threads at the end."""
    before = torch.get_num_threads()
    prepare_process(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def keep_freed_memory() -> bool:
    """Let the C library keep memory that a batch frees for the next batch; returns whether it could be told.

    Activations are blocks of a few megabytes. glibc gives such blocks back to the system at once, which then hands out
    zeroed pages again at every step. Kept, a small convolutional network trains 1.5 times as fast and an MLP 1.3 times
    (``benchmarks/fast_paths.py``). Afterwards up to 256 MB stay with the process. What the environment says about the
    allocator stands, and other C libraries are left alone.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if chosen or platform.libc_ver()[0] != "glibc":
        return False
    with suppress(OSError, AttributeError):
        tell = ctypes.CDLL(None).mallopt
        settings = ((M_MMAP_THRESHOLD, LARGE), (M_TRIM_THRESHOLD, KEPT_FREE), (M_TOP_PAD, GROWTH))
        return all(tell(name, size) == 1 for name, size in settings)
    return False
