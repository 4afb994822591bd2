"""Worker processes that answer for clients beside the process that asks.

They are forked, so that they hold the data, the model and the settings without a copy, and use one thread each. Any
free worker answers for any client: the answer does not depend on it.

Two processes are 2.0 times as fast as one with convolutions, and 1.8 times with an MLP (``benchmarks/fast_paths.py``).
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
"""Seconds for a worker to end the answer that it computes."""

State = Mapping[str, Tree]


class Answer(NamedTuple):
    """What a client replies, and its new state where it changed."""

    reply: Reply
    state: State | None


Answering = Callable[[ClientId, Request, State], Answer]


class LocalWorkerPool:
    """Forks of this process as it is now.

    Args:
        count: How many.
        answering: How they answer for a client.

    Raises:
        OSError: A process cannot be started or memory cannot be shared.
    """

    def __init__(self, count: int, answering: Answering) -> None:
        self._down = SharedMemory()
        self._counter = os.memfd_create("fedstrata-next")
        self._workers: dict[Worker, SharedMemory] = {}
        """By worker, the memory in which its answers lie."""
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
        """Answer for clients, in free workers and in this process.

        Args:
            order: The clients.
            requests: By client.
            states: By client.
            run_locally: Answers for a client in this process.

        Returns:
            The answers of the workers. A client for which ``run_locally`` was not called either raised an exception in
            a worker, or its worker is gone.
        """
        asked_for = Requests.of(requests, requests)
        asked = [(client, asked_for.which[client]) for client in order]
        try:
            data = self._down.write((asked, list(asked_for.distinct), dict(states)))
        except Exception:
            # Something that cannot be shared: this process answers for all.
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
            # Answers of workers that nobody fetches would be taken for those to the next question.
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
    """Return the next index, which no other process gets.

    It is the position in an empty file that all share and that the system moves on in one step: there is no lock that a
    worker which is killed could keep.
    """
    return os.lseek(counter, 1, os.SEEK_CUR) - 1


def _serve(down: SharedMemory, up: SharedMemory, counter: int, answering: Answering, connection: Connection) -> None:
    """Answer one question after another, until the process that asks closes its end, or is gone."""
    prepare_process(1)
    while True:
        data, free = connection.recv()
        up.reuse(free)
        asked, requests, states = down.read(data, copy=True)
        message = []
        while (place := next_index(counter)) < len(asked):
            client, which = asked[place]
            # Whatever goes wrong goes wrong again where it can be seen.
            with contextlib.suppress(Exception):
                answer = answering(client, requests[which], states.get(client, {}))
                # Two blocks: a state is kept long after its reply is gone.
                message.append((client, up.write(answer.reply), up.write(answer.state)))
        connection.send(message)


def cores() -> int:
    """Cores that this process may use for workers; one where it is itself one of several, or cannot be forked."""
    if multiprocessing.parent_process() is not None or not can_fork():
        return 1
    return len(os.sched_getaffinity(0))
