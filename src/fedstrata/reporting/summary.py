"""Summarise a run: as a panel for the terminal, and as lines for the HTML report."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fedstrata.base.jsonl import read_jsonl
from fedstrata.base.printable import printable
from fedstrata.evaluation.history import History, column_of
from fedstrata.reporting.tables import MISSING

if TYPE_CHECKING:
    from rich.panel import Panel


def summary_panel(history: History) -> Panel:
    """Return the panel that is shown at the end of a run: its accuracy, participation, costs and folder."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for word, value in summary_lines(history):
        grid.add_row(word, Text(printable(value)))
    seed = "" if history.seed is None else f", seed {history.seed}"
    return Panel(grid, title=Text(printable(f"{history.method or 'run'}{seed}")), title_align="left", expand=False)


def summary_lines(history: History) -> list[tuple[str, str]]:
    """Return the lines of the panel, each as a pair of a heading and a text."""
    summary = history.summary
    rounds = f"{summary['rounds']} round{'' if summary['rounds'] == 1 else 's'}"
    metric = history.primary
    final, best = (_shown(metric, summary[f"{when}_{metric}"]) for when in ("final", "best"))
    kept = "" if history.saved is None else ", of the saved model"
    kept += f" (round {history.model_round})" if history.model_round is not None else ""
    lines = [(metric, f"{final} after {rounds}{kept}")]
    if summary["best_round"] is not None:
        by = "selected on validation samples" if summary["best_on"] == "validation" else "selected on the test set"
        lines.append(("best", f"{best} in round {summary['best_round']}, {by}"))
    lines += [("measured", ", ".join(metrics))] if (metrics := _metrics(history)) else []
    if history.warning:
        lines.append(("warning", history.warning))
    if history.stopped:
        lines.append(("stopped", history.stopped))
    targets = summary["rounds_to_target"].items()
    if reached := [f"{float(t) * 100:g} % in round {round}" for t, round in targets if isinstance(round, int)]:
        lines.append(("reached", ", ".join(reached)))
    if invited := history.total("clients_invited"):
        share = history.total("clients_returned") / invited
        names = (("dropped", "dropped out"), ("late", "late"), ("failed", "failed"))
        absent = [f", {n:,.0f} {name}" for fate, name in names if (n := history.total(f"clients_{fate}"))]
        lines.append(("returned", f"{percent(share, 1)} of the invited clients{''.join(absent)}"))
    lines.append(("trained", f"{summary['samples']:,} samples in {summary['seconds']:,.1f} s"))
    up, down = (summary[key] * 1e-6 for key in ("bytes_up", "bytes_down"))
    lines.append(("sent", f"{up:,.1f} MB by clients, {down:,.1f} MB to clients"))
    if history.path is not None:
        lines.append(("folder", str(history.path)))
    return lines


def _metrics(history: History) -> list[str]:
    """Return the metrics of the saved model on the test set, except the primary metric."""
    last: dict[str, float | None] = next((record["test"] for record in reversed(history) if record.get("test")), {})
    names = [*(["accuracy"] if history.final_accuracy is not None else []), *last]
    return [
        f"{name} {_shown(name, history.final(column_of(name)))}"
        for name in dict.fromkeys(names)
        if name != history.primary
    ]


def _shown(metric: str, value: float | None) -> str:
    return percent(value) if metric == "accuracy" else MISSING if value is None else f"{value:.4f}"


def failures(history: History) -> str | None:
    """Return a text with the count of each kind of failure in a run, and the first reason; None without failures."""
    path = history.path / "events.jsonl" if history.path is not None else None
    events = read_jsonl(path) if path is not None and path.exists() else []
    # After a crash, the log may contain an entry about the repair, which is not an event and has no kind.
    failed = [event for event in events if event.get("kind") in ("failed", "refused", "label skipped", "batch skipped")]
    if not failed:
        return None
    counts = ", ".join(f"{count} × {kind}" for kind, count in Counter(event["kind"] for event in failed).items())
    return f"{counts}. The first reason: {failed[0].get('reason', '')} (all are in {path})"


def percent(fraction: float | None, digits: int = 2) -> str:
    """Format a fraction in percent.

    >>> percent(0.5), percent(None)
    ('50.00 %', '–')
    """
    return MISSING if fraction is None else f"{fraction * 100:.{digits}f} %"
