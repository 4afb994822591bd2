"""Worker processes of this machine: fresh ones, or forks of this process.

A fresh worker has nothing of this process: tasks and their errors cross by pickle, within one program. A fork has what
cannot cross, such as a class that was typed into a notebook, and what should not, such as large arrays.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from functools import partial
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
    """Return True if a fork of this process can train, with one thread.

    Elsewhere than on Linux it cannot keep what it needs, a daemon may have no children, and CUDA survives no fork.
    """
    daemon = multiprocessing.current_process().daemon
    return sys.platform == "linux" and not daemon and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


class Worker:
    """A process that this one starts and tells what to do, through a pipe.

    It ends when its work is done, when it finds the other end of its pipe closed, or with this process.

    Args:
        work: What it does with its end of the pipe; for a fresh process a function of a module.
        fork: Whether it is a fork of this process as it is now; see ``can_fork``.
        daemon: Whether it may have no children.
        inherited: Pipes to other workers, which a fork closes.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(
        self,
        work: Callable[[Connection], None],
        *,
        fork: bool,
        daemon: bool = False,
        inherited: Iterable[Connection] = (),
    ) -> None:
        self.connection, end = multiprocessing.Pipe()
        arguments = (end, work, [self.connection, *inherited] if fork else [], in_main_thread())
        context: Any = multiprocessing.get_context("fork" if fork else "spawn")
        self.process = context.Process(target=_begin, args=arguments, daemon=daemon, name="fedstrata-worker")
        program = sys.modules["__main__"]
        try:
            if not fork:  # it would run the program again under another name, which then needed a main guard
                sys.modules["__main__"] = ModuleType("__main__")
            with warnings.catch_warnings():
                # Forks of processes with threads may hang in locks that those held; ours takes none of them.
                warnings.simplefilter("ignore", DeprecationWarning)
                self.process.start()
        finally:
            sys.modules["__main__"] = program
            end.close()

    def send(self, message: object) -> None:
        """Send it a message."""
        with suppress(OSError):  # it is gone, as ``receive`` will find
            self.connection.send(message)

    def receive(self) -> Any:
        """Wait for its next message.

        Raises:
            EOFError: It is gone.
        """
        try:
            return self.connection.recv()
        except OSError:
            raise EOFError from None

    def end(self, grace: float = GRACE) -> str:
        """Let it end, and kill it after ``grace`` seconds; returns how it ended."""
        self.connection.close()
        self.process.join(grace)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        code = self.process.exitcode or 0
        return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def _begin(
    connection: Connection,
    work: Callable[[Connection], None],
    inherited: Iterable[Connection],
    asked_by_main_thread: bool,
) -> None:
    # What would wake the parent's event loop, as in a notebook, is not for this process.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in inherited:
        other.close()
    with suppress(EOFError, OSError):
        end_with_parent(asked_by_main_thread)
        work(connection)


class TaskPool(Generic[K]):
    """Workers with one task each at a time, for a ``with`` block; what still runs at its end is told to end.

    A fresh worker takes one task after another. A fork ends with its task.

    Args:
        jobs: How many, at most.
        fork: Whether they are forks of this process as it is when a task begins; see ``can_fork``.

    >>> from functools import partial
    >>> from fedstrata.base.errors import SpecError
    >>> with TaskPool[str](jobs=1, fork=True) as pool:
    ...     pool.begin("a", partial(print, end=""))
    ...     pool.free, list(pool.finished(timeout=60))
    (False, [('a', '')])
    """

    def __init__(self, jobs: int, *, fork: bool = False) -> None:
        self.jobs, self.fork = jobs, fork
        self._idle: list[Worker] = []
        self._busy: dict[Connection, tuple[Worker, K]] = {}

    @property
    def free(self) -> bool:
        """Whether another task can begin."""
        return len(self._busy) < self.jobs

    @property
    def busy(self) -> bool:
        """Whether any task is going on."""
        return bool(self._busy)

    def begin(self, key: K, task: Task) -> None:
        """Give a task to a worker. A worker that was not forked gets it by pickle."""
        if self.fork:
            worker = Worker(partial(_do, task), fork=True)
        else:
            worker = self._idle.pop() if self._idle else Worker(_serve, fork=False)
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
            worker, key = self._busy[cast(Connection, ready)]
            lost = ""
            try:
                error = worker.receive()
            except EOFError:
                error, lost = None, worker.end()
            if error is not None:
                raise error
            del self._busy[cast(Connection, ready)]
            if self.fork:
                worker.end()
            elif not lost:
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


def _serve(connection: Connection) -> None:
    """Do one task after another, until there are no more."""
    with ending_in_order():
        while True:
            connection.send(_error_of(connection.recv()))


def _do(task: Task, connection: Connection) -> None:
    """Do one task in a fork."""
    # The threads of OpenMP are not here, and waiting for them takes for ever: of PyTorch, and of scikit-learn.
    prepare_process(1)
    with threadpoolctl.threadpool_limits(1), ending_in_order():
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
