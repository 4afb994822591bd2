"""The local engine: all clients on this machine, one after another or beside each other in a few processes."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Thread

from fedstrata.base.errors import FedstrataError, SpecError, WithheldError
from fedstrata.base.processes import can_fork
from fedstrata.base.records import Tree
from fedstrata.clients.client import Client
from fedstrata.clients.context import ClientContext
from fedstrata.clients.handling import RelayHandler
from fedstrata.clients.store import StateStore
from fedstrata.clients.training.devices import CPU, placed
from fedstrata.engines.worker_pool import Answer, LocalWorkerPool, State
from fedstrata.federation.engine import Engine, Failure, FederationConfig, RelaySession
from fedstrata.federation.messages import ClientId, Reply, Request, Requests, Weights
from fedstrata.models.batchnorm import GroupBrokenError, LocalGroup
from fedstrata.models.model import Model

STARTING_PAYS, ASKING_PAYS = 0.2, 0.01
"""Seconds of work beyond which worker processes are started, and beyond which those that there are get some of it.

Two processes do 0.05 seconds of work 1.1 times as fast as one, and more work up to twice as fast.
"""

PATIENCE, SLOWEST = 600.0, 10.0
"""Seconds in which a group has to get on by a step whatever it does, and besides for each sample-gradient of all."""

GRACE = 5.0
"""Seconds for the members of a group that is interrupted to end."""


class LocalEngine(Engine):
    """Clients are made when asked and gone afterwards; only their states stay.

    Where the work of a question is worth it, worker processes share in it. Clients are independent of each other and
    replies are sorted, so that the result is the same bits whoever computed them.

    Args:
        context: Data, assignment, model and settings that they share.
        store: Their states.
        workers: Processes that may work at once, this one among them.

    Raises:
        SpecError: There is no such device as the settings name.
    """

    def __init__(self, context: ClientContext, store: StateStore, workers: int = 1) -> None:
        self.context, self.store = context, store
        device = context.once(placed).device
        self._pending: dict[ClientId, Client] = {}
        self._models: list[Model] = []
        # A fork of a process whose operations use several threads, or a GPU, could hang.
        alone = context.config.training.threads != 1 or device != CPU or not can_fork()
        self._helpers = 0 if alone else workers - 1
        self._pool: LocalWorkerPool | None = None
        self._seconds_per_unit: dict[type[Request], float] = {}
        """By kind of request, as measured here."""

    def ask(
        self, requests: Mapping[ClientId, Request], *, together: bool, group: LocalGroup | None = None
    ) -> Mapping[ClientId, Reply | Failure]:
        """The clients' answers, computed in client order; ``together``, in one thread each.

        Args:
            requests: See ``Engine.ask``.
            together: See ``Engine.ask``.
            group: The group in which they answer, member after member; one of their own unless given.
        """
        if together:
            return self._ask_group(requests, group)
        self._pending = {}
        outcomes: dict[ClientId, Reply | Failure] = {}
        taken = requests.work if isinstance(requests, Requests) else {}
        work = {number: 1.0 + taken.get(number, 0.0) for number in requests}
        # The longest first, so that nobody is left with a long one at the end.
        order = sorted(requests, key=lambda number: (-work[number], number)) if self._helpers else sorted(requests)
        left = sum(work.values())

        def run_locally(number: ClientId) -> None:
            nonlocal left
            request, began = requests[number], time.perf_counter()
            client, handler = self._client(number), self.context.handlers.alone(type(request))
            try:
                outcomes[number] = handler(client, request)
            except Exception as error:
                outcomes[number] = failure(error)
            self._seconds_per_unit[type(request)] = (time.perf_counter() - began) / work[number]
            left -= work[number]

        # What takes no gradients goes through clients' states at most: sharing these would cost more.
        asked = not self._helpers or left <= len(work)
        for place, number in enumerate(order):
            if not asked and len(order) - place > 1:
                seconds = left * self._seconds_per_unit.get(type(requests[number]), 0.0)
                if seconds > (STARTING_PAYS if self._pool is None else ASKING_PAYS):
                    asked = True
                    self._ask_pool(order[place:], requests, outcomes, run_locally)
            # After the workers, those whom nobody answered for: what went wrong there can be seen here.
            if number not in outcomes:
                run_locally(number)
        return {number: outcomes[number] for number in sorted(outcomes)}

    def behind(self, number: ClientId) -> int:
        """Samples behind the last answer of a client, as its handler said; 0 where it did not."""
        client = self._pending.get(number)
        return 0 if client is None else client.behind

    def _patience(self, numbers: Iterable[ClientId]) -> float:
        """Seconds in which a group must get on by a step: by what local training takes, whatever is asked."""
        work = self.context.config.training.sample_gradients
        return PATIENCE + SLOWEST * sum(work(int(self.context.assignment.sizes[number])) for number in numbers)

    def _ask_pool(
        self,
        order: Sequence[ClientId],
        requests: Mapping[ClientId, Request],
        outcomes: dict[ClientId, Reply | Failure],
        run_locally: Callable[[ClientId], None],
    ) -> None:
        """Let workers and this process answer, each when it is free; some answers may be missing afterwards."""
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
        """What a worker process does for a client."""
        client = Client(number, self.context, state)
        reply = self.context.handlers.alone(type(request))(client, request)
        return Answer(reply, client.state if client.changed() else None)

    def ask_sum(self, requests: Mapping[ClientId, Request]) -> Reply | None:
        """The sum in one pass where there is a handler for it and it succeeds."""
        kinds = {type(request) for request in requests.values()}
        handler = self.context.handlers.sum(next(iter(kinds))) if len(kinds) == 1 else None
        if handler is None:
            return None
        self._pending = {}
        try:
            return handler({number: self._client(number) for number in sorted(requests)}, requests)
        except Exception:
            # Whose fault it is shows when the clients are asked one by one.
            return None

    def hop(self, client: ClientId, task: Request, weights: Weights) -> tuple[Weights, Reply] | Failure:
        """One client works on the travelling model."""
        self._pending = {}
        try:
            return self.context.handlers.hop(type(task))(self._client(client), task, weights)
        except Exception as error:
            return failure(error)

    def relay(self, kind: type[Request], weights: Weights) -> RelaySession:
        """A relay in one pass where there is something that computes it."""
        maker = self.context.handlers.relay(kind) if self.context.config.training.execution == "fused" else None
        return super().relay(kind, weights) if maker is None else LocalRelaySession(self, maker(self.context, weights))

    def commit(self, accepted: Iterable[ClientId]) -> None:
        """Keep what the accepted clients changed in their state."""
        for number in accepted:
            if number in self._pending and self._pending[number].changed():
                self.store.put(number, self._pending[number].state)
        self._pending = {}

    def close(self) -> None:
        """End worker processes and remove states that went to disk."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        self.store.close()

    def _client(self, number: ClientId) -> Client:
        client = self._pending[number] = Client(number, self.context, self.store.get(number))
        return client

    def _ask_group(
        self, requests: Mapping[ClientId, Request], group: LocalGroup | None
    ) -> Mapping[ClientId, Reply | Failure]:
        """All clients at once, so that they can add up tensors in the middle of a pass."""
        refuse_random(self.context.config)
        self._pending = {}
        numbers = sorted(requests)
        # Given back when all have ended: a thread that was left behind keeps its own.
        models, self._models = self._models, []
        while len(models) < len(numbers):
            models.append(self.context.config.model.clone())
        # Who fails or ends tells the others, so that nobody needs to look at the clock.
        group = LocalGroup(len(numbers), timeout=None) if group is None else group
        outcomes: dict[ClientId, Reply | Failure] = {}

        def answer(place: int, client: Client) -> None:
            number, request = client.number, requests[client.number]
            try:
                outcomes[number] = self.context.handlers.alone(type(request))(client, request)
            except GroupBrokenError as error:
                outcomes[number] = Failure(str(error), bystander=True)
            except BaseException as error:
                group.abort(f"client {number} failed")
                outcomes[number] = failure(error)
            finally:
                group.leave(place)

        threads = {}
        for place, number in enumerate(numbers):
            client = self._client(number)
            client.group, client.model = group.member(place), models[place]
            threads[number] = Thread(target=answer, args=(place, client), daemon=True)
        _run_group(threads, group, self._patience(numbers))
        self._models = models
        return {number: outcomes[number] for number in numbers}


class LocalRelaySession:
    """A relay through this process; see ``RelaySession``.

    Args:
        engine: Where its clients live.
        handler: What computes it.
    """

    def __init__(self, engine: LocalEngine, handler: RelayHandler) -> None:
        self._engine, self._handler = engine, handler
        self._states: dict[ClientId, Mapping[str, Tree]] = {}
        self._last: Client | None = None
        self._counted: list[ClientId] = []

    def hop(self, client: ClientId, task: Request) -> Reply | Failure:
        """One client's part."""
        # States go back to the store at the end: it measures what it is given, and a client comes by many times.
        if client not in self._states:
            self._states[client] = self._engine.store.get(client)
        self._last = Client(client, self._engine.context, self._states[client])
        try:
            return self._handler.hop(self._last, task)
        except Exception as error:
            return failure(error)

    def keep(self, accepted: bool) -> None:
        """Let the last part and its client's new state count, or neither."""
        self._handler.keep(accepted)
        if accepted and self._last is not None:
            self._states[self._last.number] = self._last.state
            self._counted.append(self._last.number)

    def finish(self) -> tuple[Weights, list[Reply | Failure]]:
        """The end of the relay."""
        weights, outcomes = self._handler.finish()
        # A part that turns out at the end not to count takes its client's whole state of this relay with it.
        bad = {client for client, outcome in zip(self._counted, outcomes, strict=True) if isinstance(outcome, Failure)}
        for client, state in self._states.items():
            if client not in bad and state is not self._engine.store.get(client):
                self._engine.store.put(client, state)
        return weights, outcomes


def refuse_random(config: FederationConfig) -> None:
    """Refuse a model that draws random numbers where clients run at the same time.

    Raises:
        SpecError: Its forward pass does.
    """
    if config.random:
        # Threads share PyTorch's generator: who draws first would be a matter of chance.
        problem = "draws random numbers, which clients that run at the same time cannot do repeatably; turn that off "
        raise SpecError("model", problem + "(nn.Dropout: p = 0), or use training.execution = 'fused' with Stratify")


def _run_group(threads: Mapping[ClientId, Thread], group: LocalGroup, patience: float) -> None:
    """Run the members of a group, a thread each, until all have ended.

    Args:
        threads: By client, in the order of the members.
        group: Theirs.
        patience: Seconds in which no sum is completed and nobody ends, and after which nothing will: an endless loop in
            what a client computes. The run fails then, so that no result depends on the clock.

    Raises:
        FedstrataError: There was no more patience.
    """
    for thread in threads.values():
        thread.start()
    before: object = None
    waited = 0.0
    try:
        while alive := {client: thread for client, thread in threads.items() if thread.is_alive()}:
            # Second by second, so that the time in which this process, or the machine, is asleep does not count.
            next(iter(alive.values())).join(1.0)
            now = (group.progress, list(alive))
            before, waited = now, 0.0 if now != before else waited + 1.0
            if waited > patience:
                waiting = group.progress[1]
                stuck = [client for place, client in enumerate(threads) if client in alive and place not in waiting]
                problem = "neither ended nor came to the next sum of their group: an endless loop?"
                raise FedstrataError(f"for {patience:g} s clients {', '.join(map(str, stuck))} {problem}")
    except BaseException:
        group.abort("it was interrupted")
        until = time.monotonic() + GRACE
        for thread in threads.values():
            thread.join(max(0.0, until - time.monotonic()))
        raise


def failure(error: BaseException) -> Failure:
    """An exception of a client's, with the place where it was raised; where it withholds its answer, only why."""
    if isinstance(error, WithheldError):
        return Failure(str(error), refused=True)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return Failure(f"{type(error).__name__}: {error}{where}", error)
