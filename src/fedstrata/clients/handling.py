"""Handlers: the functions with which clients answer requests.

A decorator marks a function with the kind of request that it answers, and ``Handlers`` is a table of such functions.
Those of fedstrata are listed in ``runs.simulation.HANDLERS``, those of a user's method in ``Method.handlers``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from fedstrata.base.errors import FedstrataError
from fedstrata.clients.client import Client, ClientContext
from fedstrata.federation.engine import Failure
from fedstrata.federation.messages import ClientId, Reply, Request, Weights

R = TypeVar("R", bound=Request)
F = TypeVar("F", bound=Callable[..., Any])
Handler = Callable[[Client, Any], Reply]
SumHandler = Callable[[Mapping[ClientId, Client], Mapping[ClientId, Any]], Reply]
HopHandler = Callable[[Client, Any, Weights], tuple[Weights, Reply]]


class RelayHandler(Protocol):
    """A relay of one kind of task, computed in a process that runs all its clients.

    See ``fedstrata.federation.engine.RelaySession``. An exception in ``hop`` is a failure of that client.
    """

    def hop(self, client: Client, task: Any) -> Reply:
        """Let one client do its part."""

    def keep(self, accepted: bool) -> None:
        """Accept or reject the last part."""

    def finish(self) -> tuple[Weights, list[Reply | Failure]]:
        """Return the model after all accepted parts, and the reply or failure of each."""


RelayHandlerFactory = Callable[[ClientContext, Weights], RelayHandler]

_MARK = "_answers"


def handles(kind: type[R]) -> Callable[[Callable[[Client, R], Reply]], Callable[[Client, R], Reply]]:
    """Mark a function with which a client answers a kind of request."""
    return _marking(kind, "alone")


def handles_sum(kind: type[Request]) -> Callable[[SumHandler], SumHandler]:
    """Mark a function that computes the sum of several clients' answers in one pass."""
    return _marking(kind, "sum")


def handles_hop(kind: type[Request]) -> Callable[[HopHandler], HopHandler]:
    """Mark a function with which a client works on the travelling model of a relay."""
    return _marking(kind, "hop")


def handles_relay(kind: type[Request]) -> Callable[[F], F]:
    """Mark a ``RelayHandlerFactory``, which computes a whole relay in one pass."""
    return _marking(kind, "relay")


def _marking(kind: type[Request], way: str) -> Callable[[F], F]:
    def mark(function: F) -> F:
        setattr(function, _MARK, (kind, way))
        return function

    return mark


class Handlers:
    """Tables of the functions with which clients answer requests, by the kind of request.

    Args:
        functions: Functions with one of the decorators above. A later function replaces an earlier one for the same
            kind of request.

    >>> Handlers([]).alone[Request]
    Traceback (most recent call last):
    fedstrata.base.errors.FedstrataError: clients do not know how to answer Request: name its handler in Method.handlers
    """

    def __init__(self, functions: Iterable[Callable[..., Any]]) -> None:
        self._functions = tuple(functions)
        self.alone: dict[type[Request], Handler] = _Required("answer")
        """Functions with which one client answers."""
        self.hop: dict[type[Request], HopHandler] = _Required("pass on")
        """Functions with which one client works on a travelling model."""
        self.sum: dict[type[Request], SumHandler] = {}
        """Functions that compute the sum of all answers in one pass."""
        self.relay: dict[type[Request], RelayHandlerFactory] = {}
        """Functions that start a relay which is computed in one pass."""
        for function in self._functions:
            if not hasattr(function, _MARK):
                raise FedstrataError(f"{function} does not say what it answers: mark it with @handles(…)")
            kind, table = getattr(function, _MARK)
            getattr(self, table)[kind] = function

    def __add__(self, functions: Iterable[Callable[..., Any]]) -> Handlers:
        return Handlers([*self._functions, *functions])

    def __reduce__(self) -> Any:
        return Handlers, (self._functions,)


class _Required(dict[type[Request], Any]):
    """A table in which every request that is looked up must have a handler."""

    def __init__(self, verb: str) -> None:
        super().__init__()
        self._verb = verb

    def __missing__(self, kind: type[Request]) -> Any:
        problem = f"clients do not know how to {self._verb} {kind.__name__}: name its handler in Method.handlers"
        raise FedstrataError(problem)
