"""Lock a run folder, so that only one process at a time can use the folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from fedstrata.base.errors import SpecError

LOCK = ".lock"
"""The name of the lock file in a run folder."""
PATIENCE = 3.0
"""The maximum waiting time for the lock, in seconds. A process that is about to end may still hold the lock."""


@contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """Lock a folder during the ``with`` block. The operating system releases the lock if this process is killed.

    Raises:
        SpecError: Another process holds the lock, or the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK)
        lock.acquire(timeout=PATIENCE)
    except Timeout:
        raise SpecError(
            "out",
            "another process is using this folder. Use another folder, or wait until the process ends.",
            str(folder),
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
            (folder / LOCK).unlink()  # harmless: a process that waits for the lock creates a new file
        lock.release()
