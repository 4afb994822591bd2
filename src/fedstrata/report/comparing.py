"""What the terminal shows while several runs go on."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


class CompareProgress:
    """A bar for all rounds of a comparison and one for each run that has begun, on standard error.

    Args:
        rounds: Rounds of every run, by label and seed.
        quiet: Show nothing; nor is anything shown where standard error is no terminal.
        console: Another place to write to.
    """

    def __init__(
        self, rounds: Mapping[tuple[str, int], int], quiet: bool = False, *, console: Console | None = None
    ) -> None:
        self.rounds, self.quiet, self._console = dict(rounds), quiet, console
        self._done = dict.fromkeys(self.rounds, 0)
        self._progress: Progress | None = None
        self._tasks: dict[tuple[str, int], TaskID] = {}
        self._total: TaskID | None = None

    def __enter__(self) -> CompareProgress:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = self._console or Console(stderr=True)
        if not self.quiet and console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("rounds"),
                TimeRemainingColumn(compact=True),
                console=console,
                refresh_per_second=4,
            )
            self._progress.start()
            self._total = self._progress.add_task(f"{len(self.rounds)} runs", total=sum(self.rounds.values()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, label: str, seed: int, done: int) -> None:
        """Show how far one run has come."""
        from rich.markup import escape

        key = (label, seed)
        self._done[key] = done
        if self._progress is None or self._total is None:
            return
        self._progress.update(self._total, completed=sum(self._done.values()))
        if key not in self._tasks and done > 0:
            name = f"  {escape(label)}, seed {seed}"
            self._tasks[key] = self._progress.add_task(name, total=self.rounds[key])
        if key in self._tasks:
            finished = done >= self.rounds[key]
            self._progress.update(self._tasks[key], completed=done, visible=not finished)
