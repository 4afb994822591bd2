"""The end of a run in a few words: a panel for the terminal, lines for the page."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fedstrata.base.jsonl import read_jsonl
from fedstrata.evaluation.history import History
from fedstrata.reporting.tables import MISSING

if TYPE_CHECKING:
    from rich.panel import Panel


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
        by = "by the validation samples" if summary["best_on"] == "validation" else "picked on the test set"
        lines.append(("best", f"{percent(summary['best_accuracy'])} in round {summary['best_round']}, {by}"))
    lines += [("measured", ", ".join(found))] if (found := _metrics(history)) else []
    if history.warning:
        lines.append(("warning", history.warning))
    if history.stopped:
        lines.append(("stopped", history.stopped))
    reached = {target: round for target, round in summary["rounds_to_target"].items() if isinstance(round, int)}
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


def _metrics(history: History) -> list[str]:
    """Metrics of the last evaluation on the test set, but for the accuracy."""
    last: dict[str, float | None] = next((record["test"] for record in reversed(history) if record.get("test")), {})
    return [f"{name} {MISSING if v is None else f'{v:.4f}'}" for name, v in last.items() if name != "accuracy"]


def failures(history: History) -> str | None:
    """What went wrong in the run of a folder and how often, with the first reason; None where nothing did."""
    events = history.path / "events.jsonl" if history.path is not None else None
    found = read_jsonl(events) if events is not None and events.exists() else []
    # Of a log that was damaged something may be left that is no event any more.
    wrong = [event for event in found if event.get("kind") in ("failed", "refused", "label skipped", "batch skipped")]
    if not wrong:
        return None
    counts = ", ".join(f"{count} × {kind}" for kind, count in Counter(event["kind"] for event in wrong).items())
    return f"{counts}; the first: {wrong[0].get('reason', '')} (all in {events})"


def percent(fraction: float | None, digits: int = 2) -> str:
    """A fraction in percent.

    >>> percent(0.5), percent(None)
    ('50.00 %', '–')
    """
    return MISSING if fraction is None else f"{fraction * 100:.{digits}f} %"
