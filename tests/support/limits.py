"""Work that must end, so that a test of it fails and does not hang where it does not."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, work: Callable[[], T]) -> T:
    """What ``work()`` returns or raises, if it ends in that time; generous, for only an endless wait is meant."""
    results: list[T] = []
    errors: list[BaseException] = []

    def try_it() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=try_it, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    assert results, f"not at an end after {seconds:g} s"
    return results[0]
