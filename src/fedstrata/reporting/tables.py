"""Write tables of methods with means and standard deviations over seeds, as Markdown and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedstrata.base.printable import printable
from fedstrata.evaluation.history import TARGETS, History, column_of, target_text
from fedstrata.evaluation.summary import MISSING as MISSING
from fedstrata.reporting.statistics import UNBOUNDED, Estimate, Range

STUCK = "†"
"""The mark of methods with runs that broke down; see ``Row.stuck``."""


@dataclass(frozen=True)
class Row:
    """A row of a table: the measures of one method, estimated over its runs.

    Args:
        label: The label of the runs, such as the method's name.
        seeds: The number of runs.
        cells: A mapping from the key of each measure to its estimate.
        stuck: The number of runs that broke down: from some round to the end, the server could not use any reply.
        kept: A string that names the round of the saved model (see ``kept``); None for the last round.
        at_once: The keys ``rounds_to_T`` for default targets T, if every run reached T in its first evaluated round.
    """

    label: str
    seeds: int
    cells: dict[str, Estimate]
    stuck: int = 0
    kept: str | None = None
    at_once: frozenset[str] = frozenset()

    @property
    def marked(self) -> str:
        """The label of the method, with the mark ``STUCK`` if at least one run broke down."""
        return f"{self.label} {STUCK}" if self.stuck else self.label


@dataclass(frozen=True)
class Measure:
    """The display settings of a table column that shows one quantity, such as the final accuracy.

    Args:
        heading: The name of the column, with the unit.
        factor: The factor that converts recorded values to the unit in the heading.
        digits: The number of digits after the decimal point.
        bounds: The minimum and the maximum possible value, in the recorded unit.
    """

    heading: str
    factor: float = 1.0
    digits: int = 0
    bounds: Range = UNBOUNDED


SHARES = frozenset({"accuracy", "balanced-accuracy", "worst-class", "macro-f1", "auroc", "ece"})
"""The built-in metrics whose values are between 0 and 1."""

MEASURES = {
    "final_accuracy": Measure("final accuracy, %", 100, 2, (0, 1)),
    "best_accuracy": Measure("best accuracy, %", 100, 2, (0, 1)),
    "best_round": Measure("best round"),
    "rounds": Measure("rounds"),
    "samples": Measure("samples trained"),
    "bytes_up": Measure("MB up", 1e-6, 1),
    "bytes_down": Measure("MB down", 1e-6, 1),
    "seconds": Measure("seconds", 1, 1),
}
"""The columns of every table.

For each target accuracy T, the table also has a column ``rounds_to_T`` before ``samples``.

If the primary metric is not the accuracy, its final and best values come first, and the best accuracy has no column.
"""

_TARGET = "rounds_to_"
_TEST, _CLIENTS, _WORST = "test.", "clients.", ".worst_10"


def compare_table(runs: Mapping[str, Sequence[History]]) -> list[Row]:
    """Return one row per method, with estimates of all measures over the method's runs.

    For each target accuracy, a row contains the first round in which the method reached the target.

    Args:
        runs: A mapping from each method's label to the histories of its seeds.

    Returns:
        The rows. Each row has cells for the keys of ``MEASURES``, for ``final_M`` and ``best_M`` of the primary metric
        M, and for ``rounds_to_T`` of each target T. The cells ``test.NAME`` and ``clients.NAME.worst_10`` contain other
        metrics of the saved model. Accuracies are fractions, and amounts of data are in bytes. A target's cell is
        computed only from seeds that reached the target.
    """
    targets = sorted({target for members in runs.values() for history in members for target in history.targets})
    measured = sorted({name for members in runs.values() for history in members for name in _measured(history)})
    metric = primary(runs)
    first = list(dict.fromkeys([f"final_{metric}", f"best_{metric}", "best_round", "rounds", "final_accuracy"]))
    if all(history.final_accuracy is None for members in runs.values() for history in members):
        first = [key for key in first if key != "final_accuracy" or metric == "accuracy"]
    measured = [name for name in measured if name != column_of(metric)]
    rows = []
    for label, members in runs.items():
        summaries = [history.summary for history in members]
        cells = {key: Estimate.over(value(history, key) for history in members) for key in first}
        for target in targets:
            rounds = [history.rounds_to_target(target) for history in members]
            cells[f"{_TARGET}{target_text(target)}"] = Estimate.over(rounds)
        cells |= {name: Estimate.over(history.final(name) for history in members) for name in measured}
        cells |= {key: Estimate.over(summary[key] for summary in summaries) for key in list(MEASURES)[4:]}
        at_once = frozenset(key for key in cells if is_target(key) and all(_at_once(run, key) for run in members))
        stuck = sum(bool(history.warning) for history in members)
        rows.append(Row(label, len(members), cells, stuck, kept(members), at_once))
    return rows


def _measured(history: History) -> Iterator[str]:
    """Yield the columns of test metrics (except the accuracy), and of metrics for the worst tenth of the clients."""
    for name in history.columns:
        worst = name.startswith(_CLIENTS) and name.endswith(_WORST) and not name.startswith(f"{_CLIENTS}unheard.")
        if worst or (name.startswith(_TEST) and name != f"{_TEST}accuracy"):
            yield name


def worst_first(columns: Iterable[str], metric: str) -> list[str]:
    """Select and sort the columns that contain a metric's mean over the worst tenth of the clients.

    The column of ``metric`` comes first. Columns of metrics between 0 and 1 come next.

    >>> worst_first(["clients.log-loss.worst_10", "clients.auroc.worst_10", "clients.auroc.mean"], "accuracy")
    ['clients.auroc.worst_10', 'clients.log-loss.worst_10']
    """
    of_clients = [
        name for name in columns if name.startswith(_CLIENTS) and name.endswith(_WORST) and name.count(".") == 2
    ]
    return sorted(of_clients, key=lambda name: (metric_of(name) != metric, bounds(name)[1] > 1))


def primary(runs: Mapping[str, Sequence[History]]) -> str:
    """Return the runs' primary metric.

    If the runs differ in their primary metrics, return the metric of the first run.
    """
    return next((history.primary for members in runs.values() for history in members), "accuracy")


def kept(members: Sequence[History]) -> str | None:
    """Return a string that names the round of the saved model, such as ``round of the best validation auroc``.

    The result is None if all runs saved the model of the last round. The result is an empty string if at least one
    saved model is not from the round with the best validation result.
    """
    members = [history for history in members if history.saved is not None]
    if not members:
        return None
    best = all(history.best_on == "validation" and history.model_round == history.best_round for history in members)
    return f"round of the best validation {members[0].primary}" if best else ""


def is_of_metric(key: str) -> bool:
    """Return True for the keys ``final_M`` and ``best_M`` of a metric M.

    >>> is_of_metric("final_auroc"), is_of_metric("best_round")
    (True, False)
    """
    return key.startswith(("final_", "best_")) and key != "best_round"


def value(history: History, key: str) -> float | None:
    """Return a run's value for a key of the run's summary, or for a key ``final_M`` or ``best_M`` of a metric M."""
    if not is_of_metric(key):
        return history.summary[key]  # type: ignore[no-any-return]
    when, _, metric = key.partition("_")
    return (history.final if when == "final" else history.best)(column_of(metric))


def is_target(key: str) -> bool:
    """Return True for keys of the form ``rounds_to_T``, where T is a number.

    >>> is_target("rounds_to_0.8"), is_target("rounds_to_go")
    (True, False)
    """
    try:
        float(key.removeprefix(_TARGET))
    except ValueError:
        return False
    return key.startswith(_TARGET)


def reached(history: History, key: str) -> int | None:
    """Return the first round in which a run reached the target T of ``rounds_to_T``; None if it never did."""
    return history.rounds_to_target(float(key.removeprefix(_TARGET)))


def _at_once(history: History, key: str) -> bool:
    """Return True if a run has the default targets, and reached the target ``key`` in its first evaluated round."""
    first, _ = history.points("accuracy")
    return history.targets == TARGETS and len(first) > 0 and reached(history, key) == first[0]


def measure(key: str) -> Measure:
    """Return the display settings of a measure in a table: heading, factor and digits.

    >>> measure("rounds_to_0.8").heading, measure("best_auroc").heading
    ('rounds to 80 %', 'best auroc')
    """
    if is_target(key):
        return Measure(f"rounds to {float(key.removeprefix(_TARGET)) * 100:g} %")
    if key in MEASURES:
        return MEASURES[key]
    heading = key.replace("_", " ", 1)
    if key.startswith(_TEST):
        heading = f"final {key.removeprefix(_TEST)}"
    elif key.startswith(_CLIENTS):
        heading = f"final {key.removeprefix(_CLIENTS).removesuffix(_WORST)}, worst tenth of the clients"
    if metric_of(key) == "accuracy":
        return replace(MEASURES["final_accuracy"], heading=f"{heading}, %")
    return Measure(heading, 1, 4, bounds(key))


def bounds(key: str) -> Range:
    """Return the minimum and the maximum possible value of a measure or column.

    >>> bounds("final_auroc"), bounds("clients.macro-f1.worst_10"), bounds("test.log-loss")
    ((0, 1), (0, 1), (-inf, inf))
    """
    return (0, 1) if metric_of(key) in SHARES else UNBOUNDED


def metric_of(key: str) -> str:
    """Return the metric of a measure or column. If the key does not belong to a metric, return the key itself.

    >>> metric_of("best_auroc"), metric_of("test.auroc"), metric_of("clients.auroc.mean"), metric_of("bytes_up")
    ('auroc', 'auroc', 'auroc', 'bytes_up')
    """
    parts = (key.partition("_")[2] if is_of_metric(key) else key).split(".")
    return parts[-2] if len(parts) > 2 else parts[-1]


def show(row: Row, key: str) -> str:
    """Format a cell of a row.

    >>> show(Row("fedavg", 3, {"final_accuracy": Estimate(0.56, 0.0123, 3)}), "final_accuracy")
    '56.00 ± 1.23'
    >>> show(Row("fedavg", 3, {"best_round": Estimate(14.0, 2.0, 2)}), "best_round")
    '14 ± 2 (2 of 3)'
    """
    return shown(row.cells[key], measure(key), row.seeds)


def shown(cell: Estimate, how: Measure, seeds: int) -> str:
    """Format an estimate. If values of some seeds are missing, add the number of seeds with a value."""
    if cell.mean is None:
        return MISSING
    text = number(cell.mean, how)
    if cell.sd and float((spread := number(cell.sd, how)).replace(",", "")):  # Omit a deviation that rounds to 0.
        text += f" ± {spread}"
    return text + (f" ({cell.n} of {seeds})" if cell.n < seeds else "")


def number(value: float, how: Measure, sign: str = "") -> str:
    """Format a number in the unit of its column, with a typographic minus sign.

    >>> number(0.5, MEASURES["final_accuracy"], "+"), number(-1.0, MEASURES["rounds"])
    ('+50.00', '−1')
    """
    return f"{value * how.factor:{sign},.{how.digits}f}".replace("-", "−")


def keys(rows: Sequence[Row]) -> list[str]:
    """List the measures that get a column in the table.

    Leave out a target if no run reached it, or if all runs reached it in their first evaluated round.
    """
    every = list(rows[0].cells) if rows else []
    left_out = {key for key in every if is_target(key) and not any(row.cells[key].n for row in rows)}
    left_out |= frozenset.intersection(*(row.at_once for row in rows)) if rows else set()
    return [key for key in every if key not in left_out]


def caption(rows: Sequence[Row]) -> str:
    """Return sentences that explain the table's numbers, or an empty string if explanations are not needed."""
    sentences, counts = list[str](), sorted({row.seeds for row in rows})
    if counts and counts != [1]:
        seeds = f"{counts[0]} seeds" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
        sentences.append(f"Mean ± sample standard deviation over {seeds}.")
    sentences += of_kept({row.label: row.kept for row in rows})
    return " ".join([*sentences, *of_stuck({row.label: row.stuck for row in rows})])


def of_kept(models: Mapping[str, str | None]) -> list[str]:
    """Return a list of at most one sentence about the methods whose final values are not from the last round's model.

    Args:
        models: For each method, the result of ``kept``, which names the round of the saved model.

    >>> of_kept({"a": "round of the best validation auroc", "b": None})
    ['Final values of a are from the saved model (round of the best validation auroc).']
    """
    labels = [label for label, model in models.items() if model is not None]
    which = {model for model in models.values() if model is not None}
    whose = "" if len(labels) == len(models) else f" of {', '.join(labels)}"
    why = f" ({which.pop()})" if len(which) == 1 and which != {""} else ""
    return [f"Final values{whose} are from the saved model{why}."] if labels else []


def of_stuck(stuck: Mapping[str, int]) -> list[str]:
    """Return a list with one sentence about the runs that broke down (see ``Row.stuck``), or an empty list.

    Args:
        stuck: A mapping from each method's label to its number of runs that broke down.

    >>> of_stuck({"fedavg": 0, "wild": 2})
    ['† 2 runs of wild broke down: no reply could be used from some round to the end.']
    """
    counts = [f"{count} run{'' if count == 1 else 's'} of {label}" for label, count in stuck.items() if count]
    return (
        [f"{STUCK} {', '.join(counts)} broke down: no reply could be used from some round to the end."]
        if counts
        else []
    )


def to_markdown(rows: Sequence[Row]) -> str:
    """Return the table in Markdown, with a caption if its numbers need explanations."""
    shown = keys(rows)
    headings = ["", *(measure(key).heading for key in shown)]
    text = markdown_table(headings, [[row.marked, *(show(row, key) for key in shown)] for row in rows])
    return text + (f"\n{printable(caption(rows))}\n" if caption(rows) else "")


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Return a table in Markdown. The first ``left`` columns are aligned to the left.

    >>> print(markdown_table(["", "n"], [["a", "1"]]), end="")
    |  | n |
    | --- | ---: |
    | a | 1 |
    """
    rules = ["---" if i < left else "---:" for i in range(len(headings))]
    return "".join(map(markdown_row, (headings, rules, *rows)))


def markdown_row(cells: Iterable[str]) -> str:
    r"""Return a row of a table in Markdown.

    >>> print(markdown_row(["a|b\n", "1"]), end="")
    | a\|b\\n | 1 |
    """
    safe = (printable(cell).replace("\\", r"\\").replace("|", r"\|") for cell in cells)
    return f"| {' | '.join(safe)} |\n"


def to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows as dicts for JSON: the label, the seeds, and the mean, ``sd`` and ``n`` of each measure.

    If runs of a method broke down, ``stuck`` is the number of these runs. If final values come from a model that was
    saved before the last round, ``kept`` names the round of this model.
    """
    return [
        {"label": row.label, "seeds": row.seeds}
        | ({"stuck": row.stuck} if row.stuck else {})
        | ({"kept": row.kept} if row.kept is not None else {})
        | {key: {"mean": cell.mean, "sd": cell.sd, "n": cell.n} for key, cell in row.cells.items()}
        for row in rows
    ]
