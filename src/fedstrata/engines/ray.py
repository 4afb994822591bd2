"""The Ray engine: clients in processes on all cores of this machine, or of a cluster.

The method, the clients' states and the books stay in the process that runs the experiment. A state travels with its
client's request and comes back changed, so that any worker can answer for any client, and one that dies takes
nothing with it: what it was working on others compute again, to the same bytes.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.base import records
from fedstrata.base.errors import ExtraMissingError, FedstrataError, SpecError, WireError
from fedstrata.clients.context import ClientContext
from fedstrata.clients.store import StateStore
from fedstrata.engines.ray_worker import VERSIONS, EncodedAnswer, Payload, Worker, WorkerPayload
from fedstrata.federation.engine import Engine, Failure
from fedstrata.federation.messages import ClientId, Reply, Request, Requests, Weights
from fedstrata.stratify.masking.key_store import KeyRing, ring_of

ADDRESS = "RAY_ADDRESS"
"""Names the cluster to join; without it, and outside a session of Ray's, a local one is started."""

START_SECONDS = 300.0
"""How long the engine waits for workers when there is none."""

INLINE = 64 << 10
"""Larger requests, in bytes, go once into the object store instead of into every call."""

AHEAD = 2
"""Calls that a worker has at a time: the next one waits there while it computes."""

MOST_AT_ONCE = 8
"""Most clients in a call that takes long."""

DEATHS = 3
"""Workers that may die over one call before its clients have failed: a client may be what kills them."""

CALL_PAYS = 0.005
"""Seconds of work below which clients are put into one call."""


class ClientError(FedstrataError):
    """What a client raised in another process; the note has its traceback."""


class RayEngine(Engine):
    """Clients wherever a worker is free; only their states stay.

    Args:
        context: Data, assignment, model and settings that they share.
        store: Their states.
        address: The cluster to join; that of ``RAY_ADDRESS`` unless given, else a new one on this machine.
        workers: How many; ``training.workers`` or one a processor of the cluster unless given, and never more than
            clients.
        pool: Workers that are there already and stay, instead of new ones.

    Raises:
        ExtraMissingError: Ray is not installed.
        SpecError: There is no cluster at the address.
        FedstrataError: A worker cannot start, or runs other versions.
    """

    def __init__(
        self,
        context: ClientContext,
        store: StateStore,
        *,
        address: str | None = None,
        workers: int | None = None,
        pool: WorkerPool | None = None,
    ) -> None:
        self.context, self.store = context, store
        self._states: dict[ClientId, bytes] = {}
        self._exchange = 0
        self._seconds_per_unit: dict[type[Request], float] = {}
        """By kind of request, as a worker measured them."""
        self._ray = _import_ray()
        with ExitStack() as closing:
            closing.callback(store.close)
            folder = closing.enter_context(tempfile.TemporaryDirectory(prefix="fedstrata-keys-"))
            if pool is None:
                workers = workers or context.config.training.workers
                closing.callback(_join(self._ray, address or os.environ.get(ADDRESS), workers))
                count = max(1, workers or int(self._ray.cluster_resources().get("CPU", 1)))
                pool = closing.enter_context(WorkerPool(min(count, context.config.clients)))
            # In memory, keys would be those of one worker.
            keys = ring_of(context)
            keys = keys if keys.folder else KeyRing(Path(folder), create=True)
            pool.enter(self._ray.put(WorkerPayload.of(context, keys)))
            self._pool, self._closing = pool, closing.pop_all()

    def ask(self, requests: Mapping[ClientId, Request], *, together: bool) -> Mapping[ClientId, Reply | Failure]:
        """The clients' answers, whoever computes them; ``together``, in one worker, with a thread each.

        One worker, because a sum in the middle of a pass costs a visit of every client to the others: between
        processes that takes longer than a client's part of a batch.
        """
        self._states = {}
        self._exchange += 1
        outcomes: dict[ClientId, Reply | Failure] = {}
        for call, result in self._pool.run(self._calls(requests, together)):
            if isinstance(result, Failure):
                outcomes |= dict.fromkeys(call.clients, result)
                continue
            answers, seconds = result
            self._seconds_per_unit[type(requests[call.clients[0]])] = seconds / call.work
            for client, answer in zip(call.clients, answers, strict=True):
                outcomes[client] = self._read(client, answer)
        return outcomes

    def hop(self, client: ClientId, task: Request, weights: Weights) -> tuple[Weights, Reply] | Failure:
        """One client works on the travelling model, which stays at its worker for the next one."""
        self._states = {}
        sent, state = records.encode(task), self._state(client)
        host: WorkerHandle | None = None

        def send(worker: WorkerHandle) -> Any:
            nonlocal host
            host = worker
            model = None if worker.weights is weights else records.encode(weights)
            worker.weights = None  # until it is known that what it has then counts
            return worker.actor.hop.remote(client, sent, state, model)

        ((_, answer),) = self._pool.run(iter([Call([client], 1.0, send)]))
        if isinstance(answer, Failure):
            return answer
        reply = self._read(client, answer)
        if isinstance(reply, Failure):
            return reply
        assert host is not None
        host.weights = moved = records.decode(answer.moved)
        return moved, reply

    def commit(self, accepted: Iterable[ClientId]) -> None:
        """Keep what the accepted clients changed in their state."""
        for client in accepted:
            if client in self._states:
                self.store.put(client, records.decode(self._states[client]))
        self._states = {}

    def close(self) -> None:
        """Stop the workers, and the cluster if it was started for them; remove states that went to disk."""
        self._closing.close()

    def _calls(self, requests: Mapping[ClientId, Request], together: bool) -> Iterator[Call]:
        """Calls, those of the longest work first; short ones are for several clients."""
        every = Requests.of(requests, requests)
        work = {client: 1.0 + every.work.get(client, 0.0) for client in every}
        # What many clients are sent is encoded, and put into the store, once.
        places = every.which
        payloads: dict[int, Any] = {}
        exchange = self._exchange

        def call(clients: list[ClientId]) -> Call:
            which = [places[client] for client in clients]
            for client, place in zip(clients, which, strict=True):
                if place not in payloads:
                    payloads[place] = self._payload(requests[client])
            calls = [(client, place, self._state(client)) for client, place in zip(clients, which, strict=True)]
            sent = [payloads[place] for place in dict.fromkeys(which)]
            return Call(
                clients,
                sum(work[client] for client in clients),
                lambda worker: worker.actor.ask.remote(exchange, calls, together, *sent),
            )

        left = deque(sorted(requests, key=lambda client: (-work[client], client)))
        if together:
            yield call(sorted(left))
            return
        while left:
            # As in guided self-scheduling: ever fewer in a call, so that all workers end at about one time.
            count = min(MOST_AT_ONCE, len(left) // (4 * len(self._pool)))
            seconds = self._seconds_per_unit.get(type(requests[left[0]]), math.inf) * work[left[0]]
            short = min(math.ceil(CALL_PAYS / max(seconds, 1e-9)), -(-len(left) // len(self._pool)))
            yield call([left.popleft() for _ in range(max(1, count, short))])

    def _payload(self, request: Request) -> Any:
        data: Payload = records.encode(request)
        return data if len(data) <= INLINE else self._ray.put(np.frombuffer(data, dtype=np.uint8))

    def _state(self, client: ClientId) -> bytes:
        state = self.store.get(client)
        return records.encode(dict(state)) if state else b""

    def _read(self, client: ClientId, answer: EncodedAnswer) -> Reply | Failure:
        if answer.failure is not None or answer.reply is None:
            reason = answer.failure.reason if answer.failure else "no reply"
            error = ClientError(reason) if answer.raised else None
            if error is not None:
                error.add_note(answer.raised)
            return Failure(reason, error, answer.failure is not None and answer.failure.bystander)
        if answer.state is not None:
            self._states[client] = answer.state
        try:
            reply: Reply = records.decode(answer.reply)
        except WireError as error:
            return Failure(str(error))
        return reply


@dataclass(frozen=True)
class Call:
    """One call of a worker.

    Args:
        clients: Whom it answers for.
        work: What it takes, in any unit.
        send: Calls a worker; Ray's reference to what it will return.
        deaths: How many workers died over it.
    """

    clients: list[ClientId]
    work: float
    send: Callable[[WorkerHandle], Any]
    deaths: int = 0


@dataclass(eq=False)
class WorkerHandle:
    """A worker as the engine sees it.

    Args:
        actor: Ray's handle.
        hello: Ray's reference to its greeting, until it has come and the worker is ready.
        name: Who it is.
        running: What it was called for, by Ray's reference, in order.
        weights: The travelling model that it had last.
    """

    actor: Any
    hello: Any = None
    name: str = ""
    running: dict[Any, Call] = field(default_factory=dict)
    weights: Weights | None = None

    @property
    def load(self) -> tuple[float, int]:
        """The work that it has, and in how many calls."""
        return sum(call.work for call in self.running.values()), len(self.running)


class WorkerPool:
    """Workers, each of which is replaced when it dies.

    Args:
        count: How many.
    """

    def __init__(self, count: int) -> None:
        self._ray = _import_ray()
        self._class = self._ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(Worker)
        self._payload_ref: Any = None
        # Ray itself hands on the script's and the current folder alone.
        self._paths = [os.path.abspath(path) for path in sys.path]  # noqa: PTH100  keeps links, as Python does
        self._all = [WorkerHandle(self._class.remote(self._paths)) for _ in range(count)]

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.dismiss()

    def __len__(self) -> int:
        return len(self._all)

    def enter(self, worker_payload: Any) -> None:
        """Take all workers into a world, to which Ray's reference is given, and wait until one of them is there.

        The others join in when they can: processes start at their own pace, and a cluster may have no room yet.

        Raises:
            FedstrataError: One cannot start, or none did in time.
        """
        self._payload_ref = worker_payload
        for worker in self._all:
            worker.hello, worker.weights = worker.actor.enter.remote(worker_payload), None
        while all(worker.hello is not None for worker in self._all):
            self._wait()

    def run(self, calls: Iterator[Call]) -> Iterator[tuple[Call, Any]]:
        """Have calls run, each as soon as a worker has room for it.

        Yields:
            Each call with what came of it, as they are done; a ``Failure`` where ``DEATHS`` workers died over it.
        """
        again: deque[Call] = deque()
        try:
            while True:
                self._hand_out(calls, again)
                if not again and not any(worker.running for worker in self._all):
                    return
                worker, ref = self._wait()
                if ref is None:
                    continue
                try:
                    yield worker.running[ref], self._get(ref)
                    del worker.running[ref]
                except self._ray.exceptions.RayError as error:
                    yield from self._replace_worker(worker, error, again)
        finally:
            for worker in self._all:
                worker.running.clear()

    def dismiss(self) -> None:
        """Stop them all."""
        for worker in self._all:
            self._ray.kill(worker.actor)
        self._all = []

    def _hand_out(self, calls: Iterator[Call], again: deque[Call]) -> None:
        ready = [worker for worker in self._all if worker.hello is None]
        while ready:
            # Who has least to do comes first; the next call waits with nobody who has more than others.
            worker = min(ready, key=lambda worker: worker.load)
            if len(worker.running) >= AHEAD:
                return
            call = again.popleft() if again else next(calls, None)
            if call is None:
                return
            worker.running[call.send(worker)] = call

    def _wait(self) -> tuple[WorkerHandle, Any]:
        """A worker, and one of its calls that is over; None when it has just come up."""
        waiting = {ref: worker for worker in self._all for ref in worker.running}
        waiting |= {worker.hello: worker for worker in self._all if worker.hello is not None}
        nobody = all(worker.hello is not None for worker in self._all)
        done, _ = self._ray.wait(list(waiting), num_returns=1, timeout=START_SECONDS if nobody else None)
        if not done:
            raise FedstrataError(f"no worker of Ray's came up within {START_SECONDS:g} s")
        ref, worker = done[0], waiting[done[0]]
        if worker.hello != ref:
            return worker, ref
        try:
            versions, worker.name = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            raise FedstrataError(f"a worker of Ray's cannot start: {_last_line(error)}") from error
        if versions != VERSIONS:
            raise FedstrataError(f"{worker.name} runs {versions}, and this process {VERSIONS}; install the same")
        worker.hello = None
        return worker, None

    def _get(self, ref: Any, timeout: float | None = None) -> Any:
        """What a call returned.

        Raises:
            FedstrataError: The engine there refused it, or failed.
            RayError: It was lost.
        """
        try:
            return self._ray.get(ref, timeout=timeout)
        except self._ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, FedstrataError) else FedstrataError(str(error))) from None

    def _replace_worker(self, dead: WorkerHandle, error: Exception, again: deque[Call]) -> Iterator[tuple[Call, Any]]:
        """Replace a worker. What it had not done others do: nothing of that counts yet, and all of it is determined.

        Only the first of its calls that is not done can have killed it.
        """
        died = Failure(f"its worker ({dead.name}) died: {_last_line(error)}")
        for ref, call in list(dead.running.items()):
            del dead.running[ref]
            try:
                yield call, self._get(ref, timeout=0)
            except self._ray.exceptions.RayError:
                if call.deaths + 1 < DEATHS:
                    again.append(replace(call, deaths=call.deaths + 1))
                else:
                    yield call, died
                break
        again.extend(dead.running.values())
        dead.running = {}
        self._ray.kill(dead.actor)
        actor = self._class.remote(self._paths)
        self._all[self._all.index(dead)] = WorkerHandle(actor, actor.enter.remote(self._payload_ref))


def _last_line(error: Exception) -> str:
    """The gist of Ray's messages, which are long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError:
        raise ExtraMissingError("the engine 'ray'", "ray") from None


def _join(ray: Any, address: str | None, workers: int | None) -> Callable[[], None]:
    """Enter a cluster; how to leave it."""
    if ray.is_initialized():
        return lambda: None
    # It speaks of itself before it looks at its own logging_level.
    logging.getLogger("ray").setLevel(logging.ERROR)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address:
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError) as error:
            raise SpecError(ADDRESS, f"no cluster can be joined there: {_last_line(error)}", address) from error
    else:
        ray.init(address="local", num_cpus=workers, include_dashboard=False, **quiet)
    leave: Callable[[], None] = ray.shutdown
    return leave
