"""What the charts of the page show, as plain values: curves, who took part, and heat maps of classes and clients."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any

import numpy as np

from fedstrata.base.errors import SpecError
from fedstrata.evaluation.history import MODEL, STANDARD, History
from fedstrata.reporting.contrasts import BUDGETS
from fedstrata.reporting.draw import FATES, Dash, Floats, Quantity, look, over_seeds, quantity, spent
from fedstrata.reporting.runs import Run, histories
from fedstrata.reporting.statistics import Estimate

NUMBERS = 300_000
"""Of all curves of a data set together, about; a page stays small enough to be sent by mail."""
POINTS = 400
"""A curve has so many at most."""
OWN = 24
"""A method's own columns that can be drawn."""
BARS = 240
"""A strip has so many at most; rounds beyond share one."""
CLASSES = 40
"""Of up to so many classes the confusion is shown."""
CLIENTS = 200
"""Clients that are shown of more, evenly chosen."""
CELLS = 80_000
"""Of all heat maps of clients together, at most."""

DASHES: dict[Dash, list[int]] = {"-": [], "--": [8, 4], ":": [2, 3], "-.": [8, 3, 2, 3]}
"""Pixels that are drawn and left out by turns."""

FATE_NAMES = (*(name for name, _ in FATES.values()), "refused")
"""What becomes of the invited clients, in the order in which it is stacked."""

_WHO = {
    "test": "test",
    "validation": "validation",
    "clients": "clients",
    "test_clients": "test clients",
    "personal": "personal models",
}
_WHICH = {"mean": "mean", "worst_10": "worst tenth"}
_PLACES = ("client", "in_partition", "train_samples", "samples")
"""Columns of the table of clients that tell nothing of how they fare."""


def chart_data(runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Everything that is drawn about the runs on one data set, ready for JSON.

    Args:
        runs: By label.
    """
    members = histories(runs)
    names = curve_names(members)
    axes = [key for key, budget in BUDGETS.items() if any(_total(h, key) for each in members.values() for h in each)]
    several = any(len(each) > 1 for each in members.values())
    points = min(POINTS, NUMBERS // max(len(runs) * len(names) * (2 if several else 1), 1))
    return {
        "methods": [
            {
                "name": label,
                "seeds": len(each),
                "colour": look(number)[0],
                "dash": DASHES[look(number)[1]],
                "final": _estimate(Estimate.over(history.final_accuracy for history in each), 100),
                "ends": {key: _short(fmean(_total(h, key) for h in each)) for key in axes},
                **_curves(each, names, axes, points),
            }
            for number, (label, each) in enumerate(members.items())
        ],
        "axes": [{"key": "round", "name": "round"}] + [{"key": key, "name": _axis(key)} for key in axes],
        "metrics": [{"key": key, "name": named(key).name, "own": is_own(key)} for key in names],
        "fates": [[fates(run) for run in each] for each in runs.values()],
        "fate_names": FATE_NAMES,
        "classes": _classes(runs),
        "clients": _clients(runs),
    }


def _axis(key: str) -> str:
    budget = BUDGETS[key]
    words = {
        "bytes": "sent and received",
        "samples": "samples trained",
        "seconds": "time",
        "simulated_seconds": "simulated time",
    }[key]
    unit = budget.unit.removeprefix("simulated ")
    return words if unit == "samples" else f"{words}, {unit}"


def _total(history: History, key: str) -> float:
    return BUDGETS[key].factor * sum(history.total(column) for column in BUDGETS[key].columns)


def curve_names(runs: Mapping[str, Sequence[History]]) -> list[str]:
    """The columns that can be drawn over the rounds: those of the evaluation first, then methods' own that change."""
    every: dict[str, bool] = {}  # and whether it changes in some run
    for history in (history for members in runs.values() for history in members):
        for name in history.columns:
            changes = is_own(name) and not every.get(name) and len(set(history.column(name)[1].tolist())) > 1
            every[name] = every.get(name, False) or changes
    measured = [name for name in every if _is_measured(name)]
    own = [name for name, changes in every.items() if changes]
    return [*(name for name in ("accuracy", "loss", "train_loss") if name in every), *measured, *own[:OWN]]


def _is_measured(name: str) -> bool:
    table, _, rest = name.partition(".")
    if table in ("test", "validation"):
        return name != "test.accuracy" and bool(rest)
    return table in _WHO and rest.rpartition(".")[2] in _WHICH


def is_own(name: str) -> bool:
    """Whether a column is one that only some methods record."""
    return name not in STANDARD and name.partition(".")[0] not in (*_WHO, "bytes_evaluation")


def named(key: str) -> Quantity:
    """How a column is called and scaled.

    >>> named("clients.accuracy.worst_10").name, named("validation.loss").name, named("test.ece").factor
    ('clients: accuracy, worst tenth, %', 'validation loss', 1.0)
    """
    table, *rest = key.split(".")
    if table not in _WHO or not rest:
        return quantity(key)
    who, name = _WHO[table], rest[0]
    if table not in ("test", "validation"):
        who += ", unheard" if rest[0] == "unheard" else ""
        name = rest[-2]
        words = f"{who}: {name}, {_WHICH[rest[-1]]}"
    else:
        words = f"{who} {name}"
    return Quantity(f"{words}, %", 100) if name.endswith("accuracy") else Quantity(words)


def _curves(members: Sequence[History], names: Sequence[str], axes: Sequence[str], points: int) -> dict[str, Any]:
    """Means and deviations over seeds at some rounds, and what was spent until each of them."""
    bands = {}
    for name in names:
        with suppress(SpecError):  # a column of other methods
            bands[name] = over_seeds(members, name)
    rounds = _thin([band.rounds for name, band in bands.items()], points)
    found: dict[str, Any] = {"round": rounds.tolist(), "y": {}}
    for key in axes:
        mean = np.mean([spent(history, BUDGETS[key].columns, rounds) for history in members], axis=0)
        found[key] = _list(mean * BUDGETS[key].factor)
    for name, band in bands.items():
        if not len(band.rounds):
            continue
        factor, place = named(name).factor, {round: i for i, round in enumerate(band.rounds.tolist())}
        at = [place.get(round) for round in rounds.tolist()]
        found["y"][name] = [
            [None if i is None else _short(values[i] * factor) for i in at]
            for values in ([band.mean, band.sd] if band.sd.any() else [band.mean])
        ]
    return found


def _thin(of: Sequence[np.ndarray[Any, Any]], points: int) -> np.ndarray[Any, Any]:
    """All rounds that any column has; of too many those that the first column has, and of those evenly chosen ones."""
    every = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *of]))
    if len(every) > points and of and len(of[0]):
        every = of[0]
    places = np.linspace(0, max(len(every) - 1, 0), min(len(every), max(points, 2))).astype(np.int64)
    return every[places]


def fates(run: Run) -> dict[str, Any]:
    """What became of the invited clients of a run: for each bar counts by ``FATE_NAMES``.

    Returns:
        ``run``, its ``rounds``, how many ``each`` bar has, and ``counts``, a list a fate. A client whose answer was
        refused is among the failed ones of the records; its event tells it from those.
    """
    refused: dict[int, set[Any]] = {}
    for event in run.events:
        if event.get("kind") == "refused":
            refused.setdefault(event["round"], set()).update(event.get("clients", []))
    rounds = len(run.history)
    each = max(-(-rounds // BARS), 1)
    table = np.zeros((len(FATE_NAMES), -(-rounds // each)), dtype=np.int64)
    for place, record in enumerate(run.history):
        counts = [int(record.get(column) or 0) for column in FATES]
        wrong = min(len(refused.get(record["round"], ())), counts[-1])
        table[:, place // each] += [*counts[:-1], counts[-1] - wrong, wrong]
    return {"run": run.name, "rounds": rounds, "each": each, "counts": table.tolist()}


def _classes(runs: Mapping[str, Sequence[Run]]) -> dict[str, Any] | None:
    """Accuracy of each class by method, in percent, and what was taken for what; None where nothing was recorded."""
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
    found = [row for history in members if (row := _last_classes(history)) is not None]
    if not found or len({len(row) for row in found}) > 1:
        return None
    table = np.array(found)
    known = ~np.isnan(table)
    counts = known.sum(axis=0)
    return np.where(counts > 0, np.where(known, table, 0).sum(axis=0) / np.maximum(counts, 1), np.nan)


def _last_classes(history: History) -> Floats | None:
    for record in reversed(history):
        if isinstance(row := record.get("per_class"), list):
            return np.array(row, dtype=np.float64)
    if (last := history.confusion.get("last")) is None:
        return None
    samples = last.counts.sum(axis=1)
    return np.where(samples > 0, np.diag(last.counts) / np.maximum(samples, 1), np.nan)


def _confusion(members: Sequence[Run]) -> list[list[int]] | None:
    """The last confusion matrices of the seeds, added up."""
    found = [run.history.confusion["last"].counts for run in members if "last" in run.history.confusion]
    if not found or len({counts.shape for counts in found}) > 1:
        return None
    table: list[list[int]] = np.sum(found, axis=0).tolist()
    return table


def _class_names(run: Run) -> list[str]:
    with suppress(OSError, ValueError, AttributeError, TypeError):  # a run that has not ended has none
        return [str(name) for name in json.loads((run.folder / MODEL).read_text(encoding="utf-8"))["class_names"]]
    return []


def _clients(runs: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """How each client fares with each method: a heat map a seed and column, since seeds divide the data differently."""
    found = list[dict[str, Any]]()
    for seed in dict.fromkeys(run.name for members in runs.values() for run in members):
        tables = [
            next(({row["client"]: row for row in run.history.clients} for run in members if run.name == seed), {})
            for members in runs.values()
        ]
        columns = dict.fromkeys(_numbers(row for table in tables for row in table.values()))
        if not columns:
            continue
        clients = sorted(
            {client for table in tables for client in table}, key=lambda client: (str(type(client)), client)
        )
        main = np.array(
            [[_number(table.get(client, {}).get(next(iter(columns)))) for client in clients] for table in tables]
        )
        known = ~np.isnan(main)
        order = np.argsort(np.where(known, main, 0).sum(axis=0) / np.maximum(known.sum(axis=0), 1), kind="stable")
        shown = [clients[i] for i in order[np.linspace(0, len(order) - 1, min(len(order), CLIENTS)).astype(np.int64)]]
        for column in columns:
            values = [[_number(table.get(client, {}).get(column)) for client in shown] for table in tables]
            if (len(found) + 1) * len(shown) * len(runs) > CELLS:
                return found
            found.append(
                {
                    "seed": seed,
                    "column": column,
                    "percent": column.endswith("accuracy"),
                    "clients": shown,
                    "of": len(clients),
                    "rows": [
                        _list(np.array(row)) if table else None for row, table in zip(values, tables, strict=True)
                    ],
                }
            )
    return found


def _numbers(rows: Iterator[dict[str, Any]]) -> Iterator[str]:
    """Measures of the clients; how often each was heard comes last."""
    names = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, (int, float)))
    yield from (name for name in names if name not in (*_PLACES, "heard"))
    yield from (name for name in names if name == "heard")


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else np.nan


def _estimate(value: Estimate, factor: float) -> list[float | None]:
    return [None if each is None else _short(each * factor) for each in (value.mean, value.sd)]


def _list(values: Floats) -> list[float | None]:
    return [None if np.isnan(value) else _short(value) for value in values.tolist()]


def _short(value: float) -> float:
    """Five digits, which no eye can tell from more."""
    short = float(f"{value:.5g}")
    return int(short) if short.is_integer() else short
