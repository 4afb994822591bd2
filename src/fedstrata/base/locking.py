"""One process a run folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedstrata.base.errors import SpecError

PATIENCE = 3.0
"""Seconds that a folder may still be held by the workers of a process that was killed."""


@contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """Keep every other process out of a folder for the block; where this one dies, the next may come in.

    Raises:
        SpecError: Another one is at work there, or nothing can be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = os.open(folder, os.O_RDONLY)
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        raise SpecError("out", f"cannot be made a folder: {getattr(error, 'strerror', error)}", str(folder)) from None
    try:
        _lock(held)
    except BlockingIOError:
        os.close(held)
        raise SpecError("out", "another process is at work in it; give another folder, or wait", str(folder)) from None
    except (ImportError, OSError):
        pass  # a system, or a file system, without such locks
    try:
        yield
    finally:
        os.close(held)


@contextmanager
def waiting(folder: Path) -> Iterator[None]:
    """Wait until every other process has left a folder that is there, and keep them out of it for the block."""
    held = os.open(folder, os.O_RDONLY)
    try:
        with suppress(ImportError, OSError):  # a system, or a file system, without such locks
            import fcntl

            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _lock(held: int) -> None:
    import fcntl

    patience = time.monotonic() + PATIENCE
    while True:
        try:
            # The folder itself is locked, so that no file is left behind that somebody could stumble over.
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > patience:
                raise
            time.sleep(0.05)
