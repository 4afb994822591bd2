"""The local engine: all clients in this process, one after another."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from fedstrata.clients import answers, reserving  # noqa: F401  they declare how clients answer
from fedstrata.clients.client import Client, World, carrier_of, fused_handler_of, handler_of
from fedstrata.clients.store import StateStore
from fedstrata.federation.messages import ClientId, Reply, Request, Weights
from fedstrata.federation.seam import Failure
from fedstrata.nn.batchnorm import GroupBrokenError, LocalGroup
from fedstrata.nn.model import Model


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


def failure(error: Exception) -> Failure:
    """An exception of a client's, with the place where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return Failure(f"{type(error).__name__}: {error}{where}", error)
