"""Signals: a process that is told to end ends, wherever the signal reaches it."""

from __future__ import annotations

import os
import signal
import sys
import time
import weakref

import pytest

from fedstrata.base.signals import Terminated, ending_in_order

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no SIGTERM")


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


@pytest.mark.parametrize("work", [end_one, end_a_watched_one, tell_to_end])
def test_sigterm_ends_the_work_also_where_python_ignores_exceptions(work):
    def work_on() -> None:
        work()
        until = time.monotonic() + 10
        while time.monotonic() < until:
            pass

    with pytest.raises(Terminated), ending_in_order():
        work_on()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


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
