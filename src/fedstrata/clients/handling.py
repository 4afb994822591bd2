"""Mark and find handlers, the functions with which clients answer requests.

A decorator marks a function with the Python class of the requests that the function answers. ``Handlers`` collects
marked functions. The list ``fedstrata.runs.simulation.HANDLERS`` contains fedstrata's handlers. ``Method.handlers``
contains the handlers of a user's own method.
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
    """An object that computes a whole relay, in which a model travels from client to client.

    The turn of a client is called a hop. The class ``fedstrata.federation.engine.RelaySession`` has the same methods.
    """

    def hop(self, client: Client, task: Any) -> Reply:
        """Let a client change the model, and return the client's reply.

        If this method raises an exception, the hop has failed.
        """

    def keep(self, accepted: bool) -> None:
        """Keep the model of the latest hop if ``accepted`` is true; otherwise restore the model from before the hop."""

    def finish(self) -> tuple[Weights, list[Reply | Failure]]:
        """Return the final model, and a list with the outcome of each accepted hop: its reply, or a later failure."""


RelayHandlerFactory = Callable[[ClientContext, Weights], RelayHandler]

_MARK = "_answers"


def handles(kind: type[R]) -> Callable[[Callable[[Client, R], Reply]], Callable[[Client, R], Reply]]:
    """Mark the function with which a client answers requests of the Python class ``kind``."""
    return _marking(kind, "alone")


def handles_sum(kind: type[Request]) -> Callable[[SumHandler], SumHandler]:
    """Mark a function that computes the sum of several clients' replies to requests of the Python class ``kind``."""
    return _marking(kind, "sum")


def handles_hop(kind: type[Request]) -> Callable[[HopHandler], HopHandler]:
    """Mark the function that computes a client's hop in a relay whose tasks have the Python class ``kind``.

    The function changes the model that travels between clients.
    """
    return _marking(kind, "hop")


def handles_relay(kind: type[Request]) -> Callable[[F], F]:
    """Mark a function that creates a ``RelayHandler`` for each relay whose tasks have the Python class ``kind``."""
    return _marking(kind, "relay")


def _marking(kind: type[Request], way: str) -> Callable[[F], F]:
    def mark(function: F) -> F:
        setattr(function, _MARK, (kind, way))
        return function

    return mark


class Handlers:
    """Mappings from Python classes of requests to the functions with which clients answer these requests.

    Args:
        functions: Functions that are marked with a decorator, such as ``handles``. If several functions have the same
            decorator for the same class, the last function is used.

    >>> Handlers([]).alone[Request]
    Traceback (most recent call last):
    fedstrata.base.errors.FedstrataError: clients cannot answer Request. Add a handler for it to Method.handlers.
    """

    def __init__(self, functions: Iterable[Callable[..., Any]]) -> None:
        self._functions = tuple(functions)
        self.alone: dict[type[Request], Handler] = _Required("answer")
        """The functions with which a single client answers a request."""
        self.hop: dict[type[Request], HopHandler] = _Required("pass on")
        """The functions with which a client changes the model that travels from client to client in a relay."""
        self.sum: dict[type[Request], SumHandler] = {}
        """The functions that compute the sum of several clients' replies, but not the single replies."""
        self.relay: dict[type[Request], RelayHandlerFactory] = {}
        """The functions that create a ``RelayHandler``, which computes a whole relay."""
        for function in self._functions:
            if not hasattr(function, _MARK):
                raise FedstrataError(f"{function} is not marked as a handler. Mark the function with @handles(…).")
            kind, table = getattr(function, _MARK)
            getattr(self, table)[kind] = function

    def __add__(self, functions: Iterable[Callable[..., Any]]) -> Handlers:
        return Handlers([*self._functions, *functions])

    def __reduce__(self) -> Any:
        return Handlers, (self._functions,)


class _Required(dict[type[Request], Any]):
    """A mapping that raises ``FedstrataError`` for a Python class that is not a key of the mapping."""

    def __init__(self, verb: str) -> None:
        super().__init__()
        self._verb = verb

    def __missing__(self, kind: type[Request]) -> Any:
        problem = f"clients cannot {self._verb} {kind.__name__}. Add a handler for it to Method.handlers."
        raise FedstrataError(problem)
