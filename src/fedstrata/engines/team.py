"""Worker processes that answer for clients beside the process that asks.

They are forked, so that they hold the data, the model and the settings without a copy, and use one thread each. Who
answers for which client is a matter of who is free; what the answer is, is not.

Two processes are 2.0 times as fast as one with convolutions, and 1.8 times with an MLP (``benchmarks/fast_paths.py``).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from fedstrata.base.process import prepare_process
from fedstrata.base.records import Tree
from fedstrata.base.signals import end_with_parent, in_main_thread
from fedstrata.engines.sharing import SharedMemory
from fedstrata.federation.messages import ClientId, Reply, Request

State = Mapping[str, Tree]


class Answer(NamedTuple):
    """What a client replies, and its new state where it changed."""

    reply: Reply
    state: State | None


Answering = Callable[[ClientId, Request, State], Answer]


class Team:
    """Processes that are forked from this one as it is now.

    Args:
        count: How many.
        answering: How they answer for a client.

    Raises:
        OSError: A process cannot be started or memory cannot be shared.
    """

    def __init__(self, count: int, answering: Answering) -> None:
        context = multiprocessing.get_context("fork")
        self._down = SharedMemory()
        self._next = os.memfd_create("fedstrata-next")
        self._members: list[_Member] = []
        try:
            for _ in range(count):
                self._members.append(self._hire(context, answering))
        except BaseException:
            self.close()
            raise

    def _hire(self, context: Any, answering: Answering) -> _Member:
        here, there = context.Pipe()
        up = SharedMemory()
        inherited = [here, *(member.connection for member in self._members)]
        work = (there, inherited, self._down, up, self._next, answering, in_main_thread())
        process = context.Process(target=_serve, args=work, daemon=True, name="fedstrata-worker")
        with warnings.catch_warnings():
            # Forks of processes with threads may hang in locks that those held; nobody else runs here now.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        there.close()
        return _Member(process, here, up)

    def ask(
        self,
        order: Sequence[ClientId],
        requests: Mapping[ClientId, Request],
        states: Mapping[ClientId, State],
        here: Callable[[ClientId], None],
    ) -> dict[ClientId, Answer]:
        """Answer for clients, each by whoever is free; ``here`` answers for one in this process.

        Returns:
            What the workers answered. Who is in neither, raised an exception there, or its worker is gone.
        """
        distinct = {id(request): request for request in requests.values()}
        keys = {key: place for place, key in enumerate(distinct)}
        asked = [(client, keys[id(requests[client])]) for client in order]
        try:
            data = self._down.write((asked, list(distinct.values()), dict(states)))
        except Exception:
            # Something that cannot be shared: whoever asked answers for all.
            return {}
        os.lseek(self._next, 0, os.SEEK_SET)
        busy = [member for member in self._members if member.send(data)]
        answers: dict[ClientId, Answer] = {}
        try:
            while (place := _take(self._next)) < len(order):
                here(order[place])
            for member in busy:
                answers |= member.receive()
        except BaseException:
            # Answers of workers that nobody fetches would be taken for those to the next question.
            self._end_members()
            raise
        self._down.done(data)
        self._members = [member for member in self._members if member.alive]
        return answers

    def close(self) -> None:
        """End the workers."""
        self._end_members()
        os.close(self._next)

    def _end_members(self) -> None:
        for member in self._members:
            member.close()
        self._members = []


class _Member:
    """A worker, as the process that asks sees it."""

    def __init__(self, process: Any, connection: Connection, memory: SharedMemory) -> None:
        self.process, self.connection, self.memory = process, connection, memory
        self.alive = True

    def send(self, data: bytes) -> bool:
        free, self.memory.free[:] = list(self.memory.free), []
        try:
            self.connection.send((data, free))
        except OSError:
            self.alive = False
        return self.alive

    def receive(self) -> dict[ClientId, Answer]:
        try:
            message = self.connection.recv()
        except (OSError, EOFError):
            self.alive = False
            return {}
        read = self.memory.read
        return {client: Answer(read(reply), read(state)) for client, reply, state in message}

    def close(self) -> None:
        self.connection.close()
        self.process.join(timeout=1)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _take(counter: int) -> int:
    """The next place, which nobody else gets.

    It is the position in an empty file that all share and that the system moves on in one step: there is no lock that a
    worker which is killed could keep.
    """
    return os.lseek(counter, 1, os.SEEK_CUR) - 1


def _serve(
    connection: Connection,
    inherited: Sequence[Connection],
    down: SharedMemory,
    up: SharedMemory,
    counter: int,
    answering: Answering,
    asked_by_main_thread: bool,
) -> None:
    """A worker's life: until the process that asks closes its end, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(asked_by_main_thread)
    for other in inherited:
        other.close()
    prepare_process(1)
    with contextlib.suppress(EOFError, OSError):
        while True:
            data, free = connection.recv()
            up.reuse(free)
            asked, requests, states = down.read(data, copy=True)
            message = []
            while (place := _take(counter)) < len(asked):
                client, which = asked[place]
                # Whatever goes wrong goes wrong again where it can be seen.
                with contextlib.suppress(Exception):
                    answer = answering(client, requests[which], states.get(client, {}))
                    # Two blocks: a state is kept long after its reply is gone.
                    message.append((client, up.write(answer.reply), up.write(answer.state)))
            connection.send(message)
    os._exit(0)


def cores() -> int:
    """Cores that this process may use for a team; one where it is itself one of several, or cannot be forked."""
    if multiprocessing.parent_process() is not None or not can_fork():
        return 1
    return len(os.sched_getaffinity(0))


def can_fork() -> bool:
    """Whether a team may be forked here: elsewhere than on Linux a fork does not keep what it needs."""
    return sys.platform == "linux" and not multiprocessing.current_process().daemon
