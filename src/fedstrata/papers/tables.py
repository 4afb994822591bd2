"""Tables and figures of papers. Each consists of cells, and each cell is a run of a spec."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from importlib.resources import files
from typing import Any

from fedstrata.base.errors import SpecError, nearest
from fedstrata.spec.experiment import Experiment, deep_merge, parse_toml

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
"""Metrics of tables, in percent."""


@dataclass(frozen=True)
class Cell:
    """One run of a table.

    Args:
        paper: The paper.
        table: The name of the table.
        row: The row, a method.
        column: The column, a setting.
        seed: The seed.
        spec: The spec of the run.
        version: The version of the table.
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
        """The name of the cell in the results."""
        return f"{self.row}/{self.column}/seed-{self.seed}"

    @property
    def folder(self) -> str:
        """The run folder, relative to the folder of all runs."""
        plain = "".join(letter if letter.isalnum() or letter in "-_./" else "_" for letter in self.key)
        return f"{self.paper}/{self.table}/{plain}"

    @property
    def hash(self) -> str:
        """SHA-256 of the spec and of the table's version. A cell whose hash has changed is run again.

        It leaves out default values, which do not change without a new version.
        """
        training = {key: value for key, value in self.spec["training"].items() if key != "workers"}
        text = json.dumps([self.version, {**self.spec, "training": training}], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Table:
    """A table or a figure of a paper.

    Args:
        paper: The paper.
        name: The name of the file.
        title: The title, with the data that replace data that are not available.
        source: The table's place in the paper.
        metric: The metric; see ``METRICS``.
        seeds: The seeds of every cell.
        baseline: The row that the others are compared with.
        against: Further comparisons, (row, row).
        rows: The changes of the spec by each row.
        columns: The changes of the spec by each column.
        only: The rows of a column that does not have all rows.
        spec: The spec that all cells share.
        published: The paper's figures, by row and column, in percent.
        seconds: Seconds per round on one core, by row; "" for all rows that are not named.
        notes: Notes for the reader.
        order: Tables with a lower number run first.
        quick: The changes of every cell by ``--quick``.
        version: A commit that changes the results of this table raises it. Older results are then made again.
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
        """Yield the cells, column by column."""
        for column in self.columns:
            for seed in self.seeds[:1] if quick else self.seeds:
                for row in self.rows_of(column):
                    layers = self.columns[column], self.rows[row], self.quick if quick else {}
                    spec = reduce(deep_merge, layers, {"seed": seed, **self.spec})
                    yield Cell(self.paper, self.name, row, column, seed, spec, self.version)

    def rows_of(self, column: str) -> list[str]:
        """Return the rows of a column."""
        return [row for row in self.rows if row in self.only.get(column, self.rows)]

    def comparisons(self) -> list[tuple[str, str, str]]:
        """Return all comparisons (column, row, other row). Statistical tests are corrected over all of them."""
        rows = {column: self.rows_of(column) for column in self.columns}
        base = [(c, row, self.baseline) for c in rows if self.baseline in rows[c] for row in rows[c]]
        base = [each for each in base if each[1] != self.baseline]
        more = [(c, a, b) for c in rows for a, b in self.against if {a, b} <= set(rows[c])]
        return list(dict.fromkeys(base + more))


@cache
def tables() -> dict[str, Table]:
    """Read all tables by ``PAPER/NAME``, in the order in which they run.

    Raises:
        SpecError: A file has an unknown key, row or column.
    """
    tables = [
        read(paper, file.name.removesuffix(".toml"), file.read_text(encoding="utf-8"))
        for paper in PAPERS
        for file in sorted(files(__package__).joinpath(paper).iterdir(), key=lambda file: file.name)
        if file.name.endswith(".toml") and file.name != CLAIMS
    ]
    return {f"{table.paper}/{table.name}": table for table in sorted(tables, key=lambda table: table.order)}


def read(paper: str, name: str, text: str) -> Table:
    """Read a table from its TOML.

    Raises:
        SpecError: A key, row or column is unknown.
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
    """Return the tables with some names, ``PAPER`` or ``PAPER/TABLE``; all tables without names.

    Raises:
        SpecError: A name is unknown.
    """
    known = tables()
    for name in names:
        if name not in PAPERS and name not in known:
            raise SpecError("TABLE", f"there are: {', '.join([*PAPERS, *known])}{nearest(name, known)}", name)
    return {key: table for key, table in known.items() if not names or key in names or table.paper in names}


def experiment_of(cell: Cell) -> Experiment:
    """Return the experiment of a cell.

    Raises:
        SpecError: The spec is wrong; the error names the cell.
    """
    try:
        return Experiment.from_table(cell.spec)
    except SpecError as error:
        raise error.under(f"{cell.paper}/{cell.table}/{cell.key}") from None
