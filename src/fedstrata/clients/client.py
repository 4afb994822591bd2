"""A client: its data, its state, and the answers it gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstrata.clients.context import ClientContext
from fedstrata.errors import FedstrataError
from fedstrata.federation.engine import Failure
from fedstrata.federation.messages import ClientId, Reply, Request, Weights
from fedstrata.nn.batchnorm import ReduceGroup
from fedstrata.nn.model import Model
from fedstrata.records import Tree
from fedstrata.rng import rng

T = TypeVar("T")


class Client:
    """One client while it answers one request; made when asked, gone afterwards.

    Args:
        number: Its number.
        context: What it shares with the others of this process.
        state: What it kept from earlier requests. Handlers replace entries and never change a value in place, so that
            an answer that does not count leaves no trace.
        group: Those that answer the same request at the same time, for ``all_reduce_sum``; None for none.
        model: A model of its own when it runs beside others.
    """

    def __init__(
        self,
        number: ClientId,
        context: ClientContext,
        state: Mapping[str, Tree] | None = None,
        group: ReduceGroup | None = None,
        model: Model | None = None,
    ) -> None:
        self.number, self.context, self.group = number, context, group
        self._before: Mapping[str, Tree] = state or {}
        self.state: dict[str, Tree] = dict(self._before)
        self.model = model or context.config.model
        self.indices: NDArray[np.int64] = context.assignment[number]

    def __len__(self) -> int:
        return len(self.indices)

    def changed(self) -> bool:
        """Whether an entry of the state was replaced, added or removed."""
        state, before = self.state, self._before
        return len(state) != len(before) or any(key not in state or state[key] is not before[key] for key in before)

    @property
    def labels(self) -> NDArray[np.int64]:
        """Its labels, shape (n_k,)."""
        found: NDArray[np.int64] = self.context.data.y_train.numpy()[self.indices]
        return found

    def samples(self, chosen: NDArray[np.int64] | slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Inputs and labels of some of its samples, by their place among its own."""
        where = torch.from_numpy(self.indices[chosen])
        return self.context.data.inputs(where), self.context.data.y_train[where]

    def rng(self, purpose: str, round: int) -> np.random.Generator:
        """A fresh generator of its own."""
        return rng(self.context.config.seed, purpose, round, self.number)


R = TypeVar("R", bound=Request)
Handler = Callable[[Client, Any], Reply]
FusedHandler = Callable[[Mapping[ClientId, Client], Mapping[ClientId, Any]], Reply]
Carrier = Callable[[Client, Any, Weights], tuple[Weights, Reply]]


class RelayHandler(Protocol):
    """What carries a relay of one kind of task through a process in which all its clients live.

    See ``fedstrata.federation.federation.RelaySession``; an exception in ``hop`` is that client's failure.
    """

    def hop(self, client: Client, task: Any) -> Reply:
        """Take up one client's part."""

    def keep(self, accepted: bool) -> None:
        """Whether the last part counts."""

    def arrive(self) -> tuple[Weights, list[Reply | Failure]]:
        """The model after all parts that count, and their replies."""


RelayHandlerFactory = Callable[[ClientContext, Weights], RelayHandler]

HANDLERS: dict[type[Request], Handler] = {}
"""What was declared with ``answers``."""
CARRIERS: dict[type[Request], Carrier] = {}
"""What was declared with ``carries``."""
_FUSED: dict[type[Request], FusedHandler] = {}
_REPLIES: dict[type[Request], type[Reply]] = {}
_CARRIAGES: dict[type[Request], RelayHandlerFactory] = {}


def answers(kind: type[R]) -> Callable[[Callable[[Client, R], Reply]], Callable[[Client, R], Reply]]:
    """Declare how a client answers a kind of request."""

    def declare(handler: Callable[[Client, R], Reply]) -> Callable[[Client, R], Reply]:
        HANDLERS[kind] = handler
        return handler

    return declare


def answers_fused(kind: type[R]) -> Callable[[FusedHandler], FusedHandler]:
    """Declare how the sum of many clients' answers is computed in one pass."""

    def declare(handler: FusedHandler) -> FusedHandler:
        _FUSED[kind] = handler
        return handler

    return declare


def carries(kind: type[R]) -> Callable[[Carrier], Carrier]:
    """Declare what a client does with the travelling model of a relay."""

    def declare(handler: Carrier) -> Carrier:
        CARRIERS[kind] = handler
        return handler

    return declare


def carries_fused(kind: type[R]) -> Callable[[RelayHandlerFactory], RelayHandlerFactory]:
    """Declare how a whole relay is computed in one pass."""

    def declare(maker: RelayHandlerFactory) -> RelayHandlerFactory:
        _CARRIAGES[kind] = maker
        return maker

    return declare


def handler_of(kind: type[Request]) -> Handler:
    """The handler for a kind of request."""
    if kind not in HANDLERS:
        raise FedstrataError(f"clients do not know how to answer {kind.__name__}: declare it with @answers")
    return HANDLERS[kind]


def reply_kind(kind: type[Request]) -> type[Reply]:
    """What the handler of a request declares to return; ``Reply`` where it declares nothing more."""
    if kind not in _REPLIES:
        _REPLIES[kind] = _declared_reply(kind)
    return _REPLIES[kind]


def _declared_reply(kind: type[Request]) -> type[Reply]:
    handler: Callable[..., Any] | None = HANDLERS.get(kind) or CARRIERS.get(kind)
    try:
        declared = get_type_hints(handler).get("return") if handler else None
    except NameError:  # an annotation that only a type checker can read
        declared = None
    declared = get_args(declared)[-1] if get_origin(declared) is tuple else declared
    return declared if isinstance(declared, type) and issubclass(declared, Reply) else Reply


def fused_handler_of(kind: type[Request]) -> FusedHandler | None:
    """The handler for the sum of a kind of request, if there is one."""
    return _FUSED.get(kind)


def carrier_of(kind: type[Request]) -> Carrier:
    """The handler for a hop of a relay."""
    if kind not in CARRIERS:
        raise FedstrataError(f"clients do not know how to carry {kind.__name__}: declare it with @carries")
    return CARRIERS[kind]


def relay_handler_of(kind: type[Request]) -> RelayHandlerFactory | None:
    """What carries a whole relay of a kind of task in one pass, if there is anything."""
    return _CARRIAGES.get(kind)
