"""Run commands in their own process sessions, so that tests can kill them and find the processes that are left."""

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
"""The seconds to wait for anything; many, to find only endless waits."""


class Command:
    """A command ``python ARGUMENTS``, which runs in its own session."""

    def __init__(self, arguments: tuple[str, ...], cwd: Path, said: IO[bytes]) -> None:
        self._said = said
        self.process = subprocess.Popen(
            [sys.executable, *arguments], cwd=cwd, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )

    @property
    def said(self) -> str:
        """The output of the command so far."""
        self._said.seek(0)
        return self._said.read().decode()

    def alive(self) -> list[int]:
        """Return the ids of the processes in the session that still run; zombies do not count."""
        found = []
        for process in psutil.process_iter(["status"]):
            with suppress(OSError):
                if os.getsid(process.pid) == self.process.pid and process.info["status"] != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return found

    def ended(self) -> int:
        """Wait for the end of the command, and return its exit code."""
        return self.process.wait(PATIENCE)

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Wait until ``reached`` returns True; fail if the command ends before."""
        patience = time.monotonic() + PATIENCE
        while not reached():
            assert self.process.poll() is None, self.said
            assert time.monotonic() < patience, self.said
            time.sleep(0.02)

    def leaves_nothing(self) -> bool:
        """Return True if all processes of the session end soon after the command."""
        return self.soon(lambda: not self.alive())

    def soon(self, reached: Callable[[], bool]) -> bool:
        """Return True if ``reached`` returns True within 30 seconds."""
        patience = time.monotonic() + 30
        while not reached():
            if time.monotonic() > patience:
                return False
            time.sleep(0.02)
        return True


@contextmanager
def started(*arguments: str, cwd: Path) -> Iterator[Command]:
    """Run a command during the ``with`` block; at its end, kill all processes of the session."""
    # The output goes to a file, because a pipe would stay open until all processes of the session have ended.
    with tempfile.TemporaryFile() as said:
        command = Command(arguments, cwd, said)
        try:
            yield command
        finally:
            for pid in command.alive():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            command.process.wait()
