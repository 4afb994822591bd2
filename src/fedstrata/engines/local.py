"""The local engine, which runs all clients in this process and in its worker processes."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Thread

from fedstrata.base.errors import FedstrataError, SpecError, WithheldError
from fedstrata.base.processes import can_fork
from fedstrata.base.records import Tree
from fedstrata.clients.client import Client, ClientContext, StateStore
from fedstrata.clients.handling import RelayHandler
from fedstrata.clients.training.devices import CPU, on_device
from fedstrata.engines.worker_pool import Answer, LocalWorkerPool, State
from fedstrata.federation.engine import Engine, Failure, FederationConfig, RelaySession
from fedstrata.federation.messages import ClientId, Reply, Request, Requests, Weights
from fedstrata.models.batchnorm import GroupBrokenError, LocalGroup
from fedstrata.models.model import Model

STARTING_PAYS, ASKING_PAYS = 0.2, 0.01
"""The minimum work, in seconds, that justifies starting worker processes, or using workers that have already started.

To decide whether to start workers, the engine also counts work that this process has already done without workers. For
0.05 seconds of work, two processes are 1.1 times as fast as one process. With more work, two processes are up to twice
as fast.
"""

PATIENCE, SLOWEST = 600.0, 10.0
"""A group of clients counts as stuck after ``PATIENCE`` + ``SLOWEST`` · n seconds without progress, where n is the
number of per-sample gradients that the group computes in a round.
"""

GRACE = 5.0
"""The maximum number of seconds to wait until the threads of an interrupted group have ended."""


class LocalEngine(Engine):
    """An engine that creates a new client object for each request, and then keeps only the client's state.

    If the requests require enough work, worker processes compute some of the replies. The result does not depend on
    which process computes a reply, because clients are independent of each other and replies are sorted.

    Args:
        context: The data, the assignment of samples, the model and the settings that all clients share.
        store: The clients' states.
        workers: Maximum number of processes that compute at the same time, including this process.

    Raises:
        SpecError: This machine does not have the device that ``training.device`` names.
    """

    def __init__(self, context: ClientContext, store: StateStore, workers: int = 1) -> None:
        self.context, self.store = context, store
        device = context.cached(on_device).device
        self._pending: dict[ClientId, Client] = {}
        self._models: list[Model] = []
        # If this process uses a GPU or several threads per operation, do not fork, because the new process could hang.
        forks = context.config.training.threads == 1 and device == CPU and can_fork()
        self._helpers = workers - 1 if forks else 0
        self._pool: LocalWorkerPool | None = None
        self._seconds_per_unit: dict[type[Request], float] = {}
        """For each Python class of requests, the measured seconds per unit of work; see ``ask`` for the unit."""
        self._seconds_alone = 0.0
        """Seconds of work that this process has done since the engine was created."""

    def ask(
        self, requests: Mapping[ClientId, Request], *, together: bool, group: LocalGroup | None = None
    ) -> Mapping[ClientId, Reply | Failure]:
        """Return the clients' replies. If ``together`` is true, each client runs in its own thread.

        Args:
            requests: See ``Engine.ask``.
            together: See ``Engine.ask``.
            group: The group for ``all_reduce_sum``. The group's members 0, 1, … are the clients in ascending order.
                Default: a new group.
        """
        if together:
            return self._ask_group(requests, group)
        self._pending = {}
        outcomes: dict[ClientId, Reply | Failure] = {}
        # The work of a client is its number of per-sample gradients, plus 1 for the request.
        gradients = requests.work if isinstance(requests, Requests) else {}
        work = {number: 1.0 + gradients.get(number, 0.0) for number in requests}
        # Clients with the most work come first, so that a process does not begin a long task when the other processes
        # are nearly done.
        order = sorted(requests, key=lambda number: (-work[number], number)) if self._helpers else sorted(requests)
        remaining = sum(work.values())

        def run_locally(number: ClientId) -> None:
            nonlocal remaining
            request, began = requests[number], time.perf_counter()
            client, handler = self._client(number), self.context.handlers.alone[type(request)]
            try:
                outcomes[number] = handler(client, request)
            except Exception as error:
                outcomes[number] = failure(error)
            seconds = time.perf_counter() - began
            self._seconds_per_unit[type(request)] = seconds / work[number]
            self._seconds_alone += seconds
            remaining -= work[number]

        # Whether this process computes all remaining replies. If they need no gradients (each has the work 1), sending
        # the clients' states to workers would take longer than computing the replies here.
        local_only = not self._helpers or remaining <= len(work)
        for index, number in enumerate(order):
            if not local_only and len(order) - index > 1:
                seconds = remaining * self._seconds_per_unit.get(type(requests[number]), 0.0)
                if seconds > ASKING_PAYS and (self._pool is not None or seconds + self._seconds_alone > STARTING_PAYS):
                    local_only = True
                    self._ask_pool(order[index:], requests, outcomes, run_locally)
            # Compute the reply in this process if workers have not computed it. If a client failed in a worker, its
            # reply is computed again, so that its exception is recorded here.
            if number not in outcomes:
                run_locally(number)
        return {number: outcomes[number] for number in sorted(outcomes)}

    def n_contributing(self, number: ClientId) -> int:
        """Return the number of samples that contributed to a client's latest reply; 0 if the number is unknown.

        The number is known only between the reply and ``commit``. The handler must also have run in this process, and
        must have called ``authorize_release``.
        """
        client = self._pending.get(number)
        return 0 if client is None else client.n_contributing

    def _patience(self, numbers: Iterable[ClientId]) -> float:
        """Return the number of seconds without progress after which a group counts as stuck.

        In this time, all clients of the group can train for a round, one after another.
        """
        work = self.context.config.training.sample_gradients
        return PATIENCE + SLOWEST * sum(work(int(self.context.assignment.sizes[number])) for number in numbers)

    def _ask_pool(
        self,
        order: Sequence[ClientId],
        requests: Mapping[ClientId, Request],
        outcomes: dict[ClientId, Reply | Failure],
        run_locally: Callable[[ClientId], None],
    ) -> None:
        """Compute clients' replies, in the workers and in this process, and add the replies to ``outcomes``.

        The replies of clients that failed in a worker are not added.

        Args:
            order: The clients, in the order in which the computation of their replies begins.
            requests: The request to each client.
            outcomes: The mapping to which this method adds replies.
            run_locally: A function that computes a client's reply in this process, and adds the reply to ``outcomes``.
        """
        if self._pool is None:
            try:
                self._pool = LocalWorkerPool(self._helpers, self._answer)
            except OSError:
                self._helpers = 0
                return
        states = {number: state for number in order if (state := self.store.get(number))}
        for number, answer in self._pool.ask(order, requests, states, run_locally).items():
            outcomes[number] = answer.reply
            if answer.state is not None:
                self._client(number).state = dict(answer.state)

    def _answer(self, number: ClientId, request: Request, state: State) -> Answer:
        """Compute a client's reply and its new state in a worker process."""
        client = Client(number, self.context, state)
        reply = self.context.handlers.alone[type(request)](client, request)
        return Answer(reply, client.state if client.changed() else None)

    def ask_sum(self, requests: Mapping[ClientId, Request]) -> Reply | None:
        """Return the sum of the replies if a handler can compute it for all clients at once, and otherwise None."""
        kinds = {type(request) for request in requests.values()}
        handler = self.context.handlers.sum.get(next(iter(kinds))) if len(kinds) == 1 else None
        if handler is None:
            return None
        self._pending = {}
        try:
            return handler({number: self._client(number) for number in sorted(requests)}, requests)
        except Exception:
            return None  # the federation then sends each request separately, and so finds the client that fails

    def hop(self, client: ClientId, task: Request, weights: Weights) -> tuple[Weights, Reply] | Failure:
        """Let one client train the model in a relay."""
        self._pending = {}
        try:
            return self.context.handlers.hop[type(task)](self._client(client), task, weights)
        except Exception as error:
            return failure(error)

    def relay(self, kind: type[Request], weights: Weights) -> RelaySession:
        """Begin a relay, in which clients train the same model one after another.

        If ``kind`` has a handler for whole relays, this handler computes the relay.
        """
        factory = self.context.handlers.relay.get(kind) if self.context.config.training.execution == "fused" else None
        if factory is None:
            return super().relay(kind, weights)
        return LocalRelaySession(self, factory(self.context, weights))

    def commit(self, accepted: Iterable[ClientId]) -> None:
        """Store the changed states of the clients whose replies were accepted."""
        for number in accepted:
            if number in self._pending and self._pending[number].changed():
                self.store.put(number, self._pending[number].state)
        self._pending = {}

    def close(self) -> None:
        """Stop the worker processes, and delete the clients' states on the disk."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        self.store.close()

    def _client(self, number: ClientId) -> Client:
        state = self.store.get(number) if number in self.store.clients else None
        client = self._pending[number] = Client(number, self.context, state)
        return client

    def _ask_group(
        self, requests: Mapping[ClientId, Request], group: LocalGroup | None
    ) -> Mapping[ClientId, Reply | Failure]:
        """Run all clients at the same time, so that they can add up tensors while they compute their replies."""
        refuse_random(self.context.config)
        self._pending = {}
        numbers = sorted(requests)
        # Take the models out of ``self._models`` until all threads have ended. A stuck thread may still use its model,
        # so the next group must not get this model.
        models, self._models = self._models, []
        while len(models) < len(numbers):
            models.append(self.context.config.model.clone())
        # Sums do not need a timeout. If a client fails or ends, the clients that wait for it get an error.
        # ``_run_group`` stops a group that is stuck.
        group = LocalGroup(len(numbers), timeout=None) if group is None else group
        outcomes: dict[ClientId, Reply | Failure] = {}

        def answer(member: int, client: Client) -> None:
            number, request = client.number, requests[client.number]
            try:
                outcomes[number] = self.context.handlers.alone[type(request)](client, request)
            except GroupBrokenError as error:
                outcomes[number] = Failure(str(error), bystander=True)
            except BaseException as error:
                group.abort(f"client {number} failed")
                outcomes[number] = failure(error)
            finally:
                group.leave(member)

        threads = {}
        for member, number in enumerate(numbers):
            client = self._client(number)
            client.group, client.model = group.member(member), models[member]
            threads[number] = Thread(target=answer, args=(member, client), daemon=True)
        _run_group(threads, group, self._patience(numbers))
        self._models = models
        return {number: outcomes[number] for number in numbers}


class LocalRelaySession:
    """A relay that a single handler computes in this process for all clients; see ``RelaySession``.

    Args:
        engine: The engine that runs the clients.
        handler: The handler that computes the relay.
    """

    def __init__(self, engine: LocalEngine, handler: RelayHandler) -> None:
        self._engine, self._handler = engine, handler
        self._states: dict[ClientId, Mapping[str, Tree]] = {}
        self._last: Client | None = None
        self._counted: list[ClientId] = []

    def hop(self, client: ClientId, task: Request) -> Reply | Failure:
        """Let one client change the model."""
        # Keep the states here until the end, because a client may have many hops, and storing a state takes time.
        if client not in self._states:
            self._states[client] = self._engine.store.get(client)
        self._last = Client(client, self._engine.context, self._states[client])
        try:
            return self._handler.hop(self._last, task)
        except Exception as error:
            return failure(error)

    def keep(self, accepted: bool) -> None:
        """Accept or reject the result of the latest hop: the model and the client's new state."""
        self._handler.keep(accepted)
        if accepted and self._last is not None:
            self._states[self._last.number] = self._last.state
            self._counted.append(self._last.number)

    def finish(self) -> tuple[Weights, list[Reply | Failure]]:
        """End the relay, and store the new states of the clients that did not fail."""
        weights, outcomes = self._handler.finish()
        failed = {
            client for client, outcome in zip(self._counted, outcomes, strict=True) if isinstance(outcome, Failure)
        }
        for client, state in self._states.items():
            if client not in failed and state is not self._engine.store.get(client):
                self._engine.store.put(client, state)
        return weights, outcomes


def refuse_random(config: FederationConfig) -> None:
    """Raise an error if a model draws random numbers, because clients in parallel threads would share one generator.

    Raises:
        SpecError: The model's forward pass draws random numbers.
    """
    if config.random:
        problem = "the model draws random numbers, so results are not reproducible when clients train in parallel. Use "
        problem += "a model that does not draw random numbers (for example, set p = 0 in nn.Dropout). For Stratify, "
        problem += "training.execution = 'fused' also works."
        raise SpecError("model", problem)


def _run_group(threads: Mapping[ClientId, Thread], group: LocalGroup, patience: float) -> None:
    """Run all members of a group in threads, and wait until all threads have ended.

    Args:
        threads: The thread of each client, in the order of the members.
        group: The group.
        patience: If the group makes no progress for this number of seconds, the group counts as stuck, as in an endless
            loop. Progress is a completed sum or the end of a thread. A stuck group makes the whole run fail; otherwise,
            results would depend on the clock.

    Raises:
        FedstrataError: The group is stuck.
    """
    for thread in threads.values():
        thread.start()
    last_progress: object = None
    waited = 0.0
    try:
        while alive := {client: thread for client, thread in threads.items() if thread.is_alive()}:
            # Measure the waiting time in steps of a second, so that it excludes time in which the process or the
            # machine sleeps.
            next(iter(alive.values())).join(1.0)
            progress = (group.progress, list(alive))
            last_progress, waited = progress, 0.0 if progress != last_progress else waited + 1.0
            if waited > patience:
                waiting = group.progress[1]
                stuck = [client for member, client in enumerate(threads) if client in alive and member not in waiting]
                problem = "neither finished nor contributed to a sum. Look for an endless loop in your code."
                raise FedstrataError(f"in the last {patience:g} s, clients {', '.join(map(str, stuck))} {problem}")
    except BaseException:
        group.abort("it was interrupted")
        deadline = time.monotonic() + GRACE
        for thread in threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        raise


def failure(error: BaseException) -> Failure:
    """Convert a client's exception to a ``Failure``, with the line of code that raised the exception."""
    if isinstance(error, WithheldError):
        return Failure(str(error), refused=True)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return Failure(f"{type(error).__name__}: {error}{where}", error)
