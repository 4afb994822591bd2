"""Lock a run folder, so that only one process works in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from fedstrata.base.errors import SpecError

LOCK = ".lock"
"""The name of the lock file in a run folder."""
PATIENCE = 3.0
"""Seconds to wait for the lock, because a process that is about to end may still have the lock."""


@contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """Lock a folder during the ``with`` block. The system releases the lock if this process is killed.

    Raises:
        SpecError: Another process has the lock, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK)
        lock.acquire(timeout=PATIENCE)
    except Timeout:
        raise SpecError(
            "out", "another process is using this folder. Give another folder, or wait.", str(folder)
        ) from None
    except (OSError, ValueError) as error:  # a null byte in the name raises ValueError
        raise SpecError(
            "out",
            f"the folder cannot be created: {getattr(error, 'strerror', error)}. Give another folder.",
            str(folder),
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):
            (folder / LOCK).unlink()  # a process that waits for the lock creates the file again
        lock.release()
