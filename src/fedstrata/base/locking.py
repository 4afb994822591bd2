"""One process a run folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from fedstrata.base.errors import SpecError

LOCK = ".lock"
"""The file by which processes keep each other out of a folder."""
PATIENCE = 3.0
"""Seconds in which a process that was told to end may still hold a folder."""


@contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """Keep every other process out of a folder for the block; where this one dies, the next may come in.

    Raises:
        SpecError: Another one is at work there, or nothing can be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK)
        lock.acquire(timeout=PATIENCE)
    except Timeout:
        raise SpecError("out", "another process is at work in it; give another folder, or wait", str(folder)) from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        raise SpecError("out", f"cannot be made a folder: {getattr(error, 'strerror', error)}", str(folder)) from None
    try:
        yield
    finally:
        with suppress(OSError):
            (folder / LOCK).unlink()  # a process that waits for it then makes a new one
        lock.release()
