"""The conformance suite of engines as a federated method, so that it runs in the process of a real server."""

from __future__ import annotations

import importlib
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from probes import TAKES, Meet, Probe, Probes, Walk

from fedstrata.federation.federation import Federation

PATIENCE = 10.0
"""The seconds that a site has for an answer; fewer than the time for which a client hangs."""


class Drill(Probes):
    """A method whose round is one case of the suite; the round's record contains the outcome.

    Args:
        case: The name of the case; see ``cases``.
    """

    case: str

    def run_round(self, federation: Federation, state: Any) -> tuple[Any, dict[str, Any]]:
        try:
            cases()[self.case](federation)
        except Exception:
            return state, {"outcome": traceback.format_exc()}
        return state, {"outcome": "passed"}


def cases() -> dict[str, Callable[[Federation], None]]:
    """Return the cases of the suite that need only a federation, and the cases below, which need sites."""
    suite = importlib.import_module("test_conformance")
    found: dict[str, Callable[[Federation], None]] = {}
    for test in (value for name, value in vars(suite).items() if name.startswith("test_")):
        for label, arguments in _parameters(test):
            names = set(test.__code__.co_varnames[: test.__code__.co_argcount])
            if names == {"federation", *arguments}:
                found[test.__name__ + label] = lambda federation, test=test, arguments=arguments: test(
                    federation, **arguments
                )
    own = (hung_asked, hung_in_a_sum, hung_in_a_group, hung_on_a_way)
    own += (garbled_asked, garbled_in_a_group, garbled_on_a_way, beyond_one_message)
    return found | {case.__name__: case for case in own}


def _parameters(test: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the id and the values of each case in a test's mark ``parametrize``, of which it has at most one."""
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    if not marks:
        yield "", {}
        return
    (mark,) = marks
    names, values = mark.args
    names = [names] if isinstance(names, str) else list(names)
    for value in values:
        row = value if len(names) > 1 else (value,)
        yield f"[{'-'.join(map(str, row))}]", dict(zip(names, row, strict=True))


def _suite() -> Any:
    return importlib.import_module("test_conformance")


def _recovered() -> None:
    """Wait until a client that hung answers again."""
    time.sleep(TAKES["hang"])


# One site has the clients 0 and 1, the other the clients 2 and 3.
LATE = f"it did not answer within {PATIENCE:g} s"


def _lost(federation: Federation, reason: str, *clients: int) -> None:
    assert federation.log.failed == set(clients), federation.events
    assert all(reason in event["reason"] for event in federation.events), federation.events


def hung_asked(federation: Federation) -> None:
    """A late answer is dropped."""
    times, everybody = _suite().times, _suite().ALL
    assert times(federation, Probe()) == everybody
    assert times(federation, Probe(culprits=(1,), how="hang")) == {2: 2, 3: 2}
    _lost(federation, LATE, 0, 1)
    _recovered()
    assert times(federation, Probe()) == {0: 2, 1: 2, 2: 3, 3: 3}


def hung_in_a_sum(federation: Federation) -> None:
    summed = federation.ask_sum(range(4), Probe(culprits=(2,), how="hang"))
    assert (summed.clients, summed.reply.times) == ([0, 1], 2)
    _lost(federation, LATE, 2, 3)
    _recovered()
    assert _suite().times(federation, Probe()) == {0: 2, 1: 2, 2: 1, 3: 1}


def hung_in_a_group(federation: Federation) -> None:
    """The other clients of the group answer in time that the sum failed."""
    times, everybody = _suite().times, _suite().ALL
    assert times(federation, Meet(), together=True) == everybody
    assert times(federation, Meet(culprits=(1,), how="hang"), together=True) == {}
    _lost(federation, LATE, 0, 1)
    _recovered()
    assert times(federation, Meet(), together=True) == dict.fromkeys(range(4), 2)


def hung_on_a_way(federation: Federation) -> None:
    """The relay continues with the model after the last hop that counted, although the hanging site has it."""
    bad = Walk(culprits=(1,), how="hang")
    assert _suite().walked(federation, [(0, bad), (1, bad), (2, bad), (3, bad)]) == (3.0, {0: 1, 2: 1, 3: 1})
    _lost(federation, LATE, 1)
    _recovered()
    assert _suite().walked(federation, [(1, Walk()), (0, Walk())]) == (2.0, {0: 1, 1: 2})


def garbled_asked(federation: Federation) -> None:
    """If a site's message cannot be read, the answers of all its clients are lost."""
    times, everybody = _suite().times, _suite().ALL
    assert times(federation, Probe(culprits=(2,), how="garble")) == everybody
    assert times(federation, Probe()) == {0: 2, 1: 2}
    assert federation.log.failed == {2, 3}, federation.events
    assert times(federation, Probe()) == {0: 3, 1: 3, 2: 2, 3: 2}


def garbled_in_a_group(federation: Federation) -> None:
    """If a part of a sum or an answer cannot be read, the group fails without waiting."""
    times, everybody = _suite().times, _suite().ALL
    assert times(federation, Probe(culprits=(2,), how="garble")) == everybody
    assert times(federation, Meet(), together=True) == {}
    assert federation.log.failed == {2, 3}, federation.events
    assert not any(LATE in event["reason"] for event in federation.events), federation.events
    assert times(federation, Meet(), together=True) == dict.fromkeys(everybody, 2)


def garbled_on_a_way(federation: Federation) -> None:
    assert _suite().times(federation, Probe(culprits=(2,), how="garble")) == _suite().ALL
    assert _suite().walked(federation, [(2, Walk()), (3, Walk()), (0, Walk())]) == (2.0, {1: 2, 2: 2})
    assert federation.log.failed == {2}, federation.events
    assert _suite().times(federation, Probe()) == {0: 3, 1: 2, 2: 2, 3: 3}


def beyond_one_message(federation: Federation) -> None:
    """Two answers of 140 MiB each arrive, although a message can contain only 256 MiB."""
    size = 35 << 20
    replies = federation.ask((0, 1), Probe(size=size))
    assert {client: len(reply.values) for client, reply in replies.items()} == {0: size, 1: size}


class Deaths(Probes):
    """A method in which four sites with one client each die one after another, at different points of an exchange."""

    def run_round(self, federation: Federation, state: Any) -> tuple[Any, dict[str, Any]]:
        found: dict[str, Any] = {}
        for point in (self.asked, self.in_a_group, self.on_a_way):
            try:
                point(federation)
                found[point.__name__] = "passed"
            except Exception:
                found[point.__name__] = traceback.format_exc()
        return state, found

    def asked(self, federation: Federation) -> None:
        assert _suite().times(federation, Probe()) == _suite().ALL
        assert _suite().times(federation, Probe(culprits=(3,), how="die")) == {0: 2, 1: 2, 2: 2}
        assert federation.log.failed == {3}, federation.events

    def in_a_group(self, federation: Federation) -> None:
        assert _suite().times(federation, Meet(culprits=(2,), how="die"), [0, 1, 2], together=True) == {}
        assert federation.log.failed == {2, 3}, federation.events
        assert _suite().times(federation, Meet(), [0, 1], together=True) == {0: 3, 1: 3}

    def on_a_way(self, federation: Federation) -> None:
        bad = Walk(culprits=(1,), how="die")
        assert _suite().walked(federation, [(0, bad), (1, bad), (0, bad)]) == (2.0, {0: 4, 2: 5})
        assert federation.log.failed == {1, 2, 3}, federation.events
        assert _suite().times(federation, Probe()) == {0: 6}
