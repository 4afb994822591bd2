"""The Ray engine, which runs clients in processes on all cores of this machine or of a cluster.

The method and the clients' states stay in the process that runs the experiment. The engine sends a client's state with
the request, and receives the new state with the reply. Any worker can therefore compute the reply of any client. If a
worker dies, other workers repeat its computations.
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
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.base import records
from fedstrata.base.errors import ExtraMissingError, FedstrataError, SpecError, WireError
from fedstrata.clients.client import ClientContext, StateStore
from fedstrata.engines.ray_worker import VERSIONS, EncodedAnswer, Payload, Worker, WorkerPayload
from fedstrata.federation.engine import Engine, Failure
from fedstrata.federation.messages import ClientId, Reply, Request, Requests, Weights
from fedstrata.stratify.masking.key_store import KeyRing, ring_of

ADDRESS = "RAY_ADDRESS"
"""The environment variable with the address of the Ray cluster to join. If the variable is not set, the engine starts a
local cluster."""

START_SECONDS = 300.0
"""The maximum number of seconds to wait until the first worker is ready."""

INLINE = 64 << 10
"""The maximum size, in bytes, of a request that is sent as part of each call. The engine puts larger requests into
Ray's object store."""

AHEAD = 2
"""Maximum number of unfinished calls per worker.

A worker gets the next call while it computes the current call, so that the worker does not wait between calls.
"""

MOST_AT_ONCE = 8
"""Maximum number of clients in a call, except in calls with less work than ``CALL_PAYS``."""

DEATHS = 3
"""After this number of worker deaths during one call, the clients of the call count as failed."""

CALL_PAYS = 0.005
"""The minimum amount of work per call, in seconds. The engine puts several clients into one call if each client has
less work than this amount."""


class ClientError(FedstrataError):
    """An exception that a client raised in another process. A note of the exception contains the traceback."""


class RayEngine(Engine):
    """An engine that runs each client in a free Ray worker, and stores the clients' states in this process.

    Args:
        context: The data, the assignment of samples, the model and the settings that all clients share.
        store: The store of the clients' states.
        address: The address of the cluster to join. Default: the value of ``RAY_ADDRESS`` or, if this variable is not
            set, a new cluster on this machine.
        workers: Maximum number of workers. The engine never uses more workers than there are clients. Default:
            ``training.workers`` or, if this setting is not set, one worker per core of the cluster.
        pool: Existing workers to use instead of new workers. ``close`` does not stop these workers.

    Raises:
        ExtraMissingError: Ray is not installed.
        SpecError: The engine cannot join a cluster at the address.
        FedstrataError: A worker cannot start, or has another version of fedstrata or PyTorch.
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
        """For each Python class of requests, the measured seconds per unit of work."""
        self._ray = _import_ray()
        with ExitStack() as closing:
            closing.callback(store.close)
            folder = closing.enter_context(tempfile.TemporaryDirectory(prefix="fedstrata-keys-"))
            if pool is None:
                workers = workers or context.config.training.workers
                closing.callback(_join(self._ray, address or os.environ.get(ADDRESS), workers))
                count = max(1, workers or int(self._ray.cluster_resources().get("CPU", 1)))
                pool = closing.enter_context(WorkerPool(min(count, context.config.clients)))
            # Keys that one worker makes in its memory would be unknown to the other workers, so the workers share keys
            # through a folder.
            keys = ring_of(context)
            keys = keys if keys.folder else KeyRing(Path(folder), create=True)
            pool.enter(self._ray.put(WorkerPayload.of(context, keys)))
            self._pool, self._closing = pool, closing.pop_all()

    def ask(self, requests: Mapping[ClientId, Request], *, together: bool) -> Mapping[ClientId, Reply | Failure]:
        """Return the clients' replies.

        If ``together`` is true, one worker runs all clients, each in its own thread. One worker is then faster than
        several workers, because exchanging tensors between processes is slow.
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
        """Let one client train the model in a relay. The worker keeps the model for the next client."""
        self._states = {}
        sent, state = records.encode(task), self._state(client)
        host: WorkerHandle | None = None

        def send(worker: WorkerHandle) -> Any:
            nonlocal host
            host = worker
            model = None if worker.weights is weights else records.encode(weights)
            worker.weights = None  # set again below, if the hop succeeds
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
        """Store the changed states of the clients whose replies were accepted."""
        for client in accepted:
            if client in self._states:
                self.store.put(client, records.decode(self._states[client]))
        self._states = {}

    def close(self) -> None:
        """Stop the workers, and the cluster if this engine started it. Delete the clients' states on the disk."""
        self._closing.close()

    def _calls(self, requests: Mapping[ClientId, Request], together: bool) -> Iterator[Call]:
        """Yield remote calls for the requests.

        Clients with the most work come first. Clients with little work are combined in one call.
        """
        by_client = Requests.of(requests, requests)
        work = {client: 1.0 + by_client.work.get(client, 0.0) for client in by_client}
        # A request to several clients is encoded and stored only once.
        payload_of = cache(lambda which: self._payload(by_client.distinct[which]))
        exchange = self._exchange

        def call(clients: list[ClientId]) -> Call:
            calls = [(client, by_client.which[client], self._state(client)) for client in clients]
            sent = [payload_of(which) for which in dict.fromkeys(which for _, which, _ in calls)]
            return Call(
                clients,
                sum(work[client] for client in clients),
                lambda worker: worker.actor.ask.remote(exchange, calls, together, *sent),
            )

        if together:
            yield call(sorted(requests))
            return
        waiting = deque(sorted(requests, key=lambda client: (-work[client], client)))
        while waiting:
            # Guided self-scheduling: calls get smaller towards the end, so that all workers end at about the same time.
            count = min(MOST_AT_ONCE, len(waiting) // (4 * len(self._pool)))
            seconds = self._seconds_per_unit.get(type(requests[waiting[0]]), math.inf) * work[waiting[0]]
            short = min(math.ceil(CALL_PAYS / max(seconds, 1e-9)), -(-len(waiting) // len(self._pool)))
            yield call([waiting.popleft() for _ in range(max(1, count, short))])

    def _payload(self, request: Request) -> Any:
        data: Payload = records.encode(request)
        return data if len(data) <= INLINE else self._ray.put(np.frombuffer(data, dtype=np.uint8))

    def _state(self, client: ClientId) -> bytes:
        state = self.store.get(client)
        return records.encode(dict(state)) if state else b""

    def _read(self, client: ClientId, answer: EncodedAnswer) -> Reply | Failure:
        if answer.failure is not None:
            error = None
            if answer.raised:
                error = ClientError(answer.failure.reason)
                error.add_note(answer.raised)
            return Failure(answer.failure.reason, error, answer.failure.bystander)
        if answer.state is not None:
            self._states[client] = answer.state
        try:
            reply: Reply = records.decode(answer.reply)
        except WireError as error:
            return Failure(str(error))
        return reply


@dataclass(frozen=True)
class Call:
    """A remote call, in which a worker computes the replies of some clients.

    Args:
        clients: The clients whose replies the worker computes.
        work: The expected work of the call, in a unit that is the same for all calls.
        send: A function that sends the call to a worker and returns Ray's reference to the result.
        deaths: Number of workers that have died during this call.
    """

    clients: list[ClientId]
    work: float
    send: Callable[[WorkerHandle], Any]
    deaths: int = 0


@dataclass(eq=False)
class WorkerHandle:
    """The engine's information about a worker.

    Args:
        actor: Ray's handle to the worker.
        hello: Ray's reference to the result of ``Worker.enter``; None if the result has arrived and the worker is
            ready.
        name: The worker's process and machine, for error messages.
        running: A mapping from Ray's references to the unfinished calls, in the order in which the calls were sent.
        weights: The current model of a relay, if this worker ran the relay's latest client; otherwise None.
    """

    actor: Any
    hello: Any = None
    name: str = ""
    running: dict[Any, Call] = field(default_factory=dict)
    weights: Weights | None = None

    @property
    def load(self) -> tuple[float, int]:
        """The total work of the worker's unfinished calls, and the number of these calls."""
        return sum(call.work for call in self.running.values()), len(self.running)


class WorkerPool:
    """A pool of Ray workers. If a worker dies, a new worker replaces it.

    Args:
        count: Number of workers.
    """

    def __init__(self, count: int) -> None:
        self._ray = _import_ray()
        self._class = self._ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(Worker)
        self._payload_ref: Any = None
        # Send workers the import paths of this process, because Ray itself gives them only the script's folder and the
        # current folder. Use ``abspath``, because it keeps symbolic links, as Python does.
        self._paths = [os.path.abspath(path) for path in sys.path]  # noqa: PTH100
        self._all = [WorkerHandle(self._class.remote(self._paths)) for _ in range(count)]

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.dismiss()

    def __len__(self) -> int:
        return len(self._all)

    def enter(self, worker_payload: Any) -> None:
        """Send the clients' context to all workers, and wait until the first worker is ready.

        Other workers may join later, for example because they wait for free cores of the cluster.

        Args:
            worker_payload: Ray's reference to a ``WorkerPayload``.

        Raises:
            FedstrataError: A worker cannot start, or workers are not ready within ``START_SECONDS``.
        """
        self._payload_ref = worker_payload
        for worker in self._all:
            worker.hello, worker.weights = worker.actor.enter.remote(worker_payload), None
        while all(worker.hello is not None for worker in self._all):
            self._wait()

    def run(self, calls: Iterator[Call]) -> Iterator[tuple[Call, Any]]:
        """Send each call to a worker as soon as a worker can accept another call.

        Yields:
            Each finished call with its result. The result is a ``Failure`` if ``DEATHS`` workers died during the call.
        """
        retries: deque[Call] = deque()
        try:
            while True:
                self._hand_out(calls, retries)
                if not retries and not any(worker.running for worker in self._all):
                    return
                worker, ref = self._wait()
                if ref is None:
                    continue
                try:
                    yield worker.running[ref], self._get(ref)
                    del worker.running[ref]
                except self._ray.exceptions.RayError as error:
                    yield from self._replace_worker(worker, error, retries)
        finally:
            for worker in self._all:
                worker.running.clear()

    def dismiss(self) -> None:
        """Stop all workers of the pool."""
        for worker in self._all:
            self._ray.kill(worker.actor)
        self._all = []

    def _hand_out(self, calls: Iterator[Call], retries: deque[Call]) -> None:
        ready = [worker for worker in self._all if worker.hello is None]
        while ready:
            worker = min(ready, key=lambda worker: worker.load)
            if len(worker.running) >= AHEAD:
                return
            call = retries.popleft() if retries else next(calls, None)
            if call is None:
                return
            worker.running[call.send(worker)] = call

    def _wait(self) -> tuple[WorkerHandle, Any]:
        """Wait until a call is finished or a worker is ready.

        Returns:
            The worker, and Ray's reference to its finished call. The second value is None if the worker has just become
            ready.
        """
        waiting = {ref: worker for worker in self._all for ref in worker.running}
        waiting |= {worker.hello: worker for worker in self._all if worker.hello is not None}
        none_ready = all(worker.hello is not None for worker in self._all)
        done, _ = self._ray.wait(list(waiting), num_returns=1, timeout=START_SECONDS if none_ready else None)
        if not done:
            raise FedstrataError(f"Ray did not start a worker within {START_SECONDS:g} seconds. Check the Ray cluster.")
        ref, worker = done[0], waiting[done[0]]
        if worker.hello != ref:
            return worker, ref
        try:
            versions, worker.name = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            raise FedstrataError(
                f"a Ray worker failed to start: {_last_line(error)}. Check the Ray cluster."
            ) from error
        if versions != VERSIONS:
            raise FedstrataError(
                f"{worker.name} uses {versions}, but this process uses {VERSIONS}. Install the same versions."
            )
        worker.hello = None
        return worker, None

    def _get(self, ref: Any, timeout: float | None = None) -> Any:
        """Return the result of a call.

        Raises:
            FedstrataError: The call raised an exception.
            RayError: The worker died before the call was finished.
        """
        try:
            return self._ray.get(ref, timeout=timeout)
        except self._ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, FedstrataError) else FedstrataError(str(error))) from None

    def _replace_worker(self, dead: WorkerHandle, error: Exception, retries: deque[Call]) -> Iterator[tuple[Call, Any]]:
        """Replace a dead worker.

        Yield the dead worker's finished calls with their results, and put its other calls into ``retries``.

        A worker computes one call at a time. Only the first unfinished call therefore counts as the cause of a worker's
        death.
        """
        died = Failure(f"its worker ({dead.name}) died: {_last_line(error)}")
        for ref, call in list(dead.running.items()):
            del dead.running[ref]
            try:
                yield call, self._get(ref, timeout=0)
            except self._ray.exceptions.RayError:
                if call.deaths + 1 < DEATHS:
                    retries.append(replace(call, deaths=call.deaths + 1))
                else:
                    yield call, died
                break
        retries.extend(dead.running.values())
        dead.running = {}
        self._ray.kill(dead.actor)
        actor = self._class.remote(self._paths)
        self._all[self._all.index(dead)] = WorkerHandle(actor, actor.enter.remote(self._payload_ref))


def _last_line(error: Exception) -> str:
    """Return the last line of an error message. Ray's messages are long, and their last line contains the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError:
        raise ExtraMissingError("the engine 'ray'", "ray") from None


def _join(ray: Any, address: str | None, workers: int | None) -> Callable[[], None]:
    """Connect to a Ray cluster, or start a cluster on this machine.

    Return a function that disconnects from the cluster. If this process is already connected, nothing changes, and the
    returned function does nothing.

    Args:
        ray: The module ``ray``.
        address: The address of the cluster; None to start a cluster on this machine.
        workers: Number of cores of a new cluster; None for all cores of this machine.
    """
    if ray.is_initialized():
        return lambda: None
    # Set the level here, because the argument logging_level of ray.init takes effect only after Ray's first log
    # messages.
    logging.getLogger("ray").setLevel(logging.ERROR)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address:
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError) as error:
            raise SpecError(
                ADDRESS,
                (
                    f"is not the address of a reachable Ray cluster: {_last_line(error)}. Check the address, "
                    f"or unset {ADDRESS}."
                ),
                address,
            ) from error
    else:
        ray.init(address="local", num_cpus=workers, include_dashboard=False, **quiet)
    leave: Callable[[], None] = ray.shutdown
    return leave
