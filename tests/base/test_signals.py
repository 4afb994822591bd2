"""Signals: a process that is told to end ends, wherever the signal reaches it."""

from __future__ import annotations

import os
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from fedstrata.base.signals import Terminated, ending_in_order

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no SIGTERM")


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    """Give SIGTERM its default handler: Ray, once started in this process, ends the process on SIGTERM."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def tell_to_end(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class TellsAtItsEnd:
    def __del__(self) -> None:
        tell_to_end()


class Watched:
    pass


def end_one() -> None:
    TellsAtItsEnd()


def end_a_watched_one() -> None:
    watched = Watched()
    callback = weakref.ref(watched, tell_to_end)
    del watched
    assert callback() is None


def work_on(work: Callable[[], object]) -> None:
    work()
    until = time.monotonic() + 10
    while time.monotonic() < until:
        pass


@pytest.mark.parametrize("work", [end_one, end_a_watched_one, tell_to_end])
def test_sigterm_ends_the_work_also_where_python_ignores_exceptions(work):
    with pytest.raises(Terminated), ending_in_order():
        work_on(work)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_sigterm_that_comes_while_an_ignored_exception_is_reported_is_not_lost(monkeypatch):
    """Python ignores what the hook raises, too: the process then went on, deaf to SIGTERM."""

    class Fails:
        def __del__(self) -> None:
            raise ValueError("of a test")

    monkeypatch.setattr(sys, "unraisablehook", tell_to_end)
    with pytest.raises(Terminated), ending_in_order():
        work_on(Fails)


def test_a_second_sigterm_does_not_interrupt_what_cleans_up():
    cleaned_up = []

    def end_twice() -> None:
        try:
            tell_to_end()
        finally:
            tell_to_end()
            cleaned_up.append(True)

    with pytest.raises(Terminated), ending_in_order():
        end_twice()
    assert cleaned_up


def test_other_exceptions_that_python_ignores_are_reported_as_usual(monkeypatch):
    class Fails:
        def __del__(self) -> None:
            raise ValueError("of a test")

    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: reported.append(str(unraisable.exc_value)))
    usual = sys.unraisablehook
    with ending_in_order():
        Fails()
    assert reported == ["of a test"]
    assert sys.unraisablehook is usual
