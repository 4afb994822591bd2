"""Compare the columns of the board with a spec by their measured properties."""

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
"""The file with the results of the board. The TOML file in the same folder is the protocol, with the settings of all
columns."""

SECTIONS = ("data", "task", "partition", "availability", "training", "evaluation")
"""The sections of a column's spec on which measured properties depend."""

BASELINE = "fedavg"
"""The method from which the differences of all other methods are computed."""

CLEAR = 0.1
"""A property differs clearly between two specs if the distance of its values is above this number; see ``apart``.

Two seeds of one column of the board did not differ clearly in any property."""


@dataclass(frozen=True)
class Column:
    """A column of the board: a setting in which methods were compared.

    Args:
        name: The name of the column.
        properties: The measured properties of the column's spec.
        methods: A mapping from each method to its results, which are two lists of equal length: ``seeds`` and
            ``accuracy``.
        own: The properties of the spec with which the column is compared.
    """

    name: str
    properties: Properties
    methods: Mapping[str, Mapping[str, Any]]
    own: Properties

    @cached_property
    def differs(self) -> dict[str, float]:
        """A mapping from each property to the distance between the spec and the column, from 0 to 1; see ``apart``."""
        values = {key: apart(key, self.own, self.properties) for key in SHOWN}
        return {key: value for key, value in values.items() if value is not None}

    @property
    def distance(self) -> float:
        """The mean of ``differs``: 0 if all properties are equal, and at most 1."""
        return fmean(self.differs.values())

    @cached_property
    def clear(self) -> list[str]:
        """The properties that differ by more than ``CLEAR``, beginning with the largest difference."""
        return sorted((key for key, value in self.differs.items() if value > CLEAR), key=lambda key: -self.differs[key])

    @property
    def alike(self) -> bool:
        """Whether all properties are similar, because no property differs by more than ``CLEAR``."""
        return not self.clear

    @cached_property
    def differences(self) -> dict[str, Difference]:
        """The difference of each method's accuracy from the baseline's accuracy in percentage points, paired by seed.

        The intervals hold at the same time for all methods with 95 % confidence (Bonferroni).
        """
        values = {
            name: dict(zip(cell["seeds"], (100 * each for each in cell["accuracy"]), strict=True))
            for name, cell in self.methods.items()
        }
        baseline = values.pop(BASELINE, {})
        return {name: paired_difference(each, baseline, together=len(values)) for name, each in values.items()}


@dataclass(frozen=True)
class Board:
    """The results of the board.

    Args:
        columns: A mapping from the name of each column to its ``partition``, ``availability`` and ``methods``.
        protocol: The settings of the protocol, which are ``spec`` for all columns and ``more`` for some columns.
    """

    columns: Mapping[str, Mapping[str, Any]]
    protocol: Mapping[str, Any]

    @classmethod
    def read(cls, file: Path = FILE) -> Board | None:
        """Read the results and the protocol. Return None if there are no results."""
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
    """Measure the columns of the board, and return them with the nearest column first.

    Args:
        board: The results of the board.
        own: The properties of the spec with which the columns are compared.

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
