"""What the terminal shows: a bar while a run goes on, a panel when it is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedstrata.history import History
from fedstrata.report.progress import Bar
from fedstrata.report.tables import MISSING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.panel import Panel
    from rich.progress import Progress, ProgressColumn


class RunProgress(Bar):
    """A bar for the rounds of a run.

    Args:
        rounds: Rounds of the whole run.
        label: What runs.
        quiet: Show nothing at all.
        done: Rounds done before, where a run is resumed; they do not count for the time left.
        best: Best accuracy of those rounds.
        console: Another place to write to.

    >>> with RunProgress(2, "fedavg", quiet=True) as progress:
    ...     progress.update({"round": 1, "accuracy": 0.5})
    """

    def __init__(
        self,
        rounds: int,
        label: str,
        quiet: bool = False,
        *,
        done: int = 0,
        best: float | None = None,
        console: Console | None = None,
    ) -> None:
        super().__init__(quiet, console)
        self.rounds, self.label, self.done = rounds, label, done
        self.accuracy: float | None = None
        self.best = best

    def update(self, record: Mapping[str, Any]) -> None:
        """Show a round that is done; ``record`` is its metrics."""
        accuracy = record.get("accuracy")
        if accuracy is not None:
            self.accuracy = float(accuracy)
            self.best = self.accuracy if self.best is None else max(self.best, self.accuracy)
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=record["round"], **self._fields(record))

    def _fields(self, record: Mapping[str, Any]) -> dict[str, Any]:
        present, asked = (record.get(f"clients_{word}", MISSING) for word in ("returned", "invited"))
        return {
            "accuracy": percent(self.accuracy, 1),
            "best": percent(self.best, 1),
            "clients": f"{present}/{asked}",
        }

    def _columns(self) -> Sequence[ProgressColumn]:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

        return (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("accuracy {task.fields[accuracy]} (best {task.fields[best]})"),
            TextColumn("clients {task.fields[clients]}"),
            TimeRemainingColumn(compact=True),
        )

    def _begin(self, progress: Progress) -> None:
        from rich.markup import escape

        progress.add_task(escape(self.label), total=self.rounds, completed=self.done, **self._fields({}))


def summary_panel(history: History) -> Panel:
    """What to print at the end of a run: how good it got, who took part, what it cost and where it is."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for word, value in summary_lines(history):
        grid.add_row(word, Text(value))
    seed = "" if history.seed is None else f", seed {history.seed}"
    return Panel(grid, title=Text(f"{history.method or 'run'}{seed}"), title_align="left", expand=False)


def summary_lines(history: History) -> list[tuple[str, str]]:
    """The lines of the panel: a word and its value."""
    summary = history.summary
    rounds = f"{summary['rounds']} round{'' if summary['rounds'] == 1 else 's'}"
    lines = [("accuracy", f"{percent(summary['final_accuracy'])} after {rounds}")]
    if summary["best_round"] is not None:
        lines.append(("best", f"{percent(summary['best_accuracy'])} in round {summary['best_round']}"))
    reached = {target: round for target, round in summary["rounds_to_target"].items() if round is not None}
    if reached:
        parts = (f"{float(target) * 100:g} % in round {round}" for target, round in reached.items())
        lines.append(("reached", ", ".join(parts)))
    if invited := history.total("clients_invited"):
        share = history.total("clients_returned") / invited
        absent = [
            f"{history.total(f'clients_{fate}'):,.0f} {word}"
            for fate, word in (("dropped", "dropped out"), ("late", "late"), ("failed", "failed"))
            if history.total(f"clients_{fate}")
        ]
        lines.append(("returned", f"{percent(share, 1)} of those invited" + "".join(f", {text}" for text in absent)))
    lines.append(("trained", f"{summary['samples']:,} samples in {summary['seconds']:,.1f} s"))
    up, down = (summary[key] * 1e-6 for key in ("bytes_up", "bytes_down"))
    lines.append(("sent", f"{up:,.1f} MB by clients, {down:,.1f} MB to clients"))
    if history.path is not None:
        lines.append(("folder", str(history.path)))
    return lines


def percent(fraction: float | None, digits: int = 2) -> str:
    """A fraction in percent.

    >>> percent(0.5), percent(None)
    ('50.00 %', '–')
    """
    return MISSING if fraction is None else f"{fraction * 100:.{digits}f} %"
