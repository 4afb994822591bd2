"""Methods side by side: mean and standard deviation over seeds, for the terminal, Markdown and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedstrata.evaluation.history import History, target_text
from fedstrata.reporting.statistics import Estimate

if TYPE_CHECKING:
    from rich.table import Table

MISSING = "–"
STUCK = "†"
"""Marks the label of runs whose model never took a step."""
ABREAST = 4
"""So many labels fit beside each other on a terminal."""


@dataclass(frozen=True)
class Row:
    """One label of a table.

    Args:
        label: The method, or whatever distinguishes the runs.
        seeds: How many runs there are.
        cells: An estimate for each measure, by its key.
        stuck: How many of the runs never took a step.
    """

    label: str
    seeds: int
    cells: dict[str, Estimate]
    stuck: int = 0

    @property
    def marked(self) -> str:
        """The label, with a mark where a run never took a step."""
        return f"{self.label} {STUCK}" if self.stuck else self.label


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
        cells = {key: Estimate.over(summary[key] for summary in summaries) for key in list(MEASURES)[:4]}
        for target in targets:
            cells[f"{_TARGET}{target_text(target)}"] = Estimate.over(
                history.rounds_to_target(target) for history in members
            )
        cells |= {name: Estimate.over(_last(history, name) for history in members) for name in measured}
        cells |= {key: Estimate.over(summary[key] for summary in summaries) for key in list(MEASURES)[4:]}
        rows.append(Row(label, len(members), cells, sum(bool(history.warning) for history in members)))
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


def is_target(key: str) -> bool:
    """Whether a key is ``rounds_to_T`` for a number T.

    >>> is_target("rounds_to_0.8"), is_target("rounds_to_go")
    (True, False)
    """
    try:
        float(key.removeprefix(_TARGET))
    except ValueError:
        return False
    return key.startswith(_TARGET)


def reached(history: History, key: str) -> int | None:
    """The first round that reached the target of a key, or None."""
    return history.rounds_to_target(float(key.removeprefix(_TARGET)))


def measure(key: str) -> Measure:
    """How a cell is shown.

    >>> measure("rounds_to_0.8").heading
    'rounds to 80 %'
    """
    if is_target(key):
        return Measure(f"rounds to {float(key.removeprefix(_TARGET)) * 100:g} %")
    if key.startswith(_TEST):
        return Measure(f"final {key.removeprefix(_TEST)}", 1, 4)
    if key.startswith(_CLIENTS):
        return Measure(f"final {key.removeprefix(_CLIENTS).removesuffix(_WORST)}, worst tenth of the clients", 1, 4)
    return MEASURES[key]


def show(row: Row, key: str) -> str:
    """A cell as text.

    >>> show(Row("fedavg", 3, {"final_accuracy": Estimate(0.56, 0.0123, 3)}), "final_accuracy")
    '56.00 ± 1.23'
    >>> show(Row("fedavg", 3, {"best_round": Estimate(14.0, 2.0, 2)}), "best_round")
    '14 ± 2 (2 of 3)'
    """
    return shown(row.cells[key], measure(key), row.seeds)


def shown(cell: Estimate, how: Measure, seeds: int) -> str:
    """An estimate as text, with how many of the ``seeds`` have the number where some have not."""
    if cell.mean is None:
        return MISSING
    text = number(cell.mean, how)
    if cell.sd:  # what every seed has alike needs no deviation
        text += f" ± {number(cell.sd, how)}"
    return text + (f" ({cell.n} of {seeds})" if cell.n < seeds else "")


def number(value: float, how: Measure, sign: str = "") -> str:
    """A number in the unit of its heading.

    >>> number(0.5, MEASURES["final_accuracy"], "+")
    '+50.00'
    """
    return f"{value * how.factor:{sign},.{how.digits}f}"


def keys(rows: Sequence[Row]) -> list[str]:
    """The measures worth a column: all but targets that nobody reached."""
    every = list(rows[0].cells) if rows else []
    return [key for key in every if not key.startswith(_TARGET) or any(row.cells[key].n for row in rows)]


def caption(rows: Sequence[Row]) -> str:
    """What the numbers are, in a sentence or two; empty where every label has one seed and took its steps."""
    sentences, counts = list[str](), sorted({row.seeds for row in rows})
    if counts and counts != [1]:
        seeds = f"{counts[0]} seeds" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
        sentences.append(f"Mean ± sample standard deviation over {seeds}.")
    return " ".join([*sentences, *of_stuck({row.label: row.stuck for row in rows})])


def of_stuck(stuck: Mapping[str, int]) -> list[str]:
    """A sentence about the labels of which runs never took a step; none where there are none.

    >>> of_stuck({"fedavg": 0, "wild": 2})
    ['† No reply could be used in 2 runs of wild: their models never took a step.']
    """
    counts = [f"{count} run{'' if count == 1 else 's'} of {label}" for label, count in stuck.items() if count]
    which = "its model" if sum(stuck.values()) == 1 else "their models"
    return [f"{STUCK} No reply could be used in {', '.join(counts)}: {which} never took a step."] if counts else []


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
            table.add_column(Text(row.marked), justify="right", overflow="fold")
        for key in keys(rows):
            table.add_row(Text(measure(key).heading), *(Text(show(row, key)) for row in rows))
        return table
    shown = [key for key in keys(rows) if key not in ("best_round", "rounds", "seconds")]
    for key in shown:
        heading = measure(key).heading
        table.add_column(Text(heading), justify="right", min_width=max(map(len, heading.split())))
    for row in rows:  # the deviation goes below the mean, to be narrow
        table.add_row(Text(row.marked), *(Text(show(row, key).replace(" ±", "\n±")) for key in shown))
    return table


def to_markdown(rows: Sequence[Row]) -> str:
    """The table in Markdown, with a caption below where there are several seeds."""
    shown = keys(rows)
    lines = [
        ["", *(measure(key).heading for key in shown)],
        ["---", *("---:" for _ in shown)],
        *([row.marked.replace("|", r"\|"), *(show(row, key) for key in shown)] for row in rows),
    ]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return text + (f"\n{caption(rows)}\n" if caption(rows) else "")


def to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The table as plain values: ``label``, ``seeds``, and ``mean``, ``sd`` and ``n`` of each measure.

    ``stuck`` is how many runs never took a step, where there are any.
    """
    return [
        {"label": row.label, "seeds": row.seeds}
        | ({"stuck": row.stuck} if row.stuck else {})
        | {key: {"mean": cell.mean, "sd": cell.sd, "n": cell.n} for key, cell in row.cells.items()}
        for row in rows
    ]
