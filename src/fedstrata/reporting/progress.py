"""Progress of long work, for terminals, notebooks and logs."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from fedstrata.base.printable import printable
from fedstrata.reporting.summary import percent
from fedstrata.reporting.tables import MISSING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import Task, TaskID


LINE_EVERY = 10.0
"""Seconds between two lines of a log. Work that takes less time does not write a line."""

DRAW_EVERY = 0.25
"""Seconds between two updates in a notebook."""


def _remaining(task: Task, now: float) -> str:
    """Estimate the remaining time of a task as text; empty before its first step is done, and after its last one."""
    done, total = task.completed, task.total or 0
    new = done - task.fields["first"]
    if new < 1 or done >= total:
        return ""
    return f"{timedelta(seconds=round((now - task.fields['began']) / new * (total - done)))} left"


class Progress:
    """The progress of tasks, shown during a ``with`` block.

    In a terminal (on standard error) and in a notebook, each task has a bar. In a log, a line is written at most every
    ten seconds.

    Args:
        quiet: Whether to hide all progress.
        console: The console to write to. Default: standard error.
        clock: A function that returns the time in seconds.

    >>> with Progress(quiet=True) as progress:
    ...     progress.show("audit", 0, 4, "round 9 again")
    """

    def __init__(
        self, quiet: bool = False, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.quiet, self._console, self._clock = quiet, console, clock
        self._bars: Bars | None = None
        """The tasks and their progress. Rich draws them as bars only in a terminal."""
        self._ids: dict[str, TaskID] = {}
        self._handle: Any = None
        """The handle with which the output in a notebook is updated; None elsewhere."""
        self._shown_at = 0.0

    def __enter__(self) -> Self:
        if self.quiet:
            return self
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        self._console = console = self._console or Console(stderr=True)
        self._shown_at = self._clock()
        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=console,
            refresh_per_second=4,
            get_time=self._clock,
        )
        if console.is_jupyter:
            from IPython.display import display

            self._handle = display(self._html(self._bars), display_id=True)
        elif console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            if self._handle is not None:
                self._handle.update(self._html(self._bars))
            elif self._bars.live.is_started:
                self._bars.stop()
        self._bars = self._handle = None

    def show(self, task: str, done: int, total: int, note: str = "", *, visible: bool = True) -> None:
        """Show the progress of a task; the first call creates its bar.

        Args:
            task: The name of the task.
            done: The number of the task's steps that are done.
            total: The number of all its steps.
            note: The text beside the bar.
            visible: Whether the bar is shown.
        """
        bars, now = self._bars, self._clock()
        if bars is None or self._console is None:
            return
        task, note = printable(task), printable(note)
        if task not in self._ids:  # the remaining time is estimated without parts that were done before this call
            begin: dict[str, Any] = {"first": done, "began": now}
            self._ids[task] = bars.add_task(task, completed=done, total=total, note=note, visible=visible, **begin)
        bars.update(self._ids[task], completed=done, total=total, note=note, visible=visible)
        if bars.live.is_started or now - self._shown_at < (LINE_EVERY if self._handle is None else DRAW_EVERY):
            return
        self._shown_at = now
        if self._handle is not None:
            self._handle.update(self._html(bars))
        else:
            # Only the first task is written to a log. Other tasks are parts of it.
            whole = bars.tasks[0]
            parts = [f"{whole.completed}/{whole.total}", whole.fields["note"], _remaining(whole, now)]
            text = f"{whole.description}: {' '.join(filter(None, parts))}"
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _html(self, bars: Bars) -> object:
        """Return the HTML for a notebook: a table with a row per visible task."""
        from IPython.display import HTML

        rows = [
            f'<tr><td style="text-align:left">{html.escape(task.description)}</td>'
            f'<td><progress value="{task.completed}" max="{task.total}"></progress></td>'
            f'<td style="text-align:left">{task.completed}/{task.total} {html.escape(task.fields["note"])}</td>'
            f"<td>{_remaining(task, self._clock())}</td></tr>"
            for task in bars.tasks
            if task.visible
        ]
        return HTML(f"<table>{''.join(rows)}</table>" if rows else "")

    def of_run(self, label: str, rounds: int, done: int = 0) -> Callable[[Mapping[str, Any]], None]:
        """Show a bar for the rounds of a run.

        Args:
            label: The name of the run.
            rounds: The number of rounds of the whole run.
            done: The number of rounds that were done before the run was resumed.

        Returns:
            A function to call with the record of every round.
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
        """Show a bar for all rounds of a comparison, and one for each run that is going on.

        Args:
            rounds: A mapping from the label and seed of every run to its number of rounds.

        Returns:
            A function to call with a label, a seed and the number of rounds that this run has done.
        """
        finished = dict.fromkeys(rounds, 0)
        task, total = f"{len(rounds)} runs", sum(rounds.values())

        def watch(label: str, seed: int, done: int) -> None:
            finished[label, seed] = done
            self.show(task, sum(finished.values()), total, "rounds")
            if done > 0:
                of_run = rounds[label, seed]
                self.show(f"  {label}, seed {seed}", done, of_run, "rounds", visible=done < of_run)

        self.show(task, 0, total, "rounds")
        return watch
