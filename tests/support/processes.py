"""Commands as processes of a session of their own, which are killed, and what is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil

PATIENCE = 300
"""Seconds; generous, for only an endless wait is meant."""


class Command:
    """``python ARGUMENTS`` in a session of its own."""

    def __init__(self, arguments: tuple[str, ...], cwd: Path, said: IO[bytes]) -> None:
        self._said = said
        self.process = subprocess.Popen(
            [sys.executable, *arguments], cwd=cwd, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )

    @property
    def said(self) -> str:
        """What it has said so far."""
        self._said.seek(0)
        return self._said.read().decode()

    def alive(self) -> list[int]:
        """The processes of its session that are alive; those that nobody has buried yet are not."""
        found = []
        for process in psutil.process_iter(["status"]):
            with suppress(OSError):
                if os.getsid(process.pid) == self.process.pid and process.info["status"] != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return found

    def ended(self) -> int:
        """Wait for its end; the exit code."""
        return self.process.wait(PATIENCE)

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Look again and again, as long as it runs."""
        patience = time.monotonic() + PATIENCE
        while not reached():
            assert self.process.poll() is None, self.said
            assert time.monotonic() < patience, self.said
            time.sleep(0.02)

    def leaves_nothing(self) -> bool:
        """Whether all processes of its session end soon after it."""
        return self.soon(lambda: not self.alive())

    def soon(self, reached: Callable[[], bool]) -> bool:
        """Whether it comes to that after its end."""
        patience = time.monotonic() + 30
        while not reached():
            if time.monotonic() > patience:
                return False
            time.sleep(0.02)
        return True


@contextmanager
def started(*arguments: str, cwd: Path) -> Iterator[Command]:
    """A command; whatever is left of its session ends with the block."""
    # A file and no pipe, which would stay open as long as anything that was started.
    with tempfile.TemporaryFile() as said:
        command = Command(arguments, cwd, said)
        try:
            yield command
        finally:
            for pid in command.alive():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            command.process.wait()
