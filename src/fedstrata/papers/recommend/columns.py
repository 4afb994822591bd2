"""Compare a spec with the columns of the board by measured properties."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from fedstrata.data.dataset import Dataset
from fedstrata.papers.recommend.properties import SHOWN, Properties, apart, measure
from fedstrata.reporting.statistics import Difference, paired_difference
from fedstrata.runs.preparation import prepare
from fedstrata.spec.experiment import Experiment, deep_merge, read_toml

FILE = Path(__file__).parents[1] / "board" / "absent-v1.json"
"""The file with the results of the board.

The protocol, with the settings of all columns, is in ``absent-v1.toml`` in the same folder.
"""

SECTIONS = ("data", "task", "partition", "availability", "training", "evaluation")
"""The sections of a column's spec that affect measured properties."""

BASELINE = "fedavg"
"""The method with which all other methods are compared."""

CLEAR = 0.1
"""Two specs differ clearly in a property if the distance between their values exceeds this number; see ``apart``.

In our measurements, another seed in a column's spec never causes a clear difference."""


@dataclass(frozen=True)
class Column:
    """A column of the board (a setting in which methods were compared), and its differences from a user's spec.

    Args:
        name: Name of the column.
        properties: Measured properties of the column's spec.
        methods: A mapping from each method to its results, which are two lists of equal length: ``seeds`` and
            ``accuracy``.
        own: Properties of the user's spec, to compare with those of the column.
    """

    name: str
    properties: Properties
    methods: Mapping[str, Mapping[str, Any]]
    own: Properties

    @cached_property
    def differs(self) -> dict[str, float]:
        """A mapping from each property to the distance between spec and column, from 0 to 1; see ``apart``."""
        values = {key: apart(key, self.own, self.properties) for key in SHOWN}
        return {key: value for key, value in values.items() if value is not None}

    @property
    def distance(self) -> float:
        """The mean distance over all properties: 0 if all properties are equal, and at most 1."""
        return fmean(self.differs.values())

    @cached_property
    def clear(self) -> list[str]:
        """The properties in which spec and column differ by more than ``CLEAR``, with the largest difference first."""
        return sorted((key for key, value in self.differs.items() if value > CLEAR), key=lambda key: -self.differs[key])

    @property
    def alike(self) -> bool:
        """Whether spec and column are similar: in every property, they differ by at most ``CLEAR``."""
        return not self.clear

    @cached_property
    def differences(self) -> dict[str, Difference]:
        """For each method, the accuracy difference from the baseline in percentage points, paired by seed.

        With 95 % confidence, the intervals of all methods hold simultaneously (Bonferroni).
        """
        values = {
            name: dict(zip(cell["seeds"], (100 * each for each in cell["accuracy"]), strict=True))
            for name, cell in self.methods.items()
        }
        baseline = values.pop(BASELINE, {})
        return {name: paired_difference(each, baseline, together=len(values)) for name, each in values.items()}


@dataclass(frozen=True)
class Board:
    """The results and the settings of the board.

    Args:
        columns: A mapping from the name of each column to its ``partition``, ``availability`` and ``methods``.
        protocol: Settings of the protocol: ``spec`` applies to all columns, and ``more`` applies to some columns.
    """

    columns: Mapping[str, Mapping[str, Any]]
    protocol: Mapping[str, Any]

    @classmethod
    def read(cls, file: Path = FILE) -> Board | None:
        """Read the results and the protocol of the board. Return None if the file with the results does not exist."""
        if not file.is_file():
            return None
        results = json.loads(file.read_text(encoding="utf-8"))
        return cls(results["columns"], read_toml(file.with_suffix(".toml"), "protocol"))

    def specs(self) -> dict[str, Experiment]:
        """Return the spec of each column, with FedAvg and the default model."""
        specs: dict[str, Experiment] = {}
        for name, column in self.columns.items():
            changes = deep_merge(self.protocol.get("more", {}).get(name, {}), column)
            sections = deep_merge(self.protocol["spec"], changes)
            specs[name] = Experiment.from_table({key: sections[key] for key in SECTIONS if key in sections})
        return specs


def by_distance(board: Board, own: Properties) -> list[Column]:
    """Measure the properties of all columns of the board, and sort the columns by their distance from a spec.

    Args:
        board: Results and settings of the board.
        own: Properties of the user's spec, to compare with those of the columns.

    Raises:
        DataError: The data set of a column is missing.
    """
    columns = [Column(name, properties, board.columns[name]["methods"], own) for name, properties in _measured(board)]
    return sorted(columns, key=lambda column: column.distance)


def _measured(board: Board) -> Iterator[tuple[str, Properties]]:
    """Yield the name and the properties of each column. Columns with the same data share one copy of the data."""
    loaded: dict[str, Dataset] = {}
    for name, spec in board.specs().items():
        key = f"{spec.data!r} {spec.seed}"
        if key not in loaded:
            loaded[key] = spec.data.load(spec.seed, spec.task)
        yield name, measure(prepare(spec, data=loaded[key]))
