"""Report the progress of the board: finished runs per column and entry, and the expected time for missing runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstrata.papers.board.protocol import BASELINE, BOARD, Column, Entry, Protocol
from fedstrata.papers.board.running import best, limited, refusal, results_of
from fedstrata.papers.pages import duration, remaining
from fedstrata.papers.running import Results, read
from fedstrata.reporting.tables import markdown_table

HEADINGS = {"columns": "column", "entries": "entry"}
"""A mapping from each part of the progress (``columns`` and ``entries``) to the first heading of its table."""


def progress(
    protocol: Protocol, columns: Sequence[Column], entries: Sequence[Entry], out: Path
) -> dict[str, list[dict[str, Any]]]:
    """Count the finished cells of the board, and estimate the time for the missing cells.

    Returns:
        A dict with two lists: ``columns`` contains a dict per column, and ``entries`` contains a dict per entry. Each
        dict has the keys ``name``, ``cells`` (number of cells), ``done`` (number of finished cells) and ``hours``
        (expected time for the missing cells on one core). A cell is a tuning trial, or a run with one seed. ``refused``
        is the number of (entry, column) pairs that cannot be trained. No cells are counted for these pairs.
    """
    seconds = measured(out, protocol)
    counts = [
        {"column": column.label, "entry": entry.name, **_count(protocol, column, entry, results, seconds)}
        for column in columns
        for results in [results_of(out, column)]
        for entry in entries
    ]
    return {
        "columns": [_total(counts, "column", column.label) for column in columns],
        "entries": [_total(counts, "entry", entry.name) for entry in entries],
    }


def _count(
    protocol: Protocol, column: Column, entry: Entry, results: Results, seconds: Mapping[str, float]
) -> dict[str, float]:
    trials = protocol.trials(column, entry)
    if refusal(trials, results) is not None:
        return {"cells": 0, "done": 0, "hours": 0.0, "refused": 1}
    settings = best(trials, results)
    runs = [] if settings is None else protocol.runs(column, entry, settings)
    more = limited(protocol, column, results) if entry.name == BASELINE else []
    cells = len(trials) + len(protocol.seeds) + len(more)
    done = sum(cell.hash in results for cell in [*(cell for cell, _ in [*trials, *more]), *runs])
    rate = seconds.get(entry.name, protocol.expected(entry.name))
    return {"cells": cells, "done": done, "hours": (cells - done) * rate / 3600, "refused": 0}


def _total(counts: Sequence[Mapping[str, Any]], key: str, name: str) -> dict[str, Any]:
    own = [count for count in counts if count[key] == name]
    return {"name": name, **{each: sum(count[each] for count in own) for each in ("cells", "done", "hours", "refused")}}


def measured(out: Path, protocol: Protocol) -> dict[str, float]:
    """Return the mean seconds per run for each method that has finished a run on the board."""
    seconds: dict[str, list[float]] = {}
    for path in sorted((out / "cells" / BOARD / protocol.name).glob("*.json")):
        for key, result in read(path).items():
            if "core_seconds" in result:
                seconds.setdefault(key.split("/")[0], []).append(result["core_seconds"])
    return {name: statistics.fmean(each) for name, each in seconds.items()}


def lines(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Format the progress as Markdown tables, followed by a line about all missing runs."""
    texts: list[str] = []
    for kind, each in rows.items():
        headings = [HEADINGS[kind], "runs", "done", "time left on one core"]
        texts += [*markdown_table(headings, map(_line, each)).splitlines(), ""]
    return [*texts, remaining(rows["columns"])]


def _line(row: Mapping[str, Any]) -> list[str]:
    missing = row["cells"] - row["done"]
    left = duration(row["hours"]) if missing else "cannot run" if not row["cells"] else "–"
    return [row["name"], str(row["cells"]), str(row["done"]), left]
