"""Make a table of each client's results, with one row per client and one column per method."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence

from fedstrata.base.errors import SpecError, not_among
from fedstrata.base.printable import csv_cell
from fedstrata.base.screen import ScreenTable
from fedstrata.evaluation.history import History
from fedstrata.reporting import contrasts, tables
from fedstrata.reporting.statistics import Estimate

ByClient = dict[str, dict[str, Estimate]]
"""For each client's name, a mapping from each method's label to an estimate."""

NOT_RESULTS = ("client", "name", "in_partition", "train_samples", "samples", "heard")
"""In a run's table of clients, the columns that do not contain results."""


def by_client(runs: Mapping[str, Sequence[History]], column: str = "accuracy") -> ByClient:
    """Estimate each client's result (such as its test accuracy) with each method, as a mean over seeds.

    Args:
        runs: A mapping from each method to the histories of its runs, one per seed.
        column: A column of results in the runs' tables of clients (``clients.csv``).

    Returns:
        The estimates for each client, in the order of the runs' tables. An estimate is empty if the client does not
        have a value, for example because the client lacks samples of a class.

    Raises:
        SpecError: No run has a table of clients, the column is unknown, or a client's data differ between seeds.
    """
    results = {label: [history.clients for history in members] for label, members in runs.items()}
    rows = [row for members in results.values() for table in members for row in table]
    if not rows:
        problem = (
            "these runs do not contain results of individual clients. Set evaluation.client_test, or use data whose "
            "test samples have client ids."
        )
        raise SpecError("--by-client", problem)
    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in NOT_RESULTS]
    if column not in columns:
        raise SpecError("--by-client", not_among("is not a result of these runs", column, columns), column)
    if not all("name" in row for row in rows) and any(len(members) > 1 for members in results.values()):
        problem = (
            "each seed assigns samples to clients differently, so results of a client cannot be averaged over seeds"
        )
        raise SpecError("--by-client", f"{problem}. Use runs with one seed, or data with client ids.")
    names = dict.fromkeys(str(row.get("name", row["client"])) for row in rows)
    values = {
        label: [{str(row.get("name", row["client"])): _number(row[column]) for row in table} for table in members]
        for label, members in results.items()
    }
    bounds = tables.bounds(f"final_{column}")
    return {
        name: {label: Estimate.over((seed.get(name) for seed in members), bounds) for label, members in values.items()}
        for name in names
    }


def _number(cell: object) -> float | None:
    return float(cell) if isinstance(cell, (int, float, str)) and cell != "" else None


def _cells(table: ByClient, column: str) -> tuple[list[str], list[list[str]]]:
    """Return the labels of the methods and, for each client, a row of strings: its name, and the methods' means."""
    how, labels = tables.measure(f"final_{column}"), list(next(iter(table.values())))
    rows = []
    for name, estimates in table.items():
        cells = [name]
        for label in labels:
            estimate = estimates[label]
            text = tables.MISSING if estimate.mean is None else tables.number(estimate.mean, how)
            if estimate.interval is not None:
                low, high = (tables.number(end, how) for end in estimate.interval)
                text += f" [{low}, {high}]"
            cells.append(text)
        rows.append(cells)
    return labels, rows


def caption(table: ByClient, column: str) -> str:
    """Return a sentence that explains the numbers of the table."""
    estimates = [estimate for row in table.values() for estimate in row.values()]
    seeds, unit = max(estimate.n for estimate in estimates), ", in %" if column == "accuracy" else ""
    over = "one seed" if seeds == 1 else f"mean over {seeds} seeds"
    interval = " with its 95 % interval" if any(estimate.interval for estimate in estimates) else ""
    return f"{column} on each client's own test samples{unit}; {over}{interval}."


def to_screen(table: ByClient, column: str, every: bool = False) -> ScreenTable:
    """Return the table for a terminal. If ``every`` is True, show all columns even in a narrow terminal."""
    labels, rows = _cells(table, column)
    return ScreenTable(["client", *labels], rows, every=every, note=caption(table, column))


def to_markdown(table: ByClient, column: str) -> str:
    """Return the table in Markdown, with its caption."""
    labels, rows = _cells(table, column)
    return f"{tables.markdown_table(['client', *labels], rows)}\n{caption(table, column)}\n"


def to_latex(table: ByClient, column: str) -> str:
    """Return the table in LaTeX with escaped strings. The document must load the package booktabs."""
    labels, rows = _cells(table, column)
    headings, *lines = (list(map(contrasts.escape, cells)) for cells in (["client", *labels], *rows))
    return contrasts.latex_table(contrasts.escape(caption(table, column)), headings, lines)


def to_csv(table: ByClient) -> str:
    """Return CSV with one row per client and method. Numbers are not rounded. Cells of missing numbers are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["client", "label", "n", "mean", "sd", "low", "high"])
    for name, estimates in table.items():
        for label, each in estimates.items():
            writer.writerow([csv_cell(name), csv_cell(label), each.n, each.mean, each.sd, *(each.interval or ("", ""))])
    return text.getvalue()
