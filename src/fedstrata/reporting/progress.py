"""Progress of long work, for terminals, notebooks and logs."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from fedstrata.reporting.summary import percent
from fedstrata.reporting.tables import MISSING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


LINE_EVERY = 10.0
"""Seconds between two lines of a log. Short work writes none."""

DRAW_EVERY = 0.25
"""Seconds between two updates in a notebook."""


@dataclass
class _Task:
    """The progress of a task, now and when it was first shown."""

    done: int
    total: int
    note: str
    visible: bool
    began: float
    first: int

    def remaining(self, now: float) -> str:
        """Estimate the remaining time; an empty text before the first part is done, and at the end."""
        new = self.done - self.first
        if new < 1 or self.done >= self.total:
            return ""
        time_left = timedelta(seconds=round((now - self.began) / new * (self.total - self.done)))
        return f"{time_left} left"


class Progress:
    """The progress of tasks, shown during a ``with`` block.

    It is a bar in a terminal, on standard error, and in a notebook. In a log it is at most a line every ten seconds.

    Args:
        quiet: Whether to show nothing.
        console: Another console to write to.
        clock: The function that returns the time in seconds.

    >>> with Progress(quiet=True) as progress:
    ...     progress.show("audit", 0, 4, "round 9 again")
    """

    def __init__(
        self, quiet: bool = False, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.quiet, self._console, self._clock = quiet, console, clock
        self._bars: Bars | None = None
        """The bars of a terminal."""
        self._ids: dict[str, TaskID] = {}
        self._tasks: dict[str, _Task] = {}
        self._handle: Any = None
        """The display of a notebook."""
        self._shown_at = 0.0

    def __enter__(self) -> Self:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        self._console = console = self._console or Console(stderr=True)
        self._shown_at = self._clock()
        if self.quiet:
            return self
        if console.is_jupyter:
            from IPython.display import display

            self._handle = display(self._html(), display_id=True)
        elif console.is_terminal:
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
        if self._handle is not None:
            self._handle.update(self._html())
            self._handle = None
        self.quiet = True

    def show(self, task: str, done: int, total: int, note: str = "", *, visible: bool = True) -> None:
        """Show the progress of a task; the first call creates its bar.

        Args:
            task: Its name.
            done: The number of parts that are done.
            total: The number of all parts.
            note: The text beside the bar.
            visible: Whether its bar is shown.
        """
        if self.quiet or self._console is None:
            return
        if self._bars is not None:
            if task not in self._ids:  # parts that were done before do not count for the remaining time
                self._ids[task] = self._bars.add_task(task, completed=done, total=total, note=note, visible=visible)
            self._bars.update(self._ids[task], completed=done, total=total, note=note, visible=visible)
            return
        now = self._clock()
        before = self._tasks.get(task)
        began, first = (now, done) if before is None else (before.began, before.first)
        self._tasks[task] = _Task(done, total, note, visible, began, first)
        if now - self._shown_at < (LINE_EVERY if self._handle is None else DRAW_EVERY):
            return
        self._shown_at = now
        if self._handle is not None:
            self._handle.update(self._html())
        else:
            # Only the first task is written, which is the whole; others are its parts.
            name, whole = next(iter(self._tasks.items()))
            parts = [f"{whole.done}/{whole.total}", whole.note, whole.remaining(now)]
            text = f"{name}: {' '.join(filter(None, parts))}"
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _html(self) -> object:
        """Return the display of a notebook: a row per task."""
        from IPython.display import HTML

        rows = [
            f'<tr><td style="text-align:left">{html.escape(name)}</td>'
            f'<td><progress value="{task.done}" max="{task.total}"></progress></td>'
            f'<td style="text-align:left">{task.done}/{task.total} {html.escape(task.note)}</td>'
            f"<td>{task.remaining(self._clock())}</td></tr>"
            for name, task in self._tasks.items()
            if task.visible
        ]
        return HTML(f"<table>{''.join(rows)}</table>" if rows else "")

    def of_run(self, label: str, rounds: int, done: int = 0) -> Callable[[Mapping[str, Any]], None]:
        """Show a bar for the rounds of a run.

        Args:
            label: The name of the run.
            rounds: The number of rounds of the whole run.
            done: The number of rounds before the run was resumed.

        Returns:
            The function to call with the record of every round.
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
        """Show a bar for all rounds of a comparison, and one for each current run.

        Args:
            rounds: The number of rounds of every run, by label and seed.

        Returns:
            The function to call with a label, a seed and the number of rounds that this run has done.
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
