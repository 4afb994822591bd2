"""A grid of settings, and which of its cells is best on samples that nobody trained on or tests on."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstrata.comparison import Watcher, compare
from fedstrata.errors import SpecError
from fedstrata.history import History
from fedstrata.jsonl import replace_file, write_json
from fedstrata.spec import Experiment, set_key
from fedstrata.statistics import Estimate

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
    """

    cells: dict[str, Cell]
    histories: dict[str, list[History]]
    values: dict[str, Estimate]
    best: str | None


def sweep(
    table: Mapping[str, Any],
    grid: Mapping[str, Sequence[Any]],
    *,
    out: str | Path,
    seeds: Sequence[int] | None = None,
    jobs: int | None = None,
    watch: Watcher | None = None,
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

    Raises:
        SpecError: A setting is wrong, or nothing is held out for validation; every cell is checked first.
    """
    planned = cells(table, grid)
    specs = {label: cell.spec for label, cell in planned.items()}
    seeds = [Experiment.from_table(table).seed] if seeds is None else seeds
    histories = compare(specs, seeds=seeds, out=out, jobs=jobs, watch=watch, report=False)
    found = judge(planned, histories)
    out = Path(out)
    write_json(out / FIGURES, figures(found))
    replace_file(out / TABLE, to_markdown(found).encode())
    if found.best is not None:
        replace_file(out / BEST, planned[found.best].spec.to_toml().encode())
    else:
        (out / BEST).unlink(missing_ok=True)
    return found


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
    if any(cell.spec.evaluation.validation is None for cell in found.values()):
        problem = "needed: a sweep picks the best by samples held out for it, never by the test set; such as 0.1"
        raise SpecError("evaluation.validation", problem)
    return found


def judge(planned: Mapping[str, Cell], histories: Mapping[str, Sequence[History]]) -> Sweep:
    """The validation accuracy of each cell, and the best cell; one with a seed that has none cannot be it."""
    values = {label: Estimate.over(map(_validated, histories[label])) for label in planned}
    whole = {label: each.mean for label, each in values.items() if each.n == len(histories[label]) and each.n}
    best = max(whole, key=lambda label: whole[label] or 0.0, default=None)
    return Sweep(dict(planned), {label: list(histories[label]) for label in planned}, values, best)


def _validated(history: History) -> float | None:
    return float(history.column(MEASURE)[1][-1]) if MEASURE in history.columns else None


def figures(found: Sweep) -> dict[str, Any]:
    """What ``sweep.json`` holds: the best label, and settings and validation accuracy of each cell."""
    return {
        "best": found.best,
        "cells": [
            {"label": label, "settings": cell.settings, "seeds": len(found.histories[label])}
            | {MEASURE: {"mean": value.mean, "sd": value.sd, "n": value.n, "interval": value.interval}}
            for label, cell in found.cells.items()
            for value in [found.values[label]]
        ],
    }


def to_markdown(found: Sweep) -> str:
    """The table in Markdown, with the best cell and its test accuracy below."""
    from fedstrata.report.tables import Measure, shown

    how = Measure("validation accuracy, %", 100, 2)
    keys = list(next(iter(found.cells.values())).settings)
    lines = [[*keys, how.heading], [*("---" for _ in keys), "---:"]]
    for label, cell in found.cells.items():
        value = shown(found.values[label], how, len(found.histories[label]))
        lines.append([*map(str, cell.settings.values()), f"**{value}**" if label == found.best else value])
    text = "".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |\n" for line in lines)
    if found.best is None:
        return f"{text}\nNo cell has a validation accuracy of every seed.\n"
    runs = found.histories[found.best]
    test = shown(Estimate.over(run.final_accuracy for run in runs), how, len(runs))
    seeds = "1 seed" if len(runs) == 1 else f"{len(runs)} seeds, mean ± sample standard deviation"
    return f"{text}\nBest: {found.best}; its test accuracy is {test} %. By the last evaluation; {seeds}.\n"
