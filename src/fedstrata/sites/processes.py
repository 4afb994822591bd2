"""Start processes, end them and their child processes, and send signals to all of these processes.

All started processes end when the process that started them ends.

The call ``python -m fedstrata.sites.processes COMMAND`` runs a command. The command is killed if standard input is
closed before the command ends.
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
    """Start a command in a new session that ends when this process ends, even if this process is killed with SIGKILL.

    A second process, the guard, starts the command. This process keeps a pipe to the guard open. When this process
    ends, the operating system closes the pipe, and the guard kills the session.

    Args:
        command: The program and its arguments.
        options: Options of ``subprocess.Popen``.
    """
    guarded = [sys.executable, "-m", "fedstrata.sites.processes", *command]
    return subprocess.Popen(guarded, stdin=subprocess.PIPE, start_new_session=True, **options)


def groups_of(leader: int) -> set[int]:
    """Return the process group ids of a session's leader and its descendants.

    A session has several groups, because NVFlare starts each job and each simulated site in a new group.
    """
    import psutil

    try:
        family = psutil.Process(leader).children(recursive=True)
    except psutil.NoSuchProcess:
        return {leader}
    groups = {leader}
    for process in family:
        with suppress(ProcessLookupError):
            groups.add(os.getpgid(process.pid))
    return groups


def send_signal(leader: int, number: signal.Signals) -> set[int]:
    """Send a signal to a session's leader and its descendants, and return the ids of their process groups."""
    groups = groups_of(leader)
    _send(groups, number)
    return groups


def end(process: subprocess.Popen[bytes], grace: float) -> None:
    """End a session's leader and its descendants: send SIGTERM and, after ``grace`` seconds, SIGKILL."""
    groups = send_signal(process.pid, signal.SIGTERM) if grace else groups_of(process.pid)
    with suppress(subprocess.TimeoutExpired):
        process.wait(grace)
    _send(groups, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _send(groups: set[int], number: signal.Signals) -> None:
    for group in sorted(groups):
        with suppress(ProcessLookupError):
            os.killpg(group, number)


def _guard(command: Sequence[str]) -> int:
    # SIGTERM is sent to the guard and the command, but the guard must outlive the command. The guard therefore has a
    # handler that does nothing. It cannot use SIG_IGN, because the command would inherit it.
    signal.signal(signal.SIGTERM, lambda *_: None)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    Thread(target=_follow, daemon=True).start()
    code = process.wait()
    return code if code >= 0 else 128 - code


def _follow() -> None:
    """Wait until standard input is closed, then kill all processes of the session, and kill this process last."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    group = os.getpgid(0)
    _send(groups_of(os.getpid()) - {group}, signal.SIGKILL)
    _send({group}, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(_guard(sys.argv[1:]))
