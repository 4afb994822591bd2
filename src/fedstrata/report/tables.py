"""Methods side by side: mean and standard deviation over seeds, for the terminal, Markdown and JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedstrata.history import History, target_text

if TYPE_CHECKING:
    from rich.table import Table

MISSING = "–"
ABREAST = 4
"""So many labels fit beside each other on a terminal."""


@dataclass(frozen=True)
class Cell:
    """A number over seeds.

    Args:
        mean: Mean over the seeds that have the number; None where none has.
        sd: Their sample standard deviation; None for fewer than two.
        n: How many seeds have the number.
    """

    mean: float | None
    sd: float | None
    n: int

    @classmethod
    def over(cls, values: Iterable[float | None]) -> Cell:
        """The cell of some seeds' values, None where a seed has none.

        >>> Cell.over([1.0, None, 3.0])
        Cell(mean=2.0, sd=1.4142135623730951, n=2)
        """
        known = [float(value) for value in values if value is not None]
        mean = statistics.fmean(known) if known else None
        return cls(mean, statistics.stdev(known) if len(known) > 1 else None, len(known))


@dataclass(frozen=True)
class Row:
    """One label of a table.

    Args:
        label: The method, or whatever distinguishes the runs.
        seeds: How many runs there are.
        cells: A cell for each measure, by its key.
    """

    label: str
    seeds: int
    cells: dict[str, Cell]


@dataclass(frozen=True)
class Measure:
    """A column of the table.

    Args:
        heading: Its name, with the unit.
        factor: From the recorded unit to that of the heading.
        digits: After the decimal point.
    """

    heading: str
    factor: float = 1.0
    digits: int = 0


MEASURES = {
    "final_accuracy": Measure("final accuracy, %", 100, 2),
    "best_accuracy": Measure("best accuracy, %", 100, 2),
    "best_round": Measure("best round"),
    "rounds": Measure("rounds"),
    "samples": Measure("samples trained"),
    "bytes_up": Measure("MB up", 1e-6, 1),
    "bytes_down": Measure("MB down", 1e-6, 1),
    "seconds": Measure("seconds", 1, 1),
}
"""The columns of every table; those of the targets stand before ``samples``."""

_TARGET = "rounds_to_"
_TEST, _CLIENTS, _WORST = "test.", "clients.", ".worst_10"


def compare_table(runs: Mapping[str, Sequence[History]]) -> list[Row]:
    """A row for each label.

    Args:
        runs: The histories of each label's seeds.

    Returns:
        Rows whose cells are keyed by ``MEASURES``, ``rounds_to_T`` for each target T of any history, and the columns
        of other metrics, ``test.NAME`` and ``clients.NAME.worst_10``, by the last evaluation.
        Accuracies are fractions and data are bytes; means and sample standard deviations are over seeds. A
        seed that never reached a target does not count in that cell, which its ``n`` tells.
    """
    targets = sorted({target for members in runs.values() for history in members for target in history.targets})
    measured = sorted({name for members in runs.values() for history in members for name in _measured(history)})
    rows = []
    for label, members in runs.items():
        summaries = [history.summary for history in members]
        cells = {key: Cell.over(summary[key] for summary in summaries) for key in list(MEASURES)[:4]}
        for target in targets:
            cells[f"{_TARGET}{target_text(target)}"] = Cell.over(
                history.rounds_to_target(target) for history in members
            )
        cells |= {name: Cell.over(_last(history, name) for history in members) for name in measured}
        cells |= {key: Cell.over(summary[key] for summary in summaries) for key in list(MEASURES)[4:]}
        rows.append(Row(label, len(members), cells))
    return rows


def _measured(history: History) -> Iterator[str]:
    """Columns of metrics other than the accuracy on the test set, and of the clients that fare worst."""
    for name in history.columns:
        worst = name.startswith(_CLIENTS) and name.endswith(_WORST) and not name.startswith(f"{_CLIENTS}unheard.")
        if worst or (name.startswith(_TEST) and name != f"{_TEST}accuracy"):
            yield name


def _last(history: History, name: str) -> float | None:
    """The last value of a column, None where a run has none."""
    return float(history.column(name)[1][-1]) if name in history.columns else None


def measure(key: str) -> Measure:
    """How a cell is shown.

    >>> measure("rounds_to_0.8").heading
    'rounds to 80 %'
    """
    if key.startswith(_TARGET):
        return Measure(f"rounds to {float(key.removeprefix(_TARGET)) * 100:g} %")
    if key.startswith(_TEST):
        return Measure(f"final {key.removeprefix(_TEST)}", 1, 4)
    if key.startswith(_CLIENTS):
        return Measure(f"final {key.removeprefix(_CLIENTS).removesuffix(_WORST)}, worst tenth of the clients", 1, 4)
    return MEASURES[key]


def show(row: Row, key: str) -> str:
    """A cell as text.

    >>> show(Row("fedavg", 3, {"final_accuracy": Cell(0.56, 0.0123, 3)}), "final_accuracy")
    '56.00 ± 1.23'
    >>> show(Row("fedavg", 3, {"best_round": Cell(14.0, 2.0, 2)}), "best_round")
    '14 ± 2 (2 of 3)'
    """
    cell, how = row.cells[key], measure(key)
    if cell.mean is None:
        return MISSING
    text = f"{cell.mean * how.factor:,.{how.digits}f}"
    if cell.sd:  # what every seed has alike needs no deviation
        text += f" ± {cell.sd * how.factor:,.{how.digits}f}"
    return text + (f" ({cell.n} of {row.seeds})" if cell.n < row.seeds else "")


def keys(rows: Sequence[Row]) -> list[str]:
    """The measures worth a column: all but targets that nobody reached."""
    every = list(rows[0].cells) if rows else []
    return [key for key in every if not key.startswith(_TARGET) or any(row.cells[key].n for row in rows)]


def caption(rows: Sequence[Row]) -> str:
    """What the numbers are, in a sentence; empty where every label has one seed."""
    counts = sorted({row.seeds for row in rows})
    if not counts or counts == [1]:
        return ""
    seeds = f"{counts[0]} seeds" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
    return f"Mean ± sample standard deviation over {seeds}."


def to_rich(rows: Sequence[Row], title: str | None = None) -> Table:
    """The table for a terminal of 80 columns.

    Up to ``ABREAST`` labels stand side by side with all measures; more of them stand below each other, with the
    measures that methods are compared by.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.caption, table.caption_justify = caption(rows) or None, "left"
    table.add_column("", overflow="fold")
    if len(rows) <= ABREAST:
        for row in rows:
            table.add_column(Text(row.label), justify="right", overflow="fold")
        for key in keys(rows):
            table.add_row(Text(measure(key).heading), *(Text(show(row, key)) for row in rows))
        return table
    shown = [key for key in keys(rows) if key not in ("best_round", "rounds", "seconds")]
    for key in shown:
        heading = measure(key).heading
        table.add_column(Text(heading), justify="right", min_width=max(map(len, heading.split())))
    for row in rows:  # the deviation goes below the mean, to be narrow
        table.add_row(Text(row.label), *(Text(show(row, key).replace(" ±", "\n±")) for key in shown))
    return table


def to_markdown(rows: Sequence[Row]) -> str:
    """The table in Markdown, with a caption below where there are several seeds."""
    shown = keys(rows)
    lines = [
        ["", *(measure(key).heading for key in shown)],
        ["---", *("---:" for _ in shown)],
        *([row.label.replace("|", r"\|"), *(show(row, key) for key in shown)] for row in rows),
    ]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return text + (f"\n{caption(rows)}\n" if caption(rows) else "")


def to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The table as plain values: ``label``, ``seeds``, and ``mean``, ``sd`` and ``n`` of each measure."""
    return [
        {"label": row.label, "seeds": row.seeds}
        | {key: {"mean": cell.mean, "sd": cell.sd, "n": cell.n} for key, cell in row.cells.items()}
        for row in rows
    ]
