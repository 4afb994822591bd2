"""Define the protocol of the board: columns (settings), entries (methods) with tuning grids, and cells (runs)."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedstrata.base.config import under
from fedstrata.base.errors import SpecError, not_among
from fedstrata.methods.base import METHODS
from fedstrata.papers.tables import Cell
from fedstrata.spec.experiment import deep_merge, parse_toml

BOARD = "board"
"""The value of ``Cell.paper`` for cells of the board, which do not belong to a paper."""
CURRENT = "absent-v1"
"""The name of the protocol that ``fedstrata board`` uses."""
BASELINE = "fedavg"
"""The method with which all other entries are compared."""
TUNED = "tuned"
"""The value of ``Cell.column`` for runs with the chosen settings. For trials, this value is ``trial-0`` and so on."""
LIMITED = "limited"
"""The value of ``Cell.column`` for additional runs of the baseline; see ``running.limited``."""
PERSONAL = frozenset({"fedper", "fedrep", "ditto"})
"""Entries whose clients use personal models.

For these entries, tuning chooses the settings with the most accurate personal models.
"""


@dataclass(frozen=True)
class Entry:
    """A method, or a composition of parts of several methods, that the board ranks.

    Args:
        name: Name of the entry on the board.
        method: Section ``method`` of the entry's specs.
        grid: A mapping from the method's tuned setting to the values to try; empty if only the learning rate is tuned.
        is_composition: Whether the entry combines parts of several methods.
    """

    name: str
    method: Mapping[str, Any]
    grid: Mapping[str, Sequence[Any]]
    is_composition: bool = False

    @property
    def is_personal(self) -> bool:
        """Whether the entry's clients use personal models."""
        return self.name in PERSONAL


@dataclass(frozen=True)
class Column:
    """A column of the board: a partition with an availability model.

    Args:
        paper: Folder of the results, which is ``BOARD``.
        name: Names of the protocol and the column, such as ``absent-v1/dirichlet-label``. The file with the results has
            the same name.
        spec: Settings that all cells of the column share, as nested dicts.
    """

    paper: str
    name: str
    spec: Mapping[str, Any]

    @property
    def label(self) -> str:
        """The name of the column without the name of the protocol."""
        return self.name.partition("/")[2]


@dataclass(frozen=True)
class Protocol:
    """A fixed protocol for comparing methods. The protocol is read from a TOML file in this package.

    Args:
        name: Name of the protocol, which includes its version.
        title: Title of the page with the results.
        seeds: Seeds of the ranked runs.
        tuning_seed: Seed of all tuning trials.
        rates: Learning rates to try for entries without a tuned setting in ``grid``.
        rates_with_setting: Learning rates to try for entries with a tuned setting in ``grid``.
        spec: Settings that all cells share.
        tuning: Changed settings for tuning trials.
        partitions: A mapping from each partition's name to its settings.
        availabilities: A mapping from each availability model's name to its settings.
        more: A mapping from the names of additional columns to their settings. An additional column runs only if the
            user names it.
        grid: For each method, a mapping from the tuned setting to the values to try.
        compositions: A mapping from the name of each composition to its section ``method``.
        seconds: A mapping from each entry to the expected seconds per run on one core. The key "" stands for all other
            entries.
        quick: Methods, columns, seeds and changed settings for ``--quick``.
        is_quick: Whether the cells are the small experiments of ``--quick``.
    """

    name: str
    title: str
    seeds: Sequence[int]
    tuning_seed: int
    rates: Sequence[float]
    rates_with_setting: Sequence[float]
    spec: Mapping[str, Any]
    tuning: Mapping[str, Any]
    partitions: Mapping[str, Mapping[str, Any]]
    availabilities: Mapping[str, Mapping[str, Any]]
    more: Mapping[str, Mapping[str, Any]]
    grid: Mapping[str, Mapping[str, Sequence[Any]]]
    compositions: Mapping[str, Mapping[str, Any]]
    seconds: Mapping[str, float]
    quick: Mapping[str, Any]
    is_quick: bool = False

    def small(self) -> Protocol:
        """Return the small version of the protocol for ``--quick``, which tests the software in less than a minute."""
        return replace(self, seeds=self.quick["seeds"], is_quick=True)

    def columns(self, names: Sequence[str] = ()) -> list[Column]:
        """Return the columns with the given names. By default, return all columns except those in ``more``.

        Raises:
            SpecError: A name is unknown.
        """
        product = itertools.product(self.partitions.items(), self.availabilities.items())
        specs = {f"{p}-{a}": {"partition": partition, "availability": model} for (p, partition), (a, model) in product}
        every = {**specs, **self.more}
        names = names or (self.quick["columns"] if self.is_quick else list(specs))
        for name in names:
            if name not in every:
                raise SpecError("--columns", not_among("is not a column", name, every), name)
        return [Column(BOARD, f"{self.name}/{name}", deep_merge(self.spec, every[name])) for name in names]

    def entries(self, names: Sequence[str] = ()) -> list[Entry]:
        """Return the entries with the given names. By default, return all methods and compositions.

        Args:
            names: Names of methods and compositions, or classes written as ``module:Class`` or ``FILE.py:Class``.

        Raises:
            SpecError: A name is unknown, or the class cannot be imported.
        """
        names = names or (self.quick["methods"] if self.is_quick else [*METHODS, *self.compositions])
        return [self._entry(name) for name in dict.fromkeys(names)]

    def _entry(self, name: str) -> Entry:
        if name in self.compositions:
            return Entry(name, self.compositions[name], {}, is_composition=True)
        if ":" not in name and name not in METHODS:
            known = [*METHODS, *self.compositions]
            raise SpecError("METHOD", not_among("is not a method or composition of the board", name, known), name)
        name = importable(name)
        under("METHOD", lambda: METHODS.find(name))
        return Entry(name, {"name": name}, self.grid.get(name, {}))

    def expected(self, entry: str) -> float:
        """Return the expected number of seconds for a run of an entry on one core."""
        return self.seconds.get(entry, self.seconds[""])

    def trials(self, column: Column, entry: Entry) -> list[tuple[Cell, dict[str, Any]]]:
        """Return the tuning trials of an entry, each with the tried settings as nested dicts."""
        rates = self.rates_with_setting if entry.grid else self.rates
        own = [dict(zip(entry.grid, values, strict=True)) for values in itertools.product(*entry.grid.values())]
        tried = [{"training": {"lr": lr}} | ({"method": setting} if setting else {}) for lr in rates for setting in own]
        return [
            (self._cell(column, entry, f"trial-{number}", self.tuning_seed, settings, self.tuning), settings)
            for number, settings in enumerate(tried)
        ]

    def runs(self, column: Column, entry: Entry, settings: Mapping[str, Any], kind: str = TUNED) -> list[Cell]:
        """Return an entry's cells with the given settings, one cell per seed."""
        return [self._cell(column, entry, kind, seed, settings) for seed in self.seeds]

    def _cell(
        self,
        column: Column,
        entry: Entry,
        kind: str,
        seed: int,
        settings: Mapping[str, Any],
        changes: Mapping[str, Any] | None = None,
    ) -> Cell:
        small = self.quick["spec"] if self.is_quick else {}
        layers = {"method": entry.method}, small, changes or {}, settings
        spec = reduce(deep_merge, layers, {"seed": seed, **column.spec})
        if self.is_quick:
            spec["data"] = small["data"]
        return Cell(column.paper, column.name, entry.name, kind, seed, spec, version=1)


def read(name: str = CURRENT) -> Protocol:
    """Read a protocol from its TOML file in this package."""
    content = parse_toml(files(__package__).joinpath(f"{name}.toml").read_text(encoding="utf-8"))
    return Protocol(name, **content)


def importable(name: str) -> str:
    """Convert ``FILE.py:Class`` to ``module:Class``, and add the file's folder to Python's search path."""
    path, colon, cls = name.partition(":")
    if not colon or not path.endswith(".py"):
        return name
    file = Path(path)
    if not file.is_file():
        raise SpecError("METHOD", "the file does not exist. Give FILE.py:Class or module:Class.", name)
    if (folder := str(file.resolve().parent)) not in sys.path:
        sys.path.insert(0, folder)
    return f"{file.stem}:{cls}"
