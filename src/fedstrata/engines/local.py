"""The local engine: all clients in this process, one after another."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from torch.nn.modules.dropout import _DropoutNd

from fedstrata.clients import answers, masking, reserving, stepping, tandem, visiting  # noqa: F401  how clients answer
from fedstrata.clients.client import (
    Carriage,
    Client,
    World,
    carriage_maker_of,
    carrier_of,
    fused_handler_of,
    handler_of,
)
from fedstrata.clients.store import StateStore
from fedstrata.errors import SpecError
from fedstrata.federation.messages import ClientId, Reply, Request, Weights
from fedstrata.federation.seam import Failure
from fedstrata.nn.batchnorm import GroupBrokenError, LocalGroup
from fedstrata.nn.model import Model
from fedstrata.records import Tree


class LocalEngine:
    """Clients are made when asked and gone afterwards; only their states stay.

    Args:
        world: Data, assignment, model and settings that they share.
        store: Their states.
    """

    def __init__(self, world: World, store: StateStore) -> None:
        self.world, self.store = world, store
        self._pending: dict[ClientId, Client] = {}
        self._models: list[Model] = []

    def ask(self, requests: Mapping[ClientId, Request], *, together: bool) -> Mapping[ClientId, Reply | Failure]:
        """The clients' answers, computed in client order; ``together``, in one thread each."""
        if together:
            return self._ask_group(requests)
        self._pending = {}
        outcomes: dict[ClientId, Reply | Failure] = {}
        for number in sorted(requests):
            client = self._client(number)
            request = requests[number]
            handler = handler_of(type(request))
            try:
                outcomes[number] = handler(client, request)
            except Exception as error:
                outcomes[number] = failure(error)
        return outcomes

    def ask_fused(self, requests: Mapping[ClientId, Request]) -> Reply | None:
        """The sum in one pass where there is a handler for it and it succeeds."""
        kinds = {type(request) for request in requests.values()}
        handler = fused_handler_of(next(iter(kinds))) if len(kinds) == 1 else None
        if handler is None:
            return None
        self._pending = {}
        try:
            return handler({number: self._client(number) for number in sorted(requests)}, requests)
        except Exception:
            # Whose fault it is shows when the clients are asked one by one.
            return None

    def hop(self, client: ClientId, task: Request, cargo: Weights) -> tuple[Weights, Reply] | Failure:
        """One client works on the travelling model."""
        self._pending = {}
        try:
            return carrier_of(type(task))(self._client(client), task, cargo)
        except Exception as error:
            return failure(error)

    def ride(self, kind: type[Request], cargo: Weights) -> LocalRide | None:
        """A relay in one pass where there is something that carries it."""
        maker = carriage_maker_of(kind)
        return None if maker is None else LocalRide(self, maker(self.world, cargo))

    def settle(self, accepted: Iterable[ClientId]) -> None:
        """Keep what the accepted clients changed in their state."""
        for number in accepted:
            if number in self._pending and self._pending[number].changed():
                self.store.put(number, self._pending[number].state)
        self._pending = {}

    def close(self) -> None:
        """Remove states that went to disk."""
        self.store.close()

    def _client(self, number: ClientId) -> Client:
        client = self._pending[number] = Client(number, self.world, self.store.get(number))
        return client

    def _ask_group(self, requests: Mapping[ClientId, Request]) -> Mapping[ClientId, Reply | Failure]:
        """All clients at once, so that they can add up tensors in the middle of a pass."""
        if random := [m for m in self.world.job.model.module.modules() if isinstance(m, _DropoutNd) and m.p > 0]:
            # Threads share PyTorch's generator: who draws first would be a matter of chance.
            problem = f"{random[0]} draws random numbers, which clients that run at the same time cannot do repeatably"
            raise SpecError("model", problem + "; set its p to 0, or use training.execution = 'fused' with Stratify")
        self._pending = {}
        numbers = sorted(requests)
        while len(self._models) < len(numbers):
            self._models.append(self.world.job.model.clone())
        group = LocalGroup(len(numbers))
        for place, number in enumerate(numbers):
            client = self._client(number)
            client.group, client.model = group.member(place), self._models[place]

        def answer(number: ClientId) -> Reply | Failure:
            try:
                return handler_of(type(requests[number]))(self._pending[number], requests[number])
            except GroupBrokenError as error:
                return Failure(str(error), bystander=True)
            except Exception as error:
                group.abort(f"client {number} failed")
                return failure(error)

        with ThreadPoolExecutor(max_workers=len(numbers)) as pool:
            return dict(zip(numbers, pool.map(answer, numbers), strict=True))


class LocalRide:
    """A relay through this process; see ``fedstrata.federation.seam.Ride``.

    Args:
        engine: Where its clients live.
        carriage: What carries it.
    """

    def __init__(self, engine: LocalEngine, carriage: Carriage) -> None:
        self._engine, self._carriage = engine, carriage
        self._states: dict[ClientId, Mapping[str, Tree]] = {}
        self._last: Client | None = None
        self._riders: list[ClientId] = []

    def hop(self, client: ClientId, task: Request) -> Reply | Failure:
        """One client's part."""
        # States go back to the store at the end: it measures what it is given, and a client comes by many times.
        if client not in self._states:
            self._states[client] = self._engine.store.get(client)
        self._last = Client(client, self._engine.world, self._states[client])
        try:
            return self._carriage.hop(self._last, task)
        except Exception as error:
            return failure(error)

    def keep(self, accepted: bool) -> None:
        """Let the last part and its client's new state count, or neither."""
        self._carriage.keep(accepted)
        if accepted and self._last is not None:
            self._states[self._last.number] = self._last.state
            self._riders.append(self._last.number)

    def arrive(self) -> tuple[Weights, list[Reply | Failure]]:
        """The end of the relay."""
        weights, outcomes = self._carriage.arrive()
        # A part that turns out at the end not to count takes its client's whole state of this ride with it.
        bad = {rider for rider, outcome in zip(self._riders, outcomes, strict=True) if isinstance(outcome, Failure)}
        for client, state in self._states.items():
            if client not in bad and state is not self._engine.store.get(client):
                self._engine.store.put(client, state)
        return weights, outcomes


def failure(error: Exception) -> Failure:
    """An exception of a client's, with the place where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return Failure(f"{type(error).__name__}: {error}{where}", error)
