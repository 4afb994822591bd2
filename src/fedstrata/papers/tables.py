"""What a paper's tables and figures are made of: cells, each of which is a spec."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from fedstrata.base.errors import SpecError, nearest
from fedstrata.spec.experiment import Experiment, parse_toml

PAPERS = {
    "stratify": "Stratify (Wong, Lim, Chan)",
    "fedstas": "FedSTaS (Slessor et al. 2024) and FedSTS (Gao et al. 2024)",
    "fedssar": "FedSSAR (Lu et al. 2023)",
    "rebafl": "ReBaFL (Xu et al.)",
}
"""The papers, by the folder of their tables."""

CLAIMS = "claims.toml"
"""The file of a paper's claims, beside its tables."""

METRICS = {
    "final": "accuracy after the last round",
    "last10": "mean accuracy of the last 10 rounds",
    "best": "accuracy of the best round",
    "mean": "mean accuracy over the rounds",
}
"""What a table is judged by, in percent."""


@dataclass(frozen=True)
class Cell:
    """One run of a table.

    Args:
        paper: Whose table.
        table: Its name.
        row: A method.
        column: A setting.
        seed: The seed.
        spec: The run's spec.
        version: The table's.
    """

    paper: str
    table: str
    row: str
    column: str
    seed: int
    spec: Mapping[str, Any]
    version: int

    @property
    def key(self) -> str:
        """Its name in the table's results."""
        return f"{self.row}/{self.column}/seed-{self.seed}"

    @property
    def folder(self) -> str:
        """Its run's folder, below that of all runs."""
        plain = "".join(letter if letter.isalnum() or letter in "-_./" else "_" for letter in self.key)
        return f"{self.paper}/{self.table}/{plain}"

    @property
    def hash(self) -> str:
        """SHA-256 of the spec and of the table's version: what was made with another one is made anew.

        Of the spec as it is given, not of what it leaves to defaults: these do not change without a new version.
        """
        training = {key: value for key, value in self.spec["training"].items() if key != "workers"}  # moves no result
        text = json.dumps([self.version, {**self.spec, "training": training}], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Table:
    """A table or a figure of a paper.

    Args:
        paper: Whose.
        name: Its file's.
        title: What is in it, with what stands in for data that are not there.
        source: Where the paper has it.
        metric: What it is judged by; see ``METRICS``.
        seeds: Of every cell.
        baseline: The row that the others are compared with.
        against: More comparisons, (row, row).
        rows: What a row lays over the spec.
        columns: What a column lays over it.
        only: The rows of a column that has not all of them.
        spec: What all cells share.
        published: The paper's figures, by row and column, in percent.
        seconds: A round's seconds on one core, by row; "" for all rows that are not named.
        notes: What a reader must know.
        order: Tables of a lower number run first.
        quick: What ``--quick`` lays over every cell.
        version: Raised by a commit that moves this table's results, beside ``identity.RESULTS``, with which the first
            tables began: what was made before is made anew.
    """

    paper: str
    name: str
    title: str
    source: str
    metric: str
    seeds: Sequence[int]
    rows: Mapping[str, Mapping[str, Any]]
    columns: Mapping[str, Mapping[str, Any]]
    spec: Mapping[str, Any]
    baseline: str = "fedavg"
    against: Sequence[Sequence[str]] = ()
    only: Mapping[str, Sequence[str]] = field(default_factory=dict)
    published: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    notes: str = ""
    order: int = 100
    quick: Mapping[str, Any] = field(default_factory=dict)
    version: int = 2

    def cells(self, *, quick: bool = False) -> Iterator[Cell]:
        """All of them, column by column: an order in one needs all seeds of it."""
        for column in self.columns:
            for seed in self.seeds[:1] if quick else self.seeds:
                for row in self.rows_of(column):
                    layers = [self.columns[column], self.rows[row], *([self.quick] if quick else [])]
                    spec = {"seed": seed, **copy.deepcopy(dict(self.spec))}
                    for layer in layers:
                        spec = laid_over(spec, layer)
                    yield Cell(self.paper, self.name, row, column, seed, spec, self.version)

    def rows_of(self, column: str) -> list[str]:
        """The rows that a column has."""
        return [row for row in self.rows if row in self.only.get(column, self.rows)]

    def comparisons(self) -> list[tuple[str, str, str]]:
        """Column, row and what the row is compared with: the family over which tests are corrected."""
        found = [(c, row, self.baseline) for c in self.columns for row in self.rows_of(c) if row != self.baseline]
        found = [each for each in found if self.baseline in self.rows_of(each[0])]
        more = [(c, a, b) for c in self.columns for a, b in self.against if {a, b} <= set(self.rows_of(c))]
        return found + [each for each in more if each not in found]

    def seconds_of(self, row: str) -> float | None:
        """A round's seconds on one core, where somebody measured them."""
        return self.seconds.get(row, self.seconds.get(""))


def laid_over(spec: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """A spec with another on top; a section that names what it is replaces the one below.

    >>> laid_over({"method": {"name": "fedprox", "mu": 1.0}}, {"method": {"name": "fedavg"}})
    {'method': {'name': 'fedavg'}}
    >>> laid_over({"training": {"lr": 0.1}}, {"training": {"rounds": 3}})
    {'training': {'lr': 0.1, 'rounds': 3}}
    """
    result = dict(spec)
    for key, value in layer.items():
        below = result.get(key)
        merges = isinstance(value, Mapping) and isinstance(below, Mapping) and "name" not in value
        result[key] = laid_over(below, value) if merges else value  # type: ignore[arg-type]  # both are mappings
    return result


@cache
def tables() -> dict[str, Table]:
    """All tables by ``PAPER/NAME``, those that run first at the beginning.

    Raises:
        SpecError: A file says something that no table has, or a cell is no experiment.
    """
    found = [
        read(paper, file.name.removesuffix(".toml"), file.read_text(encoding="utf-8"))
        for paper in PAPERS
        for file in sorted(files(__package__).joinpath(paper).iterdir(), key=lambda file: file.name)
        if file.name.endswith(".toml") and file.name != CLAIMS
    ]
    return {f"{table.paper}/{table.name}": table for table in sorted(found, key=lambda table: table.order)}


def read(paper: str, name: str, text: str) -> Table:
    """A table from its TOML.

    Raises:
        SpecError: It is none.
    """
    content = parse_toml(text)
    if unknown := [key for key in content if key not in Table.__dataclass_fields__ or key in ("paper", "name")]:
        raise SpecError(f"{paper}/{name}", f"no table has {unknown[0]!r}")
    table = Table(paper, name, **content)
    if table.metric not in METRICS:
        raise SpecError(f"{paper}/{name}.metric", f"expected one of {', '.join(METRICS)}", table.metric)
    named = [row for pair in table.against for row in pair] + [row for rows in table.only.values() for row in rows]
    for row in [table.baseline, *named, *table.published]:
        if row not in table.rows:
            raise SpecError(f"{paper}/{name}", f"there are: {', '.join(table.rows)}{nearest(row, table.rows)}", row)
    for column in [*table.only, *(column for figures in table.published.values() for column in figures)]:
        if column not in table.columns:
            raise SpecError(f"{paper}/{name}", f"there are: {', '.join(table.columns)}", column)
    return table


def chosen(names: Sequence[str]) -> dict[str, Table]:
    """The tables of some names, ``PAPER`` or ``PAPER/TABLE``; all of them without names.

    Raises:
        SpecError: There is no such table.
    """
    there = tables()
    for name in names:
        if name not in PAPERS and name not in there:
            raise SpecError("TABLE", f"there are: {', '.join([*PAPERS, *there])}{nearest(name, there)}", name)
    return {key: table for key, table in there.items() if not names or key in names or table.paper in names}


def experiment_of(cell: Cell) -> Experiment:
    """The cell's experiment; errors name the cell.

    Raises:
        SpecError: Its spec is wrong.
    """
    try:
        return Experiment.from_table(cell.spec)
    except SpecError as error:
        raise error.under(f"{cell.paper}/{cell.table}/{cell.key}") from None
