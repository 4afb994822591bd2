"""Compute the answers of clients in worker processes, in parallel with the process of the experiment.

Workers are forks of this process, and use the data, the model and the settings without a copy. Each worker uses one
thread. Any free worker may compute any client's answer, because the result is the same.

Two processes are 2.0 times as fast as one process on a convolutional network, and 1.8 times as fast on an MLP
(``benchmarks/fast_paths.py``).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import NamedTuple

from fedstrata.base.process import prepare_process
from fedstrata.base.processes import Worker, can_fork
from fedstrata.base.records import Tree
from fedstrata.engines.sharing import SharedMemory
from fedstrata.federation.messages import ClientId, Reply, Request, Requests

GRACE = 1.0
"""Seconds that a worker has, when the pool is closed, to finish its current answer."""

State = Mapping[str, Tree]


class Answer(NamedTuple):
    """A client's reply and the client's new state, which is None if the state did not change."""

    reply: Reply
    state: State | None


Answering = Callable[[ClientId, Request, State], Answer]


class LocalWorkerPool:
    """A pool of workers, which are forks of this process. Workers do not see later changes of this process.

    Args:
        count: Number of workers.
        answering: A function that computes a client's answer from the client's id, its request and its state.

    Raises:
        OSError: A process cannot be started, or memory cannot be shared.
    """

    def __init__(self, count: int, answering: Answering) -> None:
        self._down = SharedMemory()
        self._counter = os.memfd_create("fedstrata-next")
        self._workers: dict[Worker, SharedMemory] = {}
        """For each worker, the shared memory to which it writes its answers."""
        try:
            for _ in range(count):
                up = SharedMemory()
                work = partial(_serve, self._down, up, self._counter, answering)
                inherited = [worker.connection for worker in self._workers]
                self._workers[Worker(work, fork=True, daemon=True, inherited=inherited)] = up
        except BaseException:
            self.close()
            raise

    def ask(
        self,
        order: Sequence[ClientId],
        requests: Mapping[ClientId, Request],
        states: Mapping[ClientId, State],
        run_locally: Callable[[ClientId], None],
    ) -> dict[ClientId, Answer]:
        """Compute the answers of clients, in all workers and in this process at the same time.

        Args:
            order: The clients, in the order in which the workers begin to compute their answers.
            requests: The request of each client.
            states: A mapping from each client with a state to this state.
            run_locally: A function that computes a client's answer in this process, and stores it.

        Returns:
            The answers that workers computed. The answer of a client is missing if the worker failed, the client raised
            an exception, or ``run_locally`` was called for the client. All answers are missing if the requests cannot
            be shared.
        """
        asked_for = Requests.of(requests, requests)
        asked = [(client, asked_for.which[client]) for client in order]
        try:
            data = self._down.write((asked, list(asked_for.distinct), dict(states)))
        except Exception:
            # A value cannot be pickled, or the memory is full: the caller computes all answers in this process.
            return {}
        os.lseek(self._counter, 0, os.SEEK_SET)
        answers: dict[ClientId, Answer] = {}
        try:
            for worker, memory in self._workers.items():
                free, memory.free[:] = list(memory.free), []
                worker.send((data, free))
            while (place := next_index(self._counter)) < len(order):
                run_locally(order[place])
            for worker, memory in list(self._workers.items()):
                try:
                    message = worker.receive()
                except EOFError:
                    worker.end()
                    del self._workers[worker]
                    continue
                for client, reply, state in message:
                    answers[client] = Answer(memory.read(reply), memory.read(state))
        except BaseException:
            # The workers are ended, because the next call would read their answers to this call as its own.
            self._end_workers()
            raise
        self._down.done(data)
        return answers

    def close(self) -> None:
        """End the workers."""
        self._end_workers()
        os.close(self._counter)

    def _end_workers(self) -> None:
        for worker in self._workers:
            worker.end(GRACE)
        self._workers = {}


def next_index(counter: int) -> int:
    """Return the next index 0, 1, …, which no other process gets.

    The index is the position in an empty file that all processes share, which the system increments atomically. A lock
    would not be safe, because a killed worker would never release the lock.

    Args:
        counter: The file descriptor.
    """
    return os.lseek(counter, 1, os.SEEK_CUR) - 1


def _serve(down: SharedMemory, up: SharedMemory, counter: int, answering: Answering, connection: Connection) -> None:
    """Run a worker: answer one call of ``ask`` after another, until the parent process closes the connection or ends.

    Args:
        down: The memory from which the worker reads requests and states.
        up: The memory to which it writes answers.
        counter: See ``next_index``.
        answering: See ``LocalWorkerPool``.
        connection: The connection to the parent process.
    """
    prepare_process(1)
    while True:
        data, free = connection.recv()
        up.reuse(free)
        asked, requests, states = down.read(data, copy=True)
        message = []
        while (place := next_index(counter)) < len(asked):
            client, which = asked[place]
            # After an exception the answer is missing. The parent process computes it again, and records the exception.
            with contextlib.suppress(Exception):
                answer = answering(client, requests[which], states.get(client, {}))
                # Reply and state are written to two blocks of shared memory, because the state is stored much longer.
                message.append((client, up.write(answer.reply), up.write(answer.state)))
        connection.send(message)


def cores() -> int:
    """Return the number of cores that this process may use for itself and its workers.

    The result is 1 if this process is itself a worker of another process, or cannot be forked.
    """
    if multiprocessing.parent_process() is not None or not can_fork():
        return 1
    return len(os.sched_getaffinity(0))
