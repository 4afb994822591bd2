"""What the terminal shows while several runs go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedstrata.report.progress import Bar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, TaskID


class CompareProgress(Bar):
    """A bar for all rounds of a comparison and one for each run that has begun.

    Args:
        rounds: Rounds of every run, by label and seed.
        quiet: Show nothing at all.
        console: Another place to write to.
    """

    def __init__(
        self, rounds: Mapping[tuple[str, int], int], quiet: bool = False, *, console: Console | None = None
    ) -> None:
        super().__init__(quiet, console)
        self.rounds = dict(rounds)
        self._done = dict.fromkeys(self.rounds, 0)
        self._tasks: dict[tuple[str, int], TaskID] = {}
        self._total: TaskID | None = None

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

    def _columns(self) -> Sequence[ProgressColumn]:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

        return (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("rounds"),
            TimeRemainingColumn(compact=True),
        )

    def _begin(self, progress: Progress) -> None:
        self._total = progress.add_task(f"{len(self.rounds)} runs", total=sum(self.rounds.values()))
