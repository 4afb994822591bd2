"""Define the experiments that reproduce the tables of the four papers.

A table has a row for each method and a column for each setting. A cell is the training run of one row and one
column with one seed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from importlib.resources import files
from typing import Any

from fedstrata.base.errors import SpecError, not_among
from fedstrata.spec.experiment import Experiment, deep_merge, parse_toml

PAPERS = {
    "stratify": "Stratify (Wong, Lim, Chan)",
    "fedstas": "FedSTaS (Slessor et al. 2024) and FedSTS (Gao et al. 2024)",
    "fedssar": "FedSSAR (Lu et al. 2023)",
    "rebafl": "ReBaFL (Xu et al.)",
}
"""A mapping from the name of each folder of tables to the paper that contains these tables."""

CLAIMS = "claims.toml"
"""The name of the file with a paper's claims, in the folder with the paper's tables."""

METRICS = {
    "final": "accuracy after the last round",
    "last10": "mean accuracy of the last 10 rounds",
    "best": "accuracy of the best round",
    "mean": "mean accuracy over the rounds",
}
"""For each metric that a table can use, a description. All metrics are in percent."""


@dataclass(frozen=True)
class Cell:
    """A cell of a table: the training run of one row and column with one seed.

    Args:
        paper: Name of the paper, which is a key of ``PAPERS``.
        table: Name of the table.
        row: Name of the row, which is a method.
        column: Name of the column, which is a setting.
        seed: Seed of the run.
        spec: Spec of the run, as nested dicts.
        version: Version of the table; see ``Table``.
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
        """The key of this run in the results of the table."""
        return f"{self.row}/{self.column}/seed-{self.seed}"

    @property
    def folder(self) -> str:
        """The path of the run folder, relative to the folder of all runs."""
        plain = "".join(letter if letter.isalnum() or letter in "-_./" else "_" for letter in self.key)
        return f"{self.paper}/{self.table}/{plain}"

    @property
    def hash(self) -> str:
        """The SHA-256 hash of the spec and of the table's version.

        If the hash changes, the cell is run again. Settings with default values do not affect the hash. If a default
        changes, the version must therefore be raised.
        """
        training = {key: value for key, value in self.spec["training"].items() if key != "workers"}
        text = json.dumps([self.version, {**self.spec, "training": training}], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Table:
    """A table or figure of a paper, with the experiments that reproduce it.

    Args:
        paper: Name of the paper, which is a key of ``PAPERS``.
        name: Name of the table, which is the name of its file without the suffix.
        title: Title of the table. If the paper's data are not available, the title names the data that we use instead.
        source: Place of the table in the paper, such as ``Table 1``.
        metric: Metric of the table, which is a key of ``METRICS``.
        seeds: Seeds of the runs. Each pair of a row and a column has one run per seed.
        baseline: Row with which the other rows are compared.
        against: Additional comparisons, each as a pair (row, other row).
        rows: A mapping from each row to the settings that the row changes in the spec.
        columns: A mapping from each column to the settings that the column changes in the spec.
        only: For each column that has only some of the rows, the names of these rows.
        spec: Spec that all cells share, as nested dicts.
        published: The paper's results in percent, as nested dicts: ``published[row][column]``.
        seconds: A mapping from each row to the expected seconds per round on one core. The key "" stands for all other
            rows.
        notes: Notes about the table for readers of the page.
        order: Position of the table in the order of execution. Runs of tables with smaller numbers come first.
        quick: Settings that ``--quick`` changes in every cell to make the experiments small.
        version: Version of the results. If a code change affects the results of the table, raise the version, so that
            all cells run again.
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
        """Yield the cells of the table, column by column.

        If ``quick`` is true, yield only small experiments with the first seed.
        """
        for column in self.columns:
            for seed in self.seeds[:1] if quick else self.seeds:
                for row in self.rows_of(column):
                    layers = self.columns[column], self.rows[row], self.quick if quick else {}
                    spec = reduce(deep_merge, layers, {"seed": seed, **self.spec})
                    yield Cell(self.paper, self.name, row, column, seed, spec, self.version)

    def rows_of(self, column: str) -> list[str]:
        """Return the names of the rows that a column has."""
        return [row for row in self.rows if row in self.only.get(column, self.rows)]

    def comparisons(self) -> list[tuple[str, str, str]]:
        """Return all comparisons of the table, each as (column, row, other row)."""
        rows = {column: self.rows_of(column) for column in self.columns}
        base = [(c, row, self.baseline) for c in rows if self.baseline in rows[c] for row in rows[c]]
        base = [each for each in base if each[1] != self.baseline]
        more = [(c, a, b) for c in rows for a, b in self.against if {a, b} <= set(rows[c])]
        return list(dict.fromkeys(base + more))


@cache
def tables() -> dict[str, Table]:
    """Return a mapping from ``PAPER/NAME`` to each table, in the order in which the tables' experiments run.

    Raises:
        SpecError: The file of a table contains an unknown key, row or column.
    """
    tables = [
        read(paper, file.name.removesuffix(".toml"), file.read_text(encoding="utf-8"))
        for paper in PAPERS
        for file in sorted(files(__package__).joinpath(paper).iterdir(), key=lambda file: file.name)
        if file.name.endswith(".toml") and file.name != CLAIMS
    ]
    return {f"{table.paper}/{table.name}": table for table in sorted(tables, key=lambda table: table.order)}


def read(paper: str, name: str, text: str) -> Table:
    """Read a table from the TOML text of its file.

    Raises:
        SpecError: A key, row or column is unknown.
    """
    content = parse_toml(text)
    if unknown := [key for key in content if key not in Table.__dataclass_fields__ or key in ("paper", "name")]:
        raise SpecError(f"{paper}/{name}", f"{unknown[0]!r} is not a known key. Remove this key.")
    table = Table(paper, name, **content)
    if table.metric not in METRICS:
        raise SpecError(f"{paper}/{name}.metric", f"is not a metric. Use one of: {', '.join(METRICS)}", table.metric)
    named = [row for pair in table.against for row in pair] + [row for rows in table.only.values() for row in rows]
    for row in [table.baseline, *named, *table.published]:
        if row not in table.rows:
            raise SpecError(f"{paper}/{name}", not_among("is not a row", row, table.rows), row)
    for column in [*table.only, *(column for figures in table.published.values() for column in figures)]:
        if column not in table.columns:
            raise SpecError(f"{paper}/{name}", f"is not a column. Use one of: {', '.join(table.columns)}", column)
    return table


def chosen(names: Sequence[str]) -> dict[str, Table]:
    """Return the tables with the given names (``PAPER`` or ``PAPER/TABLE``); all tables if ``names`` is empty.

    Raises:
        SpecError: A name is unknown.
    """
    known = tables()
    for name in names:
        if name not in PAPERS and name not in known:
            raise SpecError("TABLE", not_among("is not a paper or table", name, [*PAPERS, *known]), name)
    return {key: table for key, table in known.items() if not names or key in names or table.paper in names}


def experiment_of(cell: Cell, device: str = "cpu") -> Experiment:
    """Build the experiment of a cell (a row, a column and a seed of a table) from its spec.

    Args:
        cell: Cell whose experiment is built.
        device: Value of ``training.device``. The hash of the cell does not depend on the device.

    Raises:
        SpecError: The spec is invalid. The error message names the cell.
    """
    try:
        return Experiment.from_table(deep_merge(cell.spec, {"training": {"device": device}}))
    except SpecError as error:
        raise error.under(f"{cell.paper}/{cell.table}/{cell.key}") from None
