"""How processes end: in order when they are told to, and never later than the process that started them."""

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
"""The exit code of a process that was told to end, as shells have it."""

GRACE = 2.0
"""Seconds for a process without its parent to end in order; less than whoever comes next waits for a folder."""

AGAIN = 0.01
"""Seconds after which a SIGTERM whose exception Python ignored is sent again."""

_PR_SET_PDEATHSIG = 1  # of prctl(2)


class Terminated(SystemExit):
    """SIGTERM came: what is open is closed on the way out."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Let SIGTERM raise ``Terminated`` in the block, as Ctrl-C raises ``KeyboardInterrupt``.

    Only the main thread can have that, and only where nobody else decided what the signal does. A second SIGTERM does
    not interrupt what cleans up; SIGKILL is for those who cannot wait.
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
        # Python ignores what is raised in a finaliser, in a weak reference's callback and in this function.
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
        with suppress(RuntimeError):  # it was started before
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
    """Let this process, which ``multiprocessing`` started, end with its parent, however that one ends.

    A pipe tells, which the system closes; then comes SIGTERM, and after ``GRACE`` the end. On Linux the system sends
    SIGTERM as well, for others may hold the pipe open.

    Args:
        asked_by_main_thread: Whether the parent's main thread started this process. To Linux a parent is a thread, and
            another one may end long before its process.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("this process was started by hand")
    if asked_by_main_thread and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    def follow() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        os._exit(TERMINATED)

    threading.Thread(target=follow, name="fedstrata-parent", daemon=True).start()


def in_main_thread() -> bool:
    """Whether the caller is the main thread; see ``end_with_parent``."""
    return threading.current_thread() is threading.main_thread()
