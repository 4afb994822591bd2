"""What the terminal shows while something long goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from fedstrata.report.summary import percent
from fedstrata.report.tables import MISSING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


class Progress:
    """A bar for each task, on standard error for the time of a ``with`` block; nothing where that is no terminal.

    Args:
        quiet: Show nothing at all.
        console: Another place to write to.

    >>> with Progress(quiet=True) as progress:
    ...     progress.show("audit", 0, 4, "round 9 again")
    """

    def __init__(self, quiet: bool = False, console: Console | None = None) -> None:
        self.quiet, self._console = quiet, console
        self._bars: Bars | None = None
        """None where nothing is shown."""
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        console = self._console or Console(stderr=True)
        if not self.quiet and console.is_terminal:
            self._bars = Bars(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                TimeRemainingColumn(compact=True, elapsed_when_finished=True),
                console=console,
                refresh_per_second=4,
            )
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def show(self, task: str, done: int, total: int, note: str = "", *, visible: bool = True) -> None:
        """Show how far a task has come; its bar is made when it is first heard of.

        Args:
            task: Its name.
            done: Parts that are done.
            total: All parts.
            note: What to say beside the bar.
            visible: Whether its bar is shown.
        """
        if self._bars is None:
            return
        if task not in self._tasks:  # Parts done before are not progress: they say nothing about the time left.
            self._tasks[task] = self._bars.add_task(task, completed=done, total=total, note=note, visible=visible)
        self._bars.update(self._tasks[task], completed=done, total=total, note=note, visible=visible)

    def of_run(self, label: str, rounds: int, done: int = 0) -> Callable[[Mapping[str, Any]], None]:
        """A bar for the rounds of a run.

        Args:
            label: What runs.
            rounds: Rounds of the whole run.
            done: Rounds done before, where a run is resumed.

        Returns:
            What to call with the record of every round.
        """
        last: float | None = None
        best: float | None = None

        def watch(record: Mapping[str, Any]) -> None:
            nonlocal last, best
            if (accuracy := record.get("accuracy")) is not None:
                last, best = accuracy, max(accuracy, best or 0.0)
            present, asked = (record.get(f"clients_{word}", MISSING) for word in ("returned", "invited"))
            others = record.get("test", {}).items()
            more = "".join(f" {name} {value:.3f}" for name, value in others if name != "accuracy" and value is not None)
            note = f"accuracy {percent(last, 1)} (best {percent(best, 1)}){more} clients {present}/{asked}"
            self.show(label, record["round"], rounds, note)

        watch({"round": done})
        return watch

    def of_runs(self, rounds: Mapping[tuple[str, int], int]) -> Callable[[str, int, int], None]:
        """A bar for all rounds of a comparison, and one for each run that is going on.

        Args:
            rounds: Rounds of every run, by label and seed.

        Returns:
            What to call with a label, a seed and the rounds that this run has done.
        """
        finished = dict.fromkeys(rounds, 0)
        task, total = f"{len(rounds)} runs", sum(rounds.values())

        def watch(label: str, seed: int, done: int) -> None:
            finished[label, seed] = done
            self.show(task, sum(finished.values()), total, "rounds")
            if done > 0:
                all_of_it = rounds[label, seed]
                self.show(f"  {label}, seed {seed}", done, all_of_it, "rounds", visible=done < all_of_it)

        self.show(task, 0, total, "rounds")
        return watch
