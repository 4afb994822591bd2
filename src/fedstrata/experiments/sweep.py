"""Run all combinations (cells) of the values of several settings, and find the best cell on validation samples."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import tomli_w

from fedstrata.base.errors import SpecError
from fedstrata.base.jsonl import replace_file, write_json
from fedstrata.base.printable import printable
from fedstrata.base.screen import ScreenTable
from fedstrata.evaluation.history import History
from fedstrata.evaluation.settings import Evaluation
from fedstrata.experiments.compare import Watcher, compare
from fedstrata.reporting import tables
from fedstrata.reporting.statistics import Estimate
from fedstrata.reporting.tables import shown
from fedstrata.spec.experiment import COMPARE, Experiment, set_key

if TYPE_CHECKING:
    from rich.text import Text

T = TypeVar("T")

TABLE, FIGURES, BEST = "sweep.md", "sweep.json", "best.toml"
"""The files of a sweep, in addition to its runs: the table, its numbers as JSON, and the spec of the best cell."""

TUNED = "compare.toml"
"""The file of a sweep over several methods: a spec that compares the methods, each with its best settings."""


@dataclass(frozen=True)
class Cell:
    """One combination of values in a grid, or one trial of a search.

    Args:
        settings: The values of the settings that vary between cells, as a mapping from keys to values.
        spec: The experiment with these values.
    """

    settings: dict[str, Any]
    spec: Experiment

    @classmethod
    def of(cls, table: Mapping[str, Any], settings: Mapping[str, Any]) -> Cell:
        """Build a cell from a spec (nested dicts) and from settings that replace the spec's settings."""
        tables = copy.deepcopy(dict(table))
        for key, value in settings.items():
            set_key(tables, key, value, f"{key}={value}")
        return cls(dict(settings), Experiment.from_table(tables))


@dataclass(frozen=True)
class Sweep:
    """The result of a sweep or a search.

    Args:
        cells: A mapping from each label to its cell, in the order of the grid or of the trials.
        histories: A mapping from each label to the histories of its runs, one per seed.
        values: A mapping from each label to the primary metric on the validation samples, as mean and spread over the
            seeds.
        best: The label of the best cell; None if no cell has a value for every seed.
        notes: A mapping from labels of cells that cannot be the best cell to the reasons, such as pruning.
        primary: The primary metric, which is ``evaluation.primary`` of the first cell.
        best_of_methods: A mapping from each method to the label of its best cell. Methods without a best cell are left
            out.
    """

    cells: dict[str, Cell]
    histories: dict[str, list[History]]
    values: dict[str, Estimate]
    best: str | None
    notes: dict[str, str] = field(default_factory=dict)
    primary: str = "accuracy"
    best_of_methods: dict[str, str] = field(default_factory=dict)

    @property
    def tuned(self) -> dict[str, Experiment]:
        """A mapping from each method to the experiment with the method's best settings, for use in ``compare``."""
        return {method: self.cells[label].spec for method, label in self.best_of_methods.items()}


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
    """Run every cell of a grid with every seed, and write a table of results and the best spec.

    As in ``compare``, finished runs in ``out`` are not repeated, and interrupted runs continue from their last
    checkpoint. The best cell has the best mean of the metric ``evaluation.primary`` on the validation samples. If
    several cells have the best mean, the first of these cells is the best cell. If the grid has several methods, a best
    cell is found for each method. You can then pass the attribute ``tuned`` of the result to ``compare``.

    Args:
        table: The spec as nested dicts, as ``tomllib`` returns them. The spec must set ``evaluation.validation``.
        grid: A mapping from each ``section.key`` to the values to try.
        out: The folder of the sweep. The files of a run are in ``KEY=VALUE,…/seed-S/``.
        seeds: Each cell runs once with each seed. Default: the spec's seed.
        jobs: The number of simultaneous runs. Default: the number of processors.
        watch: A function that is called during each run with the run's label, seed and number of finished rounds.
        progress: Whether to show progress; see ``compare``.

    Raises:
        SpecError: A setting is wrong, or no samples are held out for validation. All cells are checked before the first
            run starts.
    """
    planned = cells(table, grid)
    specs = {label: cell.spec for label, cell in planned.items()}
    seeds = [Experiment.from_table(table).seed] if seeds is None else seeds
    histories = compare(specs, seeds=seeds, out=out, jobs=jobs, watch=watch, progress=progress, report=False)
    result = judge(planned, histories)
    write(result, Path(out))
    return result


def write(result: Sweep, out: Path) -> None:
    """Write a sweep's table (also as JSON), the best spec, and a spec that compares the methods' best settings."""
    write_json(out / FIGURES, figures(result))
    replace_file(out / TABLE, to_markdown(result).encode())
    specs = {
        BEST: None if result.best is None else result.cells[result.best].spec.to_toml(),
        TUNED: comparison_toml(result.tuned) if len(result.tuned) > 1 else None,
    }
    for name, text in specs.items():
        if text is None:
            (out / name).unlink(missing_ok=True)
        else:
            replace_file(out / name, text.encode())


def cells(table: Mapping[str, Any], grid: Mapping[str, Sequence[Any]]) -> dict[str, Cell]:
    """Return a mapping from labels, such as ``lr=0.1,mu=1``, to the cells of a grid.

    The value of the last key changes fastest from cell to cell.

    Raises:
        SpecError: The grid is empty, a setting is wrong, or no samples are held out for validation.
    """
    if not grid or not all(grid.values()):
        raise SpecError(
            "--set", "a sweep needs a setting with several values. Give, for example, --set training.lr=0.01,0.1."
        )
    # Labels show only the last part of a key, such as lr for training.lr. Keys with the same last part are shown whole.
    ends = [key.rpartition(".")[2] for key in grid]
    names = {key: end if ends.count(end) == 1 else key for key, end in zip(grid, ends, strict=True)}
    result: dict[str, Cell] = {}
    for values in itertools.product(*grid.values()):
        settings = dict(zip(grid, values, strict=True))
        label = ",".join(f"{names[key]}={value}" for key, value in settings.items()).replace("/", "_")
        if label in result:
            raise SpecError("--set", "a value is listed twice. Remove one of the two.", label)
        result[label] = Cell.of(table, settings)
    for cell in result.values():
        refuse_unvalidated(cell.spec)
    return result


def refuse_unvalidated(spec: Experiment) -> None:
    """Raise ``SpecError`` if no samples are held out for validation."""
    if spec.evaluation.validation is None:
        problem = (
            "is required, because a sweep selects settings with validation samples, not with the test set. Use, for "
            "example, evaluation.validation = 0.1."
        )
        raise SpecError("evaluation.validation", problem)


def judge(
    planned: Mapping[str, Cell], histories: Mapping[str, Sequence[History]], notes: Mapping[str, str] | None = None
) -> Sweep:
    """Compute the primary metric of each cell on the validation samples, and find the best cell.

    A cell cannot be the best cell if ``notes`` contains its label, or if one of its runs has a warning or no value.

    Args:
        planned: A mapping from each label to its cell.
        histories: A mapping from each label to the histories of its runs.
        notes: Cells that cannot be the best cell: a mapping from their labels to the reasons.
    """
    notes = dict(notes or {})
    for label in planned:
        if any(history.warning for history in histories[label]):
            notes.setdefault(label, "broke down: no reply could be used from some round to the end")
    settings = next((cell.spec.evaluation for cell in planned.values()), Evaluation())
    primary, sign = settings.primary, -1 if settings.primary in settings.lower else 1
    bounds = tables.bounds(measure(primary))
    values = {label: Estimate.over((validated(run, primary) for run in histories[label]), bounds) for label in planned}
    means = {label: value.mean for label, value in values.items() if value.n == len(histories[label]) and value.n}
    of_methods = dict[str, list[str]]()
    for label in (label for label in means if label not in notes):
        # Some systems do not allow a colon, as in "my_module:MyMethod", in the name of a folder.
        of_methods.setdefault(planned[label].spec.method.name.replace(":", "."), []).append(label)

    def value(label: str) -> float:
        return sign * (means[label] or 0.0)

    bests = {method: max(labels, key=value) for method, labels in of_methods.items()}
    best = max((label for label in means if label in bests.values()), key=value, default=None)
    runs = {label: list(histories[label]) for label in planned}
    return Sweep(dict(planned), runs, values, best, notes, primary, bests)


def measure(primary: str) -> str:
    """Return the name of the column that decides which cell is best: the primary metric on validation samples."""
    return f"validation.{primary}"


def validated(history: History, primary: str) -> float | None:
    """Return the primary metric of a run's saved model on the validation samples; None if the metric is missing."""
    return history.final(measure(primary))


def figures(result: Sweep) -> dict[str, Any]:
    """Return the content of ``sweep.json``: the label of the best cell, and each cell's settings and result."""
    return {
        "best": result.best,
        "best_of_methods": result.best_of_methods,
        "cells": [
            {"label": label, "settings": cell.settings, "seeds": len(result.histories[label])}
            | ({"note": result.notes[label]} if label in result.notes else {})
            | {measure(result.primary): {"mean": value.mean, "sd": value.sd, "n": value.n, "interval": value.interval}}
            for (label, cell), value in zip(result.cells.items(), result.values.values(), strict=True)
        ],
    }


def to_markdown(result: Sweep) -> str:
    """Return a Markdown table with a row per cell, and a sentence about the best cell and its test result.

    If the grid has several methods, and a method has several cells, a second table shows each method's best cell.
    """
    headings, lines = _lines(result)
    left = len(_keys(result))
    if result.best is not None:
        lines[result.best][left] = f"**{lines[result.best][left]}**"
    text = tables.markdown_table(headings, lines.values(), left=left)
    if bests := _of_methods(result, lines):
        rows = [line[: left + 1] for line in bests]
        text += f"\nThe best settings of each method:\n\n{tables.markdown_table(headings[: left + 1], rows, left=left)}"
    return f"{text}\n{verdict(result)}\n"


def to_screen(result: Sweep, every: bool = False) -> ScreenTable:
    """Return the same tables as ``to_markdown``, but laid out for a terminal.

    If ``every`` is true, even a narrow terminal shows all columns.
    """
    from rich.text import Text

    headings, lines = _lines(result)
    rows: dict[str, list[str | Text]] = {label: list(line) for label, line in lines.items()}
    left, words = len(_keys(result)), range(len(_keys(result)) + 1, len(headings))
    if result.best is not None:
        rows[result.best][left] = Text(printable(lines[result.best][left]), style="bold")
    every_row: list[list[str | Text]] = list(rows.values())
    if bests := _of_methods(result, rows):
        every_row += [["The best settings of each method"], *bests]
    return ScreenTable(headings, every_row, left=left, words=words, every=every, note=verdict(result))


def _keys(result: Sweep) -> list[str]:
    return list(next(iter(result.cells.values())).settings) if result.cells else []


def _lines(result: Sweep) -> tuple[list[str], dict[str, list[str]]]:
    """Return the table's headings, and a mapping from each label to its row. The last column contains notes."""
    how = tables.measure(f"final_{result.primary}")
    headings = [*_keys(result), how.heading.replace("final", "validation", 1)]
    lines = {
        label: [*map(str, cell.settings.values()), shown(result.values[label], how, len(result.histories[label]))]
        for label, cell in result.cells.items()
    }
    if not result.notes:
        return headings, lines
    return [*headings, ""], {label: [*line, result.notes.get(label, "")] for label, line in lines.items()}


def _of_methods(result: Sweep, rows: Mapping[str, T]) -> list[T]:
    """Return the rows of the methods' best cells. With only one method, or one cell per method, the list is empty."""
    bests = [rows[label] for label in result.best_of_methods.values()]
    return bests if 1 < len(bests) < len(rows) else []


def verdict(result: Sweep) -> str:
    """Return a sentence about the best cell and its test result."""
    metric, final = result.primary, f"final_{result.primary}"
    if result.best is None:
        return f"None of the settings has a validation {metric} for every seed."
    how, runs = tables.measure(final), result.histories[result.best]
    unit = how.heading.removeprefix(f"final {metric}").replace(",", "")
    test = shown(Estimate.over(tables.value(run, final) for run in runs), how, len(runs)) + unit
    models = "the models of the last evaluation" if tables.kept(runs) is None else "the models that the runs saved"
    seeds = "1 seed" if len(runs) == 1 else f"{len(runs)} seeds, mean ± sample standard deviation"
    return f"Best settings: {printable(result.best)}. Test {metric}: {test} ({seeds}), with {models}."


def comparison_toml(specs: Mapping[str, Experiment]) -> str:
    """Return a spec with a table ``[compare.LABEL]`` per experiment, which contains the sections that differ."""
    every = {label: spec.to_spec() for label, spec in specs.items()}
    first = next(iter(every.values()))
    shared = {key: value for key, value in first.items() if all(spec.get(key) == value for spec in every.values())}
    own = {label: {key: spec[key] for key in spec if key not in shared} for label, spec in every.items()}
    return tomli_w.dumps({**shared, COMPARE: own})
