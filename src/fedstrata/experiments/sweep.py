"""A grid of settings, and which of its cells is best on samples that nobody trained on or tests on."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedstrata.base.errors import SpecError
from fedstrata.base.jsonl import replace_file, write_json
from fedstrata.evaluation.history import History
from fedstrata.experiments.compare import Watcher, compare
from fedstrata.reporting.statistics import Estimate
from fedstrata.spec.experiment import Experiment, set_key

MEASURE = "validation.accuracy"
"""What a cell is judged by: the accuracy on the validation samples in the last evaluated round."""
TABLE, FIGURES, BEST = "sweep.md", "sweep.json", "best.toml"
"""What a sweep's folder holds beside its runs."""


@dataclass(frozen=True)
class Cell:
    """One setting of the grid.

    Args:
        settings: The value of each key that is tried.
        spec: The experiment with them.
    """

    settings: dict[str, Any]
    spec: Experiment


@dataclass(frozen=True)
class Sweep:
    """What a sweep found.

    Args:
        cells: By label, in the order of the grid.
        histories: Their runs, one a seed.
        values: The validation accuracy of each cell over seeds.
        best: The label of the best cell; None where no cell has a validation accuracy of every seed.
        notes: What is to be said of some of them, such as that it never took a step; none of those is the best.
    """

    cells: dict[str, Cell]
    histories: dict[str, list[History]]
    values: dict[str, Estimate]
    best: str | None
    notes: dict[str, str] = field(default_factory=dict)


def sweep(
    table: Mapping[str, Any],
    grid: Mapping[str, Sequence[Any]],
    *,
    out: str | Path,
    seeds: Sequence[int] | None = None,
    jobs: int | None = None,
    watch: Watcher | None = None,
    progress: bool = False,
) -> Sweep:
    """Run every cell of a grid with every seed, and write one table and the best spec.

    Cells are runs as ``compare`` makes them: those that ``out`` holds are not repeated, and what was broken off goes on
    from its last checkpoint. The best cell has the highest mean accuracy on the validation samples; the first of
    several that are alike.

    Args:
        table: The spec's tables, as ``tomllib`` reads them; ``evaluation.validation`` is needed.
        grid: The values to try of each ``section.key``.
        out: The folder; a run goes to ``KEY=VALUE,…/seed-S/``.
        seeds: Each cell runs once with each; the spec's own one unless given.
        jobs: Runs at the same time; as many as there are processors unless given.
        watch: Told label, seed and rounds done.
        progress: Show how far it is; see ``compare``.

    Raises:
        SpecError: A setting is wrong, or nothing is held out for validation; every cell is checked first.
    """
    planned = cells(table, grid)
    specs = {label: cell.spec for label, cell in planned.items()}
    seeds = [Experiment.from_table(table).seed] if seeds is None else seeds
    histories = compare(specs, seeds=seeds, out=out, jobs=jobs, watch=watch, progress=progress, report=False)
    found = judge(planned, histories)
    write(found, Path(out))
    return found


def write(found: Sweep, out: Path) -> None:
    """Write the table, its figures and the best spec."""
    write_json(out / FIGURES, figures(found))
    replace_file(out / TABLE, to_markdown(found).encode())
    if found.best is not None:
        replace_file(out / BEST, found.cells[found.best].spec.to_toml().encode())
    else:
        (out / BEST).unlink(missing_ok=True)


def cells(table: Mapping[str, Any], grid: Mapping[str, Sequence[Any]]) -> dict[str, Cell]:
    """The cells of a grid by label, such as ``lr=0.1,mu=1``; the last key changes fastest.

    Raises:
        SpecError: There is nothing to try, a setting is wrong, or nothing is held out for validation.
    """
    if not grid or not all(grid.values()):
        raise SpecError("--set", "a sweep needs a setting with values to try, such as training.lr=0.01,0.1")
    names = {key: key.rpartition(".")[2] for key in grid}
    ends = list(names.values())
    names = {key: end if ends.count(end) == 1 else key for key, end in names.items()}
    found: dict[str, Cell] = {}
    for values in itertools.product(*grid.values()):
        settings = dict(zip(grid, values, strict=True))
        tables = copy.deepcopy(dict(table))
        for key, value in settings.items():
            set_key(tables, key, value, f"{key}={value}")
        label = ",".join(f"{names[key]}={value}" for key, value in settings.items()).replace("/", "_")
        if label in found:
            raise SpecError("--set", "a value to try is there twice, or cannot be told from another one", label)
        found[label] = Cell(settings, Experiment.from_table(tables))
    for cell in found.values():
        refuse_unvalidated(cell.spec)
    return found


def refuse_unvalidated(spec: Experiment) -> None:
    """Raise ``SpecError`` where nothing is held out to pick the best by."""
    if spec.evaluation.validation is None:
        problem = "needed: a sweep picks the best by samples held out for it, never by the test set; such as 0.1"
        raise SpecError("evaluation.validation", problem)


def judge(
    planned: Mapping[str, Cell], histories: Mapping[str, Sequence[History]], notes: Mapping[str, str] | None = None
) -> Sweep:
    """The validation accuracy of each cell, and the best cell.

    Args:
        planned: The cells.
        histories: Their runs.
        notes: Why some of them cannot be the best; nor can those with a seed that has no accuracy or took no step.
    """
    notes = dict(notes or {})
    for label in planned:
        if any(history.warning for history in histories[label]):
            notes.setdefault(label, "never took a step: no reply could be used")
    values = {label: Estimate.over(map(validated, histories[label])) for label in planned}
    whole = {label: each.mean for label, each in values.items() if each.n == len(histories[label]) and each.n}
    best = max((label for label in whole if label not in notes), key=lambda label: whole[label] or 0.0, default=None)
    return Sweep(dict(planned), {label: list(histories[label]) for label in planned}, values, best, notes)


def validated(history: History) -> float | None:
    """The accuracy on the validation samples in the last round that has one; None where none has."""
    return float(history.column(MEASURE)[1][-1]) if MEASURE in history.columns else None


def figures(found: Sweep) -> dict[str, Any]:
    """What ``sweep.json`` holds: the best label, and settings and validation accuracy of each cell."""
    return {
        "best": found.best,
        "cells": [
            {"label": label, "settings": cell.settings, "seeds": len(found.histories[label])}
            | ({"note": found.notes[label]} if label in found.notes else {})
            | {MEASURE: {"mean": value.mean, "sd": value.sd, "n": value.n, "interval": value.interval}}
            for label, cell in found.cells.items()
            for value in [found.values[label]]
        ],
    }


def to_markdown(found: Sweep) -> str:
    """The table in Markdown, with the best cell and its test accuracy below."""
    from fedstrata.reporting.tables import Measure, shown

    how = Measure("validation accuracy, %", 100, 2)
    keys = list(next(iter(found.cells.values())).settings) if found.cells else []
    lines = [[*keys, how.heading], [*("---" for _ in keys), "---:"]]
    for label, cell in found.cells.items():
        value = shown(found.values[label], how, len(found.histories[label]))
        lines.append([*map(str, cell.settings.values()), f"**{value}**" if label == found.best else value])
    if found.notes:
        lines = [
            [*line, more]
            for line, more in zip(
                lines, ["", "---", *(found.notes.get(label, "") for label in found.cells)], strict=True
            )
        ]
    text = "".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |\n" for line in lines)
    if found.best is None:
        return f"{text}\nNo setting has a validation accuracy of every seed.\n"
    runs = found.histories[found.best]
    test = shown(Estimate.over(run.final_accuracy for run in runs), how, len(runs))
    seeds = "1 seed" if len(runs) == 1 else f"{len(runs)} seeds, mean ± sample standard deviation"
    return f"{text}\nBest: {found.best}; its test accuracy is {test} %. By the last evaluation; {seeds}.\n"
