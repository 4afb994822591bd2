"""What NVFlare's streams cost a process that exchanges messages for days is bounded here.

**Threads.** Since its streams are reliable (NVFlare's pull request 4785), a receiver remembers each message for 65
seconds, in case it is sent again, and starts a ``threading.Timer`` that forgets it: twenty exchanges a second with
three sites are 4,000 threads. No setting turns that off; a shorter memory (``streaming_retry_timeout``) is also a
shorter time in which a message that got lost is sent again. Here one thread forgets all. Its pools start a thread
whenever more messages come at once than ever before, which goes on for hours. Here they start enough at the beginning.

**Memory.** A stream that is sent holds a buffer of a mebibyte, however small the message, in a cycle of references.
Cycles wait for Python's collector, which looks at old objects only when a quarter of all are new: gigabytes later. Here
it looks twice a minute, at what has come since the process began. What lies free between what is in use the C library
keeps, a little more each hour; then it gives that back too.
"""

from __future__ import annotations

import ctypes
import gc
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, wraps
from typing import Any

Task = Callable[[], object]

SWEEP = 30.0
"""Seconds between two looks for what nobody uses any more."""
AT_ONCE = 24
"""Threads that a pool begins with. Three sites keep at most half as many busy at once; there may be up to 128."""


class Later:
    """Does things after a while, in one thread that lives as long as there is something to do.

    >>> done = threading.Event()
    >>> Later().after(0.01, done.set)
    >>> done.wait(10)
    True
    """

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Task]] = []
        self._count = itertools.count()
        self._changed = threading.Condition()
        self._working = False

    def after(self, seconds: float, task: Task) -> None:
        """Do something so much later; what it raises is lost."""
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._count), task))
            if not self._working:
                self._working = True
                threading.Thread(target=self._work, name="later", daemon=True).start()
            elif self._due[0][2] is task:
                self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._due:
                    self._working = False
                    return
                if (pause := self._due[0][0] - time.monotonic()) > 0:
                    self._changed.wait(pause)
                    continue
                _, _, task = heapq.heappop(self._due)
            try:
                task()
            except Exception:
                continue


class _Scheduled:
    """Stands where NVFlare keeps its timer."""

    def cancel(self) -> None:
        """Too late is as good: forgetting twice does nothing."""


def release_memory() -> None:
    """Give the system back what the C library keeps free, where the library can (glibc)."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def start_threads(*pools: ThreadPoolExecutor) -> None:
    """Start threads of pools now, and not one by one whenever more tasks come at once than ever before."""
    go = threading.Event()
    for pool in pools:
        for _ in range(min(AT_ONCE, pool._max_workers)):
            pool.submit(go.wait)  # a thread that waits is not free for the next one
    go.set()


def _start_threads_of(owner: type[Any]) -> None:
    """Let whatever is made of a class start the threads of its pools as soon as it is there."""
    prepare = owner.__init__

    @wraps(prepare)  # NVFlare reads the parameters' names
    def prepare_with_threads(self: Any, *arguments: Any, **named: Any) -> None:
        prepare(self, *arguments, **named)
        start_threads(*(value for value in vars(self).values() if isinstance(value, ThreadPoolExecutor)))

    owner.__init__ = prepare_with_threads


@cache
def bound_growth() -> None:
    """Let one thread of this process do what NVFlare starts a thread a message for, and free what it leaves behind.

    Once a process: whoever asks again changes nothing.
    """
    from nvflare.collab.runtime.controller import CollabController
    from nvflare.collab.runtime.executor import CollabExecutor
    from nvflare.fuel.f3.sfm.conn_manager import ConnManager
    from nvflare.fuel.f3.streaming import stream_utils
    from nvflare.fuel.f3.streaming.byte_receiver import RxTask
    from nvflare.fuel.f3.streaming.byte_streamer import reliable_retry_scheduler

    later, scheduled = Later(), _Scheduled()

    def schedule(self: Any, ttl: float | None = None) -> None:
        with self.stop_lock:
            if self.cleanup_timer:
                return
            self.cleanup_timer = scheduled
        later.after(self.completed_task_ttl if ttl is None else ttl, self._remove_task)

    RxTask._schedule_remove_task = schedule

    def sweep() -> None:
        gc.collect()
        release_memory()
        later.after(SWEEP, sweep)

    for owner in (ConnManager, CollabController, CollabExecutor):
        _start_threads_of(owner)
    start_threads(
        stream_utils.stream_thread_pool, stream_utils.callback_thread_pool, reliable_retry_scheduler.retry_task_pool
    )
    gc.collect()
    gc.freeze()  # what is there now is there to stay: it is not looked at again
    sweep()
