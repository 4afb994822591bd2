"""Summarise a run for the terminal, and count the failures in the run."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fedstrata.base.jsonl import read_jsonl
from fedstrata.base.printable import printable
from fedstrata.evaluation.history import History
from fedstrata.evaluation.summary import summary_lines

if TYPE_CHECKING:
    from rich.panel import Panel


def summary_panel(history: History) -> Panel:
    """Return the panel that a terminal shows at the end of a run: accuracy, participation, costs and folder."""
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


def failures(history: History) -> str | None:
    """Describe a run's failures: the number of each kind, and the first reason. Return None if nothing failed."""
    path = history.path / "events.jsonl" if history.path is not None else None
    events = read_jsonl(path) if path is not None and path.exists() else []
    # After a crash, the log may contain an entry about the log's repair, which is not an event and has no kind.
    failed = [event for event in events if event.get("kind") in ("failed", "refused", "label skipped", "batch skipped")]
    if not failed:
        return None
    counts = ", ".join(f"{count} × {kind}" for kind, count in Counter(event["kind"] for event in failed).items())
    return f"{counts}. The first reason: {failed[0].get('reason', '')} (all are in {path})"
