"""Run worker processes on this machine, as new processes or as forks of this process.

A new process does not share memory with this process, so tasks and their errors are pickled. A fork starts with a copy
of this process's memory. A fork can therefore use objects that cannot be pickled, such as a class that is defined in a
notebook. A fork can also use large arrays without copying them.
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
from itertools import islice
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any, Generic, Self, TypeVar, cast

import threadpoolctl
import torch

from fedstrata.base.errors import FedstrataError
from fedstrata.base.process import prepare_process
from fedstrata.base.signals import end_with_parent, ending_in_order, in_main_thread

GRACE = 5.0
"""The number of seconds that a worker may take to end, before it is killed."""

K = TypeVar("K", bound=Hashable)
Task = Callable[[], None]


def can_fork() -> bool:
    """Return True if it is safe to train with a single thread in a fork of this process.

    Forks are safe only on Linux. A daemonic process may not have child processes. CUDA does not work after a fork.
    """
    daemon = multiprocessing.current_process().daemon
    return sys.platform == "linux" and not daemon and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


class Worker:
    """A child process with a pipe to this process.

    The child process ends when its work is done, or when this process closes the pipe or ends.

    Args:
        work: The function that the child process calls. The argument is the child's end of the pipe. Without ``fork``,
            the child process must be able to import the function from a module.
        fork: Whether to fork this process instead of starting a new process; see ``can_fork``.
        daemon: Whether the child process is a daemon. A daemon may not have child processes.
        inherited: The pipes from this process to other workers. A fork inherits these pipes, and must close its copies.

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
            if not fork:
                # A spawned process imports __main__. It would therefore run a script without a main guard again. An
                # empty module prevents this.
                sys.modules["__main__"] = ModuleType("__main__")
            with warnings.catch_warnings():
                # Ignore Python's warning that other threads may hold locks during the fork. Workers do not use these
                # locks.
                warnings.simplefilter("ignore", DeprecationWarning)
                self.process.start()
        finally:
            sys.modules["__main__"] = program
            end.close()

    def send(self, message: object) -> None:
        """Send a message to the worker."""
        with suppress(OSError):  # if the worker has ended, ``receive`` raises EOFError
            self.connection.send(message)

    def receive(self) -> Any:
        """Wait for the next message of the worker.

        Raises:
            EOFError: The worker has ended.
        """
        try:
            return self.connection.recv()
        except OSError:
            raise EOFError from None

    def end(self, grace: float = GRACE) -> str:
        """Close the pipe, and wait for the end of the process. After ``grace`` seconds, kill the process.

        Return a description of how the process ended.
        """
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
    # A fork inherits the file descriptor that Python writes to when a signal arrives. Without this reset, signals to
    # this process would wake the parent's event loop, for example in a notebook.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore Ctrl-C, because the parent ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in inherited:
        other.close()
    with suppress(EOFError, OSError):
        end_with_parent(asked_by_main_thread)
        work(connection)


class TaskPool(Generic[K]):
    """A pool of worker processes, each of which executes one task at a time. Use the pool in a ``with`` block.

    Tasks that are still running at the end of the block are terminated. Without ``fork``, each worker is a new process
    that executes one task after another. With ``fork``, each task is executed in a new fork of this process.

    Args:
        jobs: The maximum number of workers.
        fork: Whether each task runs in a fork of this process; see ``can_fork``.

    >>> from functools import partial
    >>> from fedstrata.base.errors import SpecError
    >>> with TaskPool[str](jobs=1, fork=True) as pool:
    ...     list(pool.run({"a": partial(print, end="")}.items()))
    [('a', '')]
    """

    def __init__(self, jobs: int, *, fork: bool = False) -> None:
        self.jobs, self.fork = jobs, fork
        self._idle: list[Worker] = []
        self._busy: dict[Connection, tuple[Worker, K]] = {}

    def run(self, tasks: Iterable[tuple[K, Task]], watch: Callable[[], None] = lambda: None) -> Iterator[tuple[K, str]]:
        """Run tasks, and yield the key of each task when the task ends.

        Args:
            tasks: Pairs of a key and a task. The next pair is taken from the iterator when a worker is free.
            watch: A function that is called repeatedly while tasks run.

        Yields:
            The key of each task, and a description of how its process ended. The description is empty if the task was
            completed.

        Raises:
            Exception: The error that a task raised.
        """
        waiting = iter(tasks)
        while True:
            for key, task in islice(waiting, self.jobs - len(self._busy)):
                self._begin(key, task)
            if not self._busy:
                return
            yield from self._finished()
            watch()

    def _begin(self, key: K, task: Task) -> None:
        """Start a fork for a task, or pickle the task and send it to a worker process."""
        if self.fork:
            worker = Worker(partial(_do, task), fork=True)
        else:
            worker = self._idle.pop() if self._idle else Worker(_serve, fork=False)
            worker.send(task)
        self._busy[worker.connection] = worker, key

    def _finished(self) -> Iterator[tuple[K, str]]:
        """Wait up to half a second, and yield the tasks that have ended; see ``run``."""
        for ready in wait(list(self._busy), timeout=0.5):
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

    def __exit__(self, *_: object) -> None:
        # Terminate tasks that are still running, because they could take hours. Their runs can be resumed later.
        workers = [*self._idle, *(worker for worker, _ in self._busy.values())]
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.end()
        self._idle, self._busy = [], {}


def _serve(connection: Connection) -> None:
    """Run one task after another, until the pipe is closed."""
    with ending_in_order():
        while True:
            connection.send(_error_of(connection.recv()))


def _do(task: Task, connection: Connection) -> None:
    """Run a single task in a fork."""
    # A fork does not inherit OpenMP's threads. An operation with several threads would wait for ever for the missing
    # threads.
    prepare_process(1)
    with threadpoolctl.threadpool_limits(1), ending_in_order():
        connection.send(_error_of(task))


def _error_of(task: Task) -> Exception | None:
    """Run a task.

    If the task raises an exception, return the exception in a form that can be pickled. Otherwise, return None.
    """
    try:
        task()
    except Exception as error:
        error.add_note(f"in another process:\n{traceback.format_exc()}")
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return FedstrataError(f"{type(error).__name__}: {error}")
        return error
    return None
