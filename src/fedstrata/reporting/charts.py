"""Prepare the data of the charts in the HTML report (curves, participation and heat maps), as values for JSON."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any

import numpy as np

from fedstrata.base import style
from fedstrata.base.arrays import Floats
from fedstrata.base.errors import SpecError
from fedstrata.base.style import Dash
from fedstrata.evaluation.history import MODEL, STANDARD, Confusion, History, column_of
from fedstrata.reporting import tables
from fedstrata.reporting.contrasts import BUDGETS
from fedstrata.reporting.draw import FATES, Quantity, over_seeds, quantity, spent
from fedstrata.reporting.runs import Run, histories
from fedstrata.reporting.statistics import Estimate

NUMBERS = 300_000
"""The approximate maximum number of values in all curves of a data set, to keep the page small enough for e-mail."""
POINTS = 400
"""The maximum number of points per curve."""
OWN = 24
"""For columns that only some methods record, the maximum number of columns to draw."""
BARS = 240
"""The maximum number of bars in the participation chart. If a run has more rounds, each bar covers several rounds."""
CLASSES = 40
"""The maximum number of classes for which confusion matrices are shown."""
CLIENTS = 200
"""The maximum number of clients in a heat map. If there are more clients, an evenly spaced selection is shown."""
CELLS = 80_000
"""The maximum number of cells (pairs of a method and a client) in all heat maps together."""

DASHES: dict[Dash, list[int]] = {"-": [], "--": [8, 4], ":": [2, 3], "-.": [8, 3, 2, 3]}
"""A mapping from each line style to the lengths of its dashes and gaps in pixels."""

FATE_NAMES = tuple(style.FATES)
"""The outcomes of invited clients, in the order in which the participation chart stacks them."""

_SOURCES = {name: name.replace("_", " ") for name in ("test", "validation", "clients", "test_clients")}
_SOURCES["personal"] = "personal models"
_STATISTICS = {"mean": "mean", "worst_10": "worst tenth"}
_NOT_METRICS = ("client", "name", "in_partition", "train_samples", "samples")
"""In the table of clients, the columns that do not contain metrics."""


def strokes(labels: Sequence[str], ranked: Sequence[str]) -> dict[str, style.Stroke]:
    """Choose a line style for each method.

    If there are more methods than colours, only the baseline and the best methods have colours.

    Args:
        labels: The methods' labels in the order of the comparison, with the baseline first.
        ranked: The methods' labels, sorted from the best method to the worst method.
    """
    if len(labels) <= len(style.SERIES):
        return style.lines(labels)
    coloured = {*labels[:1], *[label for label in ranked if label != labels[0]][: style.COLOURED - 1]}
    return style.lines(sorted(labels, key=lambda label: label not in coloured))


def chart_data(runs: Mapping[str, Sequence[Run]], lines: Mapping[str, style.Stroke] | None = None) -> dict[str, Any]:
    """Return the data of all charts about the runs on one data set, as values that JSON can represent.

    Args:
        runs: A mapping from each method's label to its runs, one per seed.
        lines: The line style of each method. Default: the result of ``style.lines``.
    """
    lines = style.lines(list(runs)) if lines is None else lines
    members = histories(runs)
    names, primary = curve_names(members), tables.primary(members)
    final = f"final_{primary}"
    how = tables.measure(final)
    axes = [key for key, budget in BUDGETS.items() if any(_total(h, key) for each in members.values() for h in each)]
    several = any(len(each) > 1 for each in members.values())
    lower = {metric for each in members.values() for history in each for metric in history.lower}
    points = min(POINTS, NUMBERS // max(len(runs) * len(names) * (2 if several else 1), 1))
    return {
        "methods": [
            {
                "name": label,
                "seeds": len(each),
                "colour": lines[label].name,
                "dash": DASHES[lines[label].dash],
                "final": _estimate(Estimate.over(tables.value(history, final) for history in each), how.factor),
                "ends": {key: _short(fmean(_total(h, key) for h in each)) for key in axes},
                **_curves(each, names, axes, points),
            }
            for label, each in members.items()
        ],
        "primary": {
            "key": column_of(primary),
            "final": how.heading,
            "lower": primary in lower,
        },
        "axes": [{"key": "round", "name": "round"}] + [{"key": key, "name": BUDGETS[key].axis} for key in axes],
        "metrics": [_metric(key, lower) for key in names],
        "fates": [[fates(run) for run in each] for each in runs.values()],
        "fate_names": FATE_NAMES,
        "absences": _absences(runs),
        "classes": _classes(runs),
        "clients": _clients(runs),
    }


def has_costs(charts: Mapping[str, Any]) -> bool:
    """Return True if curves can be drawn with a cost, such as bytes, on the horizontal axis."""
    methods = charts["methods"]
    return len(methods) > 1 and len(charts["axes"]) > 1 and any(each["final"][0] is not None for each in methods)


def _total(history: History, key: str) -> float:
    return BUDGETS[key].factor * sum(history.total(column) for column in BUDGETS[key].columns)


def _metric(key: str, lower: Collection[str]) -> dict[str, Any]:
    """Return a column's name with the unit, the limits of values in this unit, and the direction of better values.

    Args:
        key: The column.
        lower: The metrics for which lower values are better.
    """
    metric, shown = tables.metric_of(key), named(key)
    ends = (0, 1) if shown.factor == 100 else tables.bounds(key)
    low, high = (_short(end * shown.factor) if np.isfinite(end) else None for end in ends)
    better = -1 if metric in lower or metric.endswith("loss") else 1 if high is not None else 0
    return {"key": key, "name": shown.name, "own": is_own(key), "low": low, "high": high, "better": better}


def curve_names(runs: Mapping[str, Sequence[History]]) -> list[str]:
    """List the columns that can be drawn over rounds: first the primary metric, then the other metrics.

    Columns that only some methods record come last, and are left out if their values never change.
    """
    changes: dict[str, bool] = {}
    """For each column that only some methods record, whether the column's values change in any run."""
    for history in (history for members in runs.values() for history in members):
        for name in history.columns:
            varies = is_own(name) and not changes.get(name) and len(set(history.column(name)[1].tolist())) > 1
            changes[name] = changes.get(name, False) or varies
    main = [name for name in (column_of(tables.primary(runs)), "accuracy", "loss", "train_loss") if name in changes]
    of_methods = [name for name in changes if changes[name]][:OWN]
    return list(dict.fromkeys([*main, *filter(_is_measured, changes), *of_methods]))


def _is_measured(name: str) -> bool:
    table, _, rest = name.partition(".")
    if table in ("test", "validation"):
        return name != "test.accuracy" and bool(rest)
    return table in _SOURCES and rest.rpartition(".")[2] in _STATISTICS


def is_own(name: str) -> bool:
    """Return True if only some methods record the column."""
    return name not in STANDARD and name.partition(".")[0] not in (*_SOURCES, "bytes_evaluation")


def named(key: str) -> Quantity:
    """Return a column's name in charts (with the unit), and the factor that converts recorded values to this unit.

    >>> named("clients.accuracy.worst_10").name, named("validation.loss").name, named("test.ece").factor
    ('clients: accuracy, worst tenth, %', 'validation loss', 1.0)
    """
    table, *rest = key.split(".")
    if table not in _SOURCES or not rest:
        return quantity(key)
    source, name = _SOURCES[table], rest[0]
    words = f"{source} {name}"
    if table not in ("test", "validation"):
        source += ", unheard" if name == "unheard" else ""
        name = rest[-2]
        words = f"{source}: {name}, {_STATISTICS[rest[-1]]}"
    return Quantity(f"{words}, %", 100) if name.endswith("accuracy") else Quantity(words)


def _curves(members: Sequence[History], names: Sequence[str], axes: Sequence[str], points: int) -> dict[str, Any]:
    """Return a method's curves: the mean and the standard deviation of each column over seeds, in selected rounds.

    For each resource in ``axes``, the result also contains the amount that was spent until each selected round.

    Args:
        members: The histories of a method, one per seed.
        names: The columns to draw.
        axes: The keys of ``BUDGETS`` for possible horizontal axes.
        points: The maximum number of rounds to select.
    """
    bands = {}
    for name in names:
        with suppress(SpecError):  # Some federated methods do not record the column.
            bands[name] = over_seeds(members, name)
    rounds = _thin([band.rounds for band in bands.values()], points)
    curves: dict[str, Any] = {"round": rounds.tolist(), "y": {}}
    for key in axes:
        mean = np.mean([spent(history, BUDGETS[key].columns, rounds) for history in members], axis=0)
        curves[key] = _list(mean * BUDGETS[key].factor)
    for name, band in bands.items():
        if not len(band.rounds):
            continue
        factor, index = named(name).factor, {round: i for i, round in enumerate(band.rounds.tolist())}
        curves["y"][name] = [
            [None if (i := index.get(round)) is None else _short(values[i] * factor) for round in rounds.tolist()]
            for values in ([band.mean, band.sd] if band.sd.any() else [band.mean])
        ]
    return curves


def _thin(rounds: Sequence[np.ndarray[Any, Any]], points: int) -> np.ndarray[Any, Any]:
    """Select the rounds to draw: all rounds in which at least one column has a value.

    If there are too many rounds, evenly spaced rounds are selected from the rounds in which the first column has a
    value.

    Args:
        rounds: One array per column, shape (R,): the rounds in which the column has values.
        points: The maximum number of rounds to select.
    """
    every = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *rounds]))
    if len(every) > points and rounds and len(rounds[0]):
        every = rounds[0]
    chosen = np.linspace(0, max(len(every) - 1, 0), min(len(every), max(points, 2))).astype(np.int64)
    return every[chosen]


def fates(run: Run) -> dict[str, Any]:
    """For each bar of the participation chart, count the invited clients by outcome, such as a dropout.

    In the records, refused replies are included in the failures. This function counts refused replies separately,
    with the help of the run's events.

    Returns:
        A dict for JSON with the keys ``run`` (the run's name), ``rounds`` (the number of rounds), ``each`` (the number
        of rounds per bar) and ``counts`` (a list for each name in ``FATE_NAMES``, with one count per bar).
    """
    refused: dict[int, set[Any]] = {}
    for event in run.events:
        if event.get("kind") == "refused":
            refused.setdefault(event["round"], set()).update(event.get("clients", []))
    rounds = len(run.history)
    each = max(-(-rounds // BARS), 1)
    table = np.zeros((len(FATE_NAMES), -(-rounds // each)), dtype=np.int64)
    for index, record in enumerate(run.history):
        *counts, failed = (int(record.get(column) or 0) for column in FATES)
        n_refused = min(len(refused.get(record["round"], ())), failed)
        table[:, index // each] += [*counts, failed - n_refused, n_refused]
    return {"run": run.name, "rounds": rounds, "each": each, "counts": table.tolist()}


def absences(run: Run, classes: int) -> dict[str, Any] | None:
    """Return, for each class, the rounds in which no client with samples of the class replied; None if not recorded.

    Args:
        run: The run.
        classes: The number of classes.

    Returns:
        A dict for JSON. The keys ``run``, ``rounds`` and ``each`` have the same meaning as in ``fates``. The key
        ``some`` contains the number of rounds in which at least one class was absent. The key ``rows`` contains a
        string for each class, with one digit per bar. The digit is 4 f, rounded up, where f is the
        fraction of the bar's rounds in which the class was absent.
    """
    rounds = len(run.history)
    each = max(-(-rounds // BARS), 1)
    absent = np.zeros((classes, -(-rounds // each) * each), dtype=bool)
    for index, record in enumerate(run.history):
        if (row := record.get("classes_absent")) is None:
            return None
        absent[row, index] = True
    fraction = absent.reshape(classes, -1, each).sum(axis=2) / np.minimum(each, rounds - np.arange(0, rounds, each))
    levels = np.ceil(4 * fraction).astype(np.int64).tolist()
    rows = ["".join(map(str, row)) for row in levels]
    return {"run": run.name, "rounds": rounds, "each": each, "some": int(absent.any(axis=0).sum()), "rows": rows}


def _absences(runs: Mapping[str, Sequence[Run]]) -> dict[str, Any] | None:
    """Return the absences of classes in all runs, and the class names; None for more than ``CLASSES`` classes."""
    names = next((names for members in runs.values() for run in members if (names := _class_names(run))), [])
    if not 0 < len(names) <= CLASSES:
        return None
    rows = [[absences(run, len(names)) for run in members] for members in runs.values()]
    return {"names": names, "runs": rows} if any(each is not None for row in rows for each in row) else None


def _classes(runs: Mapping[str, Sequence[Run]]) -> dict[str, Any] | None:
    """Return each method's accuracy per class (in percent) and confusion matrix; None if neither was recorded."""
    rows = [_class_accuracy([run.history for run in members]) for members in runs.values()]
    counts = max((len(row) for row in rows if row is not None), default=0)
    if not counts:
        return None
    names = next((names for members in runs.values() for run in members if (names := _class_names(run))), [])
    return {
        "names": names if len(names) == counts else [str(label) for label in range(counts)],
        "rows": [None if row is None or len(row) != counts else _list(100 * row) for row in rows],
        "confusion": [_confusion(members) if counts <= CLASSES else None for members in runs.values()],
    }


def _class_accuracy(members: Sequence[History]) -> Floats | None:
    rows = [row for history in members if (row := _last_classes(history)) is not None]
    if not rows or len({len(row) for row in rows}) > 1:
        return None
    return _means(np.array(rows), np.nan)


def _means(table: Floats, empty: float) -> Floats:
    """Return the mean of each column, ignoring NaN. The mean of a column that contains only NaN is ``empty``."""
    known = ~np.isnan(table)
    counts = known.sum(axis=0)
    return np.where(counts > 0, np.where(known, table, 0).sum(axis=0) / np.maximum(counts, 1), empty)


def _last_classes(history: History) -> Floats | None:
    for record in reversed(history) if history.saved is None else [history.saved]:
        if isinstance(row := record.get("per_class"), list):
            return np.array(row, dtype=np.float64)
    if (last := _matrix(history)) is None:
        return None
    samples = last.counts.sum(axis=1)
    return np.where(samples > 0, np.diag(last.counts) / np.maximum(samples, 1), np.nan)


def _confusion(members: Sequence[Run]) -> list[list[int]] | None:
    """Return the sum of all seeds' last confusion matrices; None without matrices, or if sizes differ."""
    matrices = [matrix.counts for run in members if (matrix := _matrix(run.history)) is not None]
    if not matrices or len({matrix.shape for matrix in matrices}) > 1:
        return None
    table: list[list[int]] = np.sum(matrices, axis=0).tolist()
    return table


def _matrix(history: History) -> Confusion | None:
    """Return the confusion matrix of the saved model; None if the matrix was not recorded."""
    matrix = history.confusion.get("last")
    if history.model_round is not None:
        matrix = next((each for each in history.confusion.values() if each.round == history.model_round), None)
    return matrix if matrix is not None and matrix.counts.size else None  # Without classes, the matrix is empty.


def _class_names(run: Run) -> list[str]:
    with suppress(OSError, ValueError, AttributeError, TypeError):  # An unfinished run does not have this file.
        return [str(name) for name in json.loads((run.folder / MODEL).read_text(encoding="utf-8"))["class_names"]]
    return []


def _by_name(rows: Iterable[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Return a mapping from each client's name to its row. Clients without names are represented by their ids."""
    return {row.get("name", row["client"]): row for row in rows}


def _clients(runs: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """Return one heat map (methods × clients) for each seed and metric.

    Results are not averaged over seeds, because a client's samples depend on the seed.
    """
    maps = list[dict[str, Any]]()
    for seed in dict.fromkeys(run.name for members in runs.values() for run in members):
        tables = [
            next((_by_name(run.history.clients) for run in members if run.name == seed), {})
            for members in runs.values()
        ]
        columns = _numbers(row for table in tables for row in table.values())
        if not columns:
            continue
        clients = sorted({client for table in tables for client in table}, key=lambda each: (str(type(each)), each))
        values = np.array(
            [
                [[_number(table.get(client, {}).get(column)) for client in clients] for table in tables]
                for column in columns
            ]
        )
        order = np.argsort(_means(values[0], 0.0), kind="stable")
        shown = order[np.linspace(0, len(order) - 1, min(len(order), CLIENTS)).astype(np.int64)]
        for column, rows in zip(columns, values[:, :, shown], strict=True):
            if (len(maps) + 1) * len(shown) * len(runs) > CELLS:
                return maps
            maps.append(
                {
                    "seed": seed,
                    "column": column,
                    "percent": column.endswith("accuracy"),
                    "clients": [clients[i] for i in shown],
                    "of": len(clients),
                    "rows": [_list(row) if table else None for row, table in zip(rows, tables, strict=True)],
                }
            )
    return maps


def _numbers(rows: Iterator[dict[str, Any]]) -> list[str]:
    """List the metrics in the tables of clients; ``heard``, the round of the client's last used reply, comes last."""
    names = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, (int, float)))
    return sorted((name for name in names if name not in _NOT_METRICS), key=lambda name: name == "heard")


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else np.nan


def _estimate(value: Estimate, factor: float) -> list[float | None]:
    return [None if each is None else _short(each * factor) for each in (value.mean, value.sd)]


def _list(values: Floats) -> list[float | None]:
    return [None if np.isnan(value) else _short(value) for value in values.tolist()]


def _short(value: float) -> float:
    """Round a number to five significant digits, which are enough for a chart."""
    short = float(f"{value:.5g}")
    return int(short) if short.is_integer() else short
