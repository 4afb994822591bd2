"""Compute the replies of clients in worker processes, in parallel with the main process.

Workers are forks of the main process, and use the data, the model and the settings without copying them. Each worker
uses one thread. Any free worker may compute any client's reply, because the result is the same in all workers.

Two processes train a convolutional network 2.0 times as fast as one process, and an MLP 1.8 times as fast
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
"""The number of seconds that a worker may take to finish its current reply after the pool is closed."""

State = Mapping[str, Tree]


class Answer(NamedTuple):
    """A client's reply, and its new state (None if the state did not change)."""

    reply: Reply
    state: State | None


Answering = Callable[[ClientId, Request, State], Answer]


class LocalWorkerPool:
    """A pool of workers that are forks of this process. Workers do not see later changes to objects of this process.

    Args:
        count: Number of workers.
        answering: A function that computes a client's reply and new state from the client's id, request and state.

    Raises:
        OSError: A process cannot be started, or memory cannot be shared.
    """

    def __init__(self, count: int, answering: Answering) -> None:
        self._down = SharedMemory()
        self._counter = os.memfd_create("fedstrata-next")
        self._workers: dict[Worker, SharedMemory] = {}
        """For each worker, the shared memory to which the worker writes replies and states."""
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
        """Compute the replies of clients, in all workers and in this process at the same time.

        Args:
            order: The clients, in the order in which the computation of their replies begins.
            requests: The request to each client.
            states: The state of each client that has a state.
            run_locally: A function that computes a client's reply in this process, and stores the reply.

        Returns:
            The replies and states that workers computed. A client is missing if its worker failed, if its handler
            raised an exception, or if ``run_locally`` computed its reply. If the requests cannot be written to shared
            memory, the result is empty.
        """
        asked_for = Requests.of(requests, requests)
        asked = [(client, asked_for.which[client]) for client in order]
        try:
            data = self._down.write((asked, list(asked_for.distinct), dict(states)))
        except Exception:
            # A value cannot be pickled, or the memory is full. The caller then computes all replies in this process.
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
            # Stop the workers, because the next call would mistake their replies to this call for its own replies.
            self._end_workers()
            raise
        self._down.done(data)
        return answers

    def close(self) -> None:
        """Stop all workers, and close the counter."""
        self._end_workers()
        os.close(self._counter)

    def _end_workers(self) -> None:
        for worker in self._workers:
            worker.end(GRACE)
        self._workers = {}


def next_index(counter: int) -> int:
    """Return the next unused index: 0, 1, … Each index is returned in one process only.

    The index is the offset of a file descriptor that all processes share; the file is empty. The operating system
    increments the offset atomically. A lock would not be safe, because a killed worker would never release it.

    Args:
        counter: The file descriptor of the empty file.
    """
    return os.lseek(counter, 1, os.SEEK_CUR) - 1


def _serve(down: SharedMemory, up: SharedMemory, counter: int, answering: Answering, connection: Connection) -> None:
    """Run a worker, which handles one call of ``ask`` after another until the parent closes the connection or ends.

    Args:
        down: The memory from which the worker reads requests and states.
        up: The memory to which the worker writes replies and new states.
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
            # After an exception, the reply is missing. The parent process repeats the computation, and records the
            # exception.
            with contextlib.suppress(Exception):
                answer = answering(client, requests[which], states.get(client, {}))
                # Write reply and state to separate blocks of shared memory, because states are stored much longer than
                # replies.
                message.append((client, up.write(answer.reply), up.write(answer.state)))
        connection.send(message)


def cores() -> int:
    """Return the number of cores that this process and its workers may use.

    The result is 1 if this process is a worker of another process, or cannot be forked.
    """
    if multiprocessing.parent_process() is not None or not can_fork():
        return 1
    return len(os.sched_getaffinity(0))
