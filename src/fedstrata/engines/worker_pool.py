"""Worker processes that share the clients of a request with the main process.

Workers are forks: they hold the data, the model and the settings without a copy, and use one thread each. Any free
worker answers for any client, because the answer does not depend on the worker.

Two processes are 2.0 times as fast as one with convolutions and 1.8 times with an MLP (``benchmarks/fast_paths.py``).
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
from fedstrata.engines.sharing import pack, receive, send
from fedstrata.federation.messages import ClientId, Reply, Request, Requests

GRACE = 1.0
"""Seconds that a worker has to finish the answer that it is computing, before it is killed."""

State = Mapping[str, Tree]


class Answer(NamedTuple):
    """A client's reply, and its new state if the state changed."""

    reply: Reply
    state: State | None


Answering = Callable[[ClientId, Request, State], Answer]


class LocalWorkerPool:
    """Worker processes, forked from this process in its present state.

    Args:
        count: Number of workers.
        answering: Computes the answer of a client.

    Raises:
        OSError: A process cannot be started or memory cannot be shared.
    """

    def __init__(self, count: int, answering: Answering) -> None:
        self._counter = os.memfd_create("fedstrata-next")
        self._workers: list[Worker] = []
        work = partial(_serve, self._counter, answering)
        try:
            for _ in range(count):
                inherited = [worker.connection for worker in self._workers]
                self._workers.append(Worker(work, fork=True, daemon=True, inherited=inherited))
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
        """Let workers and this process answer for the clients; each process takes the next client when it is free.

        Args:
            order: The clients, in the order in which they are taken.
            requests: Each client's request.
            states: The state of each client that has one.
            run_locally: Answers for a client in this process.

        Returns:
            The answers that workers computed. If a client raised an exception in a worker, or its worker died, it has
            neither an answer here nor a call of ``run_locally``.
        """
        by_client = Requests.of(requests, requests)
        tasks = [(client, by_client.which[client]) for client in order]
        try:
            packed = pack((tasks, list(by_client.distinct), dict(states)))
        except Exception:
            return {}  # a request or a state cannot be pickled: this process answers for all clients
        os.lseek(self._counter, 0, os.SEEK_SET)
        answers: dict[ClientId, Answer] = {}
        try:
            for worker in self._workers:
                with contextlib.suppress(OSError):  # a dead worker, which ``receive`` below notices
                    send(worker.connection, packed)
            while (index := next_index(self._counter)) < len(order):
                run_locally(order[index])
            for worker in list(self._workers):
                try:
                    for _ in range(worker.receive()):
                        client, reply, state = receive(worker.connection)
                        answers[client] = Answer(reply, state)
                except (EOFError, OSError):
                    worker.end()
                    self._workers.remove(worker)
        except BaseException:
            # Otherwise answers that are still in the pipes would be taken as answers to the next request.
            self._end_workers()
            raise
        return answers

    def close(self) -> None:
        """End the workers and free the counter."""
        self._end_workers()
        os.close(self._counter)

    def _end_workers(self) -> None:
        for worker in self._workers:
            worker.end(GRACE)
        self._workers = []


def next_index(counter: int) -> int:
    """Return the next index; no other process gets the same one.

    The index is the position in an empty file that all processes share. The system advances it in one step, so that no
    lock is needed, which a killed worker could leave locked.
    """
    return os.lseek(counter, 1, os.SEEK_CUR) - 1


def _serve(counter: int, answering: Answering, connection: Connection) -> None:
    """Answer request after request, until the other end of the pipe is closed."""
    prepare_process(1)
    while True:
        tasks, requests, states = receive(connection)
        answers = []
        while (index := next_index(counter)) < len(tasks):
            client, which = tasks[index]
            # The main process answers for this client again, and meets the exception there.
            with contextlib.suppress(Exception):
                answer = answering(client, requests[which], states.get(client, {}))
                answers.append(pack((client, *answer)))
        connection.send(len(answers))
        for packed in answers:
            send(connection, packed)


def cores() -> int:
    """Return how many cores workers may use: 1 if this process is a worker itself or cannot be forked."""
    if multiprocessing.parent_process() is not None or not can_fork():
        return 1
    return len(os.sched_getaffinity(0))
