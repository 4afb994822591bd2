"""Processes that start others: a signal must reach all of them, and so must the end of who started the first.

``python -m fedstrata.sites.processes COMMAND`` runs a command until it ends or standard input does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread
from typing import Any


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a command as a session's leader that ends with this process, however this one ends.

    Nobody can be told of a SIGKILL. But the system closes a pipe then, and a guard waits for that.

    Args:
        command: Program and arguments.
        options: For ``subprocess.Popen``.
    """
    guarded = [sys.executable, "-m", "fedstrata.sites.processes", *command]
    return subprocess.Popen(guarded, stdin=subprocess.PIPE, start_new_session=True, **options)


def groups_of(leader: int) -> set[int]:
    """The process groups of a session's leader and of all that descends from it.

    NVFlare gives the process of a job, and that of a simulated site, a group of its own.
    """
    import psutil

    try:
        family = psutil.Process(leader).children(recursive=True)
    except psutil.NoSuchProcess:
        return {leader}
    groups = {leader}
    for process in family:
        try:
            groups.add(os.getpgid(process.pid))
        except ProcessLookupError:
            continue
    return groups


def send_signal(leader: int, number: signal.Signals) -> set[int]:
    """Send a signal to a session's leader and all that descends from it; the groups that it was sent to."""
    groups = groups_of(leader)
    _send(groups, number)
    return groups


def end(process: subprocess.Popen[bytes], grace: float) -> None:
    """End a session's leader and all that descends from it; after ``grace`` seconds, whatever it takes."""
    groups = send_signal(process.pid, signal.SIGTERM) if grace else groups_of(process.pid)
    with suppress(subprocess.TimeoutExpired):
        process.wait(grace)
    _send(groups, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _send(groups: set[int], number: signal.Signals) -> None:
    for group in sorted(groups):
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            continue


def _guard(command: Sequence[str]) -> int:
    # It is told to end with all others, and waits for them; SIG_IGN would be handed on to what is started.
    signal.signal(signal.SIGTERM, lambda *_: None)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    Thread(target=_follow, daemon=True).start()
    code = process.wait()
    return code if code >= 0 else 128 - code


def _follow() -> None:
    """Wait for the end of standard input, then end the session, this process last."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    own = os.getpgid(0)
    _send(groups_of(os.getpid()) - {own}, signal.SIGKILL)
    _send({own}, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(_guard(sys.argv[1:]))
