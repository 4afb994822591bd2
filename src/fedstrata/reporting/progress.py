"""Show the progress of long tasks in terminals, notebooks and logs."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

from fedstrata.base.printable import printable
from fedstrata.evaluation.summary import percent
from fedstrata.reporting.tables import MISSING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import Task, TaskID


LINE_EVERY = 10.0
"""Seconds between two progress lines in a log. Shorter tasks do not write any line."""

DRAW_EVERY = 0.25
"""Seconds between two updates in a notebook."""


MOST = 12
"""With at most this number of methods, every method has a bar.

With more methods, only methods with active runs have bars.
"""

NAME = 22
"""The maximum number of characters of a bar's name. Longer names are cut."""


def duration(seconds: float) -> str:
    """Format a duration in words and numbers.

    >>> duration(12.3), duration(200), duration(7500)
    ('12 s', '3 min 20 s', '2 h 5 min')
    """
    all_seconds = round(seconds)
    minutes, rest = divmod(all_seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _remaining(task: Task, now: float) -> str:
    """Estimate a task's remaining time, formatted as text; empty before the first step and after the last step."""
    done, total = task.completed, task.total or 0
    new = done - task.fields["first"]
    if new < 1 or done >= total:
        return ""
    return f"{duration((now - task.fields['began']) / new * (total - done))} left"


class Progress:
    """Shows the progress of tasks during a ``with`` block.

    In a terminal (on standard error) and in a notebook, each task has a bar. In a log, at most one line is written
    every ten seconds.

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
        """The tasks and their progress. The library Rich draws the tasks as bars, but only in a terminal."""
        self._ids: dict[str, TaskID] = {}
        self._handle: Any = None
        """The object that updates the output in a notebook; None outside notebooks."""
        self._shown_at = 0.0

    def __enter__(self) -> Self:
        if self.quiet:
            return self
        from rich.console import Console
        from rich.progress import BarColumn, ProgressColumn, TextColumn
        from rich.progress import Progress as Bars
        from rich.table import Column
        from rich.text import Text

        clock = self._clock

        class TimeLeft(ProgressColumn):
            def render(self, task: Task) -> Text:
                return Text(_remaining(task, clock()))

        self._console = console = self._console or Console(stderr=True)
        self._shown_at = self._clock()
        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None, table_column=Column(min_width=6, max_width=30)),
            TextColumn("{task.fields[count]}", markup=False),
            TextColumn("{task.fields[note]}", markup=False),
            TimeLeft(Column(no_wrap=True)),
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
        """Show the progress of a task. The first call creates the task's bar.

        Args:
            task: The name of the task.
            done: The number of finished steps of the task.
            total: The total number of steps of the task.
            note: The text beside the bar.
            visible: Whether the bar is shown.
        """
        self._show(task, done, total, visible, note=note, count=f"{done}/{total}")

    def _show(
        self, task: str, done: int, total: int, visible: bool = True, *, is_cut: bool = False, **fields: Any
    ) -> None:
        """Implement ``show``, and change the given ``fields`` of the bar. If ``is_cut`` is True, cut the bar's name."""
        bars, now = self._bars, self._clock()
        if bars is None or self._console is None:
            return
        task, fields["note"] = printable(task), printable(fields["note"])
        if task not in self._ids:
            name = f"{task[: NAME - 1]}…" if is_cut and len(task) > NAME else task
            # ``first`` is the number of steps that were done before this call. The estimate of the remaining time
            # ignores these steps.
            begin: dict[str, Any] = {"first": done, "began": now} | fields
            self._ids[task] = bars.add_task(name, completed=done, total=total, visible=visible, **begin)
        bars.update(self._ids[task], completed=done, total=total, visible=visible, **fields)
        if bars.live.is_started or now - self._shown_at < (LINE_EVERY if self._handle is None else DRAW_EVERY):
            return
        self._shown_at = now
        if self._handle is not None:
            self._handle.update(self._html(bars))
        else:
            # Only the first task is written to a log, because other tasks are parts of the first task.
            whole = bars.tasks[0]
            parts = [f"{whole.completed}/{whole.total}", whole.fields["note"], _remaining(whole, now)]
            text = f"{whole.description}: {' '.join(filter(None, parts))}"
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _html(self, bars: Bars) -> object:
        """Return the HTML for a notebook: a table with one row per visible task."""
        from IPython.display import HTML

        rows = [
            f'<tr><td style="text-align:left">{html.escape(task.description)}</td>'
            f'<td><progress value="{task.completed}" max="{task.total}"></progress></td>'
            f'<td style="text-align:left">{task.fields["count"]} {html.escape(task.fields["note"])}</td>'
            f"<td>{_remaining(task, self._clock())}</td></tr>"
            for task in bars.tasks
            if task.visible
        ]
        return HTML(f"<table>{''.join(rows)}</table>" if rows else "")

    def of_run(self, label: str, rounds: int, done: int = 0) -> Callable[[Mapping[str, Any]], None]:
        """Show a bar for the rounds of a run.

        Args:
            label: The name of the run.
            rounds: The total number of rounds of the run.
            done: The number of rounds that were finished before the run was resumed.

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

    def of_runs(
        self,
        rounds: Mapping[tuple[str, int], int],
        latest: Callable[[str, int], str] = lambda label, seed: "",
        *,
        done: Iterable[tuple[str, int]] = (),
    ) -> Callable[[str, int, int], None]:
        """Show one bar for all rounds of a comparison, and one bar per method.

        Args:
            rounds: A mapping from the label and seed of every run to its number of rounds.
            latest: A function that takes a run's label and seed, and returns the latest primary metric as text.
            done: The runs that were already finished.

        Returns:
            A function to call with the label, the seed and the number of finished rounds of a run.
        """
        first: dict[tuple[str, int], int] = {}
        finished = dict.fromkeys(rounds, 0)
        of_label = {label: [key for key in rounds if key[0] == label] for label, _ in rounds}
        task = f"{len(rounds)} run{'' if len(rounds) == 1 else 's'}"

        def watch(label: str, seed: int, done: int) -> None:
            key, keys = (label, seed), of_label[label]
            is_news = finished[key] != done
            first.setdefault(key, done)
            finished[key] = done
            total = sum(finished.values())
            # ``first`` counts rounds that were already done, so that the estimate of the remaining time ignores them.
            self._show(
                task, total, sum(rounds.values()), count=f"{total}/{sum(rounds.values())}", note="rounds",
                first=sum(first.values()),
            )  # fmt: skip
            if not is_news:
                return
            done_before, done_now = (sum(each.get(one, 0) for one in keys) for each in (first, finished))
            of_all, ended = sum(rounds[one] for one in keys), sum(finished[one] >= rounds[one] for one in keys)
            note = f"{ended} of {len(keys)} seed{'' if len(keys) == 1 else 's'}"
            if 0 < done < rounds[key]:
                note = f"{ended} of {len(keys)}, round {done}/{rounds[key]}"
            note = f"{note}  {latest(label, seed)}".rstrip()
            visible = len(of_label) <= MOST or 0 < done_now < of_all
            self._show(label, done_now, of_all, visible, is_cut=True, count="", note=note, first=done_before)

        self._show(task, 0, sum(rounds.values()), count=f"0/{sum(rounds.values())}", note="rounds")
        for label, keys in of_label.items():
            note = f"0 of {len(keys)} seed{'' if len(keys) == 1 else 's'}"
            self._show(
                label, 0, sum(rounds[key] for key in keys), len(of_label) <= MOST, is_cut=True, count="", note=note
            )
        for key in done:
            watch(*key, rounds[key])
        return watch
