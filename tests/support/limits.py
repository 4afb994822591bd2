"""Run a function with a time limit, so that a test fails and does not hang if the function does not end."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, work: Callable[[], T]) -> T:
    """Return ``work()``, or fail if it takes longer; ``seconds`` are many, to find only endless waits."""
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
