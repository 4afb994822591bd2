"""Which function answers which kind of request.

A function is marked with the kind of request that it answers, and ``Handlers`` is a visible list of such functions:
``runs.simulation.HANDLERS`` for what comes with fedstrata, ``Method.handlers`` for a method of the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from fedstrata.base.errors import FedstrataError
from fedstrata.clients.client import Client
from fedstrata.clients.context import ClientContext
from fedstrata.federation.engine import Failure
from fedstrata.federation.messages import ClientId, Reply, Request, Weights

R = TypeVar("R", bound=Request)
F = TypeVar("F", bound=Callable[..., Any])
Handler = Callable[[Client, Any], Reply]
SumHandler = Callable[[Mapping[ClientId, Client], Mapping[ClientId, Any]], Reply]
HopHandler = Callable[[Client, Any, Weights], tuple[Weights, Reply]]


class RelayHandler(Protocol):
    """What computes a relay of one kind of task in a process in which all its clients live.

    See ``fedstrata.federation.engine.RelaySession``; an exception in ``hop`` is that client's failure.
    """

    def hop(self, client: Client, task: Any) -> Reply:
        """Take up one client's part."""

    def keep(self, accepted: bool) -> None:
        """Whether the last part counts."""

    def finish(self) -> tuple[Weights, list[Reply | Failure]]:
        """The model after all parts that count, and their replies."""


RelayHandlerFactory = Callable[[ClientContext, Weights], RelayHandler]

_MARK = "_answers"


def handles(kind: type[R]) -> Callable[[Callable[[Client, R], Reply]], Callable[[Client, R], Reply]]:
    """Mark how a client answers a kind of request."""
    return _marking(kind, "alone")


def handles_sum(kind: type[Request]) -> Callable[[SumHandler], SumHandler]:
    """Mark how the sum of many clients' answers is computed in one pass."""
    return _marking(kind, "sum")


def handles_hop(kind: type[Request]) -> Callable[[HopHandler], HopHandler]:
    """Mark what a client does with the travelling model of a relay."""
    return _marking(kind, "hop")


def handles_relay(kind: type[Request]) -> Callable[[F], F]:
    """Mark what computes a whole relay in one pass: a ``RelayHandlerFactory``."""
    return _marking(kind, "relay")


def _marking(kind: type[Request], way: str) -> Callable[[F], F]:
    def mark(function: F) -> F:
        setattr(function, _MARK, (kind, way))
        return function

    return mark


class Handlers:
    """What clients know to answer.

    Args:
        functions: Each marked with one of the decorators above; a later one takes the place of an earlier one.

    >>> Handlers([]).alone(Request)
    Traceback (most recent call last):
    fedstrata.base.errors.FedstrataError: clients do not know how to answer Request: name its handler in Method.handlers
    """

    def __init__(self, functions: Iterable[Callable[..., Any]]) -> None:
        self._functions = tuple(functions)
        self._table: dict[tuple[type[Request], str], Any] = {}
        for function in self._functions:
            if not hasattr(function, _MARK):
                raise FedstrataError(f"{function} does not say what it answers: mark it with @handles(…)")
            self._table[getattr(function, _MARK)] = function

    def __add__(self, functions: Iterable[Callable[..., Any]]) -> Handlers:
        return Handlers([*self._functions, *functions])

    def __reduce__(self) -> Any:
        return Handlers, (self._functions,)

    def alone(self, kind: type[Request]) -> Handler:
        """How a client answers for itself.

        Raises:
            FedstrataError: Nobody said how.
        """
        handler: Handler | None = self._table.get((kind, "alone"))
        if handler is None:
            raise _unknown(kind, "answer")
        return handler

    def hop(self, kind: type[Request]) -> HopHandler:
        """What a client does in a relay.

        Raises:
            FedstrataError: Nobody said what.
        """
        handler: HopHandler | None = self._table.get((kind, "hop"))
        if handler is None:
            raise _unknown(kind, "pass on")
        return handler

    def sum(self, kind: type[Request]) -> SumHandler | None:
        """The sum of all answers in one pass, if there is such a handler."""
        return self._table.get((kind, "sum"))

    def relay(self, kind: type[Request]) -> RelayHandlerFactory | None:
        """A whole relay in one pass, if there is such a handler."""
        return self._table.get((kind, "relay"))


def _unknown(kind: type[Request], verb: str) -> FedstrataError:
    return FedstrataError(f"clients do not know how to {verb} {kind.__name__}: name its handler in Method.handlers")
