"""Processes of this machine that work side by side, each on one task at a time.

Ordinary workers are fresh processes that take one task after another; a task and its error cross by pickle, within one
program. Where a task holds what cannot cross, such as a class that was typed into a notebook, or should not, such as
large arrays, a worker is a fork of this process that has it already, and ends with its task.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from types import ModuleType, TracebackType
from typing import Any, Generic, Self, TypeVar, cast

import threadpoolctl
import torch

from fedstrata.base.errors import FedstrataError
from fedstrata.base.process import prepare_process
from fedstrata.base.signals import end_with_parent, ending_in_order, in_main_thread

GRACE = 5.0
"""Seconds for a worker to end in order."""

K = TypeVar("K", bound=Hashable)
Task = Callable[[], None]


def can_fork() -> bool:
    """Whether a fork of this process can train, with one thread.

    Elsewhere than on Linux it cannot keep what it needs, a daemon may have no children, and CUDA survives no fork.
    """
    daemon = multiprocessing.current_process().daemon
    return sys.platform == "linux" and not daemon and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


class Pool(Generic[K]):
    """So many processes, for the time of a ``with`` block; what still runs at its end is told to end.

    Args:
        jobs: How many, at most.
        fork: Whether they are forks of this process as it is when a task begins; see ``can_fork``.

    >>> from functools import partial
    >>> from fedstrata.base.errors import SpecError
    >>> with Pool[str](jobs=1, fork=True) as pool:
    ...     pool.begin("a", partial(print, end=""))
    ...     pool.free, list(pool.finished(timeout=60))
    (False, [('a', '')])
    """

    def __init__(self, jobs: int, *, fork: bool = False) -> None:
        self.jobs, self.fork = jobs, fork
        self._idle: list[_Worker] = []
        self._busy: dict[Connection, tuple[_Worker, K]] = {}

    @property
    def free(self) -> bool:
        """Whether another task can begin."""
        return len(self._busy) < self.jobs

    @property
    def busy(self) -> bool:
        """Whether any task is going on."""
        return bool(self._busy)

    def begin(self, key: K, task: Task) -> None:
        """Let a worker do a task; one that is no fork gets it by pickle."""
        if self.fork:
            worker = _Worker(task)
        else:
            worker = self._idle.pop() if self._idle else _Worker()
            worker.send(task)
        self._busy[worker.connection] = worker, key

    def finished(self, timeout: float) -> Iterator[tuple[K, str]]:
        """The tasks that have ended, after waiting a while for the first one.

        Args:
            timeout: Seconds.

        Returns:
            Their keys, each with an empty text, or with how its process was lost.

        Raises:
            Exception: What a task raised.
        """
        for ready in wait(list(self._busy), timeout=timeout):
            worker, key = self._busy.pop(cast(Connection, ready))
            lost = ""
            try:
                worker.finish()
            except EOFError:
                lost = worker.end()
            except BaseException:
                worker.terminate()
                raise
            else:
                if self.fork:
                    worker.end()
                else:
                    self._idle.append(worker)
            yield key, lost

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Runs that were begun can be resumed; waiting for them to end could take hours.
        workers = [*self._idle, *(worker for worker, _ in self._busy.values())]
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.end()
        self._idle, self._busy = [], {}


class _Worker:
    """A process that does what it is told, as the process that tells it sees it.

    Args:
        task: What a fork of this process does; without one a fresh process takes tasks by ``send``.
    """

    process: Any

    def __init__(self, task: Task | None = None) -> None:
        self.connection, there = multiprocessing.Pipe()
        try:
            if task is None:
                self.process = self._spawned(there)
            else:
                self.process = self._forked(there, task)
        finally:
            there.close()

    def _spawned(self, there: Connection) -> Any:
        # A fresh process: it has neither this one's threads nor what they hold.
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_serve, args=(there, in_main_thread()), name="fedstrata-pool")
        # It would run the program again under another name, which then needed a main guard.
        program = sys.modules["__main__"]
        try:
            sys.modules["__main__"] = ModuleType("__main__")
            process.start()
        finally:
            sys.modules["__main__"] = program
        return process

    def _forked(self, there: Connection, task: Task) -> Any:
        context = multiprocessing.get_context("fork")
        work = (there, self.connection, task, in_main_thread())
        process = context.Process(target=_do, args=work, name="fedstrata-pool")
        with warnings.catch_warnings():
            # Forks of processes with threads may hang in locks that those held; ours takes none of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        return process

    def send(self, task: Task) -> None:
        """Hand it a task."""
        with suppress(OSError):  # it is gone, as ``finish`` will find
            self.connection.send(task)

    def finish(self) -> None:
        """The end of its task, with the error that it raised.

        Raises:
            EOFError: It is gone.
        """
        try:
            error = self.connection.recv()
        except OSError:
            raise EOFError from None
        if error is not None:
            raise error

    def terminate(self) -> None:
        """End it whatever it does."""
        self.process.terminate()
        self.end()

    def end(self) -> str:
        """Let it end, and after ``GRACE`` seconds end it; how it ended."""
        self.connection.close()
        self.process.join(GRACE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        code = self.process.exitcode or 0
        return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def _serve(connection: Connection, asked_by_main_thread: bool) -> None:
    """The life of a fresh worker: until there are no more tasks, or nobody who wants them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started this one ends it
    with ending_in_order(), suppress(EOFError, OSError):
        end_with_parent(asked_by_main_thread)
        while True:
            connection.send(_error_of(connection.recv()))


def _do(connection: Connection, parents: Connection, task: Task, asked_by_main_thread: bool) -> None:
    """The life of a fork: one task."""
    # What would wake the parent's event loop, as in a notebook, is not for this one.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parents.close()
    # The threads of OpenMP are not here, and waiting for them takes for ever: of PyTorch, and of scikit-learn.
    prepare_process(1)
    with threadpoolctl.threadpool_limits(1), ending_in_order(), suppress(EOFError, OSError):
        end_with_parent(asked_by_main_thread)
        connection.send(_error_of(task))


def _error_of(task: Task) -> Exception | None:
    """Do a task; the error that it raised, as it can cross."""
    try:
        task()
    except Exception as error:
        error.add_note(f"in a process of its own:\n{traceback.format_exc()}")
        return _that_crosses(error)
    return None


def _that_crosses(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return FedstrataError(f"{type(error).__name__}: {error}")
    return error
