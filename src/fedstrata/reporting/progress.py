"""What a terminal, a notebook or a log shows while something long goes on."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from fedstrata.reporting.summary import percent
from fedstrata.reporting.tables import MISSING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


LINE_EVERY = 10.0
"""Seconds between two lines where there is neither a terminal nor a notebook: short work says nothing."""

DRAW_EVERY = 0.25
"""Seconds between two pictures in a notebook."""


@dataclass
class _Task:
    """How far a task is, and how far it was when it was first heard of."""

    done: int
    total: int
    note: str
    visible: bool
    began: float
    first: int

    def left(self, now: float) -> str:
        """About how long it will take from here, once there is something to tell it by."""
        fresh = self.done - self.first
        if fresh < 1 or self.done >= self.total:
            return ""
        seconds = round((now - self.began) / fresh * (self.total - self.done))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"


class _Handle(Protocol):
    def update(self, shown: object) -> object:
        """Show something else in the same place."""


class Progress:
    """How far each task is, for the time of a ``with`` block.

    A bar in a terminal, on standard error, and in a notebook; elsewhere a line every ten seconds, as far as there is
    something to tell then.

    Args:
        quiet: Show nothing at all.
        console: Another place to write to.
        clock: Tells seconds.

    >>> with Progress(quiet=True) as progress:
    ...     progress.show("audit", 0, 4, "round 9 again")
    """

    def __init__(
        self, quiet: bool = False, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.quiet, self._console, self._clock = quiet, console, clock
        self._bars: Bars | None = None
        """In a terminal alone."""
        self._ids: dict[str, TaskID] = {}
        self._tasks: dict[str, _Task] = {}
        self._handle: _Handle | None = None
        """In a notebook alone."""
        self._said = 0.0
        """When something was shown last."""

    def __enter__(self) -> Self:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        self._console = console = self._console or Console(stderr=True)
        self._said = self._clock()
        if self.quiet:
            return self
        if console.is_jupyter:
            self._handle = _display(self._picture())
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
            self._handle.update(_markup(self._picture()))
            self._handle = None
        self.quiet = True

    def show(self, task: str, done: int, total: int, note: str = "", *, visible: bool = True) -> None:
        """Show how far a task has come; its bar is made when it is first heard of.

        Args:
            task: Its name.
            done: Parts that are done.
            total: All parts.
            note: What to say beside the bar.
            visible: Whether its bar is shown.
        """
        if self.quiet or self._console is None:
            return
        if self._bars is not None:
            if task not in self._ids:  # Parts done before are not progress: they say nothing about the time left.
                self._ids[task] = self._bars.add_task(task, completed=done, total=total, note=note, visible=visible)
            self._bars.update(self._ids[task], completed=done, total=total, note=note, visible=visible)
            return
        now = self._clock()
        before = self._tasks.get(task)
        began, first = (now, done) if before is None else (before.began, before.first)
        self._tasks[task] = _Task(done, total, note, visible, began, first)
        if now - self._said < (LINE_EVERY if self._handle is None else DRAW_EVERY):
            return
        self._said = now
        if self._handle is not None:
            self._handle.update(_markup(self._picture()))
        else:
            # The first task is the whole of it; what it is made of would be a line each.
            name, whole = next(iter(self._tasks.items()))
            parts = [f"{whole.done}/{whole.total}", whole.note, whole.left(now)]
            self._console.print(
                f"{name}: {' '.join(filter(None, parts))}", markup=False, highlight=False, soft_wrap=True
            )

    def _picture(self) -> str:
        """What a notebook shows: a row a task."""
        rows = [
            f'<tr><td style="text-align:left">{html.escape(name)}</td>'
            f'<td><progress value="{task.done}" max="{task.total}"></progress></td>'
            f'<td style="text-align:left">{task.done}/{task.total} {html.escape(task.note)}</td>'
            f"<td>{task.left(self._clock())}</td></tr>"
            for name, task in self._tasks.items()
            if task.visible
        ]
        return f"<table>{''.join(rows)}</table>" if rows else ""

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


def _display(markup: str) -> _Handle:
    """Show something in a notebook that can be replaced later."""
    from IPython.display import display

    handle: _Handle = display(_markup(markup), display_id=True)
    return handle


def _markup(text: str) -> object:
    from IPython.display import HTML

    return HTML(text)
