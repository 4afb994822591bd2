"""Processes that start others: a signal must reach all of them."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress


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


def _send(groups: set[int], number: signal.Signals) -> None:
    for group in sorted(groups):
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            continue
