"""Let processes clean up when they receive SIGTERM, and let child processes end when their parent process ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

TERMINATED = 128 + signal.SIGTERM
"""The exit code that shells report if SIGTERM has ended a process."""

GRACE = 2.0
"""The number of seconds from the end of a parent process until its child process is killed.

The time is shorter than ``fedstrata.base.locking.PATIENCE``, so that a new process can wait until the child releases
its lock.
"""

AGAIN = 0.01
"""The number of seconds after which SIGTERM is sent again, if Python ignored the exception that the signal raised."""

_PR_SET_PDEATHSIG = 1  # an option of the system call prctl: the signal that a process receives when its parent ends


class Terminated(SystemExit):
    """The exception that SIGTERM raises, so that ``with`` and ``finally`` blocks clean up before the process ends."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Let SIGTERM raise ``Terminated`` while the ``with`` block runs, as Ctrl-C raises ``KeyboardInterrupt``.

    This function has an effect only in the main thread, and only if no other code has set a handler for SIGTERM. A
    second SIGTERM is ignored, because it would interrupt the clean-up.
    """
    if not in_main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    usual, main_thread = sys.unraisablehook, threading.get_ident()
    raised, left = False, threading.Event()

    def terminate(_: int, frame: FrameType | None) -> None:
        nonlocal raised
        if raised:
            return
        if _runs(report_ignored, frame):
            send_again()
            return
        raised = True
        raise Terminated

    def report_ignored(unraisable: sys.UnraisableHookArgs) -> None:
        # Python calls this function for exceptions that it ignores, such as exceptions in an object's finaliser.
        nonlocal raised
        if isinstance(unraisable.exc_value, Terminated):
            raised = False
            send_again()
        else:
            usual(unraisable)

    def send_until_raised() -> None:
        while not left.wait(AGAIN):
            if not raised:
                signal.pthread_kill(main_thread, signal.SIGTERM)

    sender = threading.Thread(target=send_until_raised, name="fedstrata-sigterm", daemon=True)

    def send_again() -> None:
        with suppress(RuntimeError):  # raised if the thread was already started
            sender.start()

    sys.unraisablehook = report_ignored
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        left.set()
        if sender.ident is not None:
            sender.join()
        sys.unraisablehook = usual
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _runs(function: Callable[..., object], frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


def end_with_parent(asked_by_main_thread: bool) -> None:
    """Let this process end when its parent process ends, even if the parent is killed.

    ``multiprocessing`` must have started this process. When the parent ends, a pipe is closed. A waiting thread notices
    this, sends SIGTERM to this process, and kills it after ``GRACE`` seconds. On Linux, the kernel also sends SIGTERM,
    because other processes may keep the pipe open.

    Args:
        asked_by_main_thread: Whether the main thread of the parent started this process. If another thread started this
            process, the kernel is not asked to send SIGTERM, because the kernel would send the signal too early, when
            the thread ends.

    Raises:
        RuntimeError: ``multiprocessing`` did not start this process.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("multiprocessing did not start this process")
    if asked_by_main_thread and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    def follow() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        os._exit(TERMINATED)

    threading.Thread(target=follow, name="fedstrata-parent", daemon=True).start()


def in_main_thread() -> bool:
    """Return True if the caller runs in the main thread."""
    return threading.current_thread() is threading.main_thread()
