"""A pool that runs tasks in this process, for tests of what a command does with the outcomes of a pool."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

KILLED = "was killed by SIGKILL"


class HerePool:
    """Runs tasks one after another in this process, in place of ``TaskPool``.

    Attributes:
        kills: The keys of tasks that do not run, as if their processes had been killed.
    """

    kills: set[Hashable] = set()

    def __init__(self, jobs: int, fork: bool) -> None:
        self.jobs, self.fork = jobs, fork

    def __enter__(self) -> HerePool:
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing, because there are no processes."""

    def run(self, tasks: Iterable[tuple[Any, Callable[[], object]]], watch: Callable[[], None]) -> Iterator[Any]:
        for key, task in tasks:
            if key not in self.kills:
                task()
            watch()
            yield key, KILLED if key in self.kills else ""
