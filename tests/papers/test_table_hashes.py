"""Finished cells are found by the hashes of their specs: these must stay, however the code is rearranged.

    python tests/papers/test_table_hashes.py     # writes table_hashes.json again

A table that changes on purpose needs a new version; its cells run again.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import fedstrata as fs
from fedstrata.methods.base import METHODS
from fedstrata.papers.tables import Table, experiment_of, tables

FILE = Path(__file__).with_name("table_hashes.json")


def digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def of_table(table: Table) -> dict[str, str]:
    """Digests of all cells in their order, and of the complete spec of each row's first cell."""
    cells, first = list(table.cells()), {}
    for cell in cells:
        first.setdefault(cell.row, cell)
    assert first.keys() == table.rows.keys(), "a row has no cell"
    specs = {row: experiment_of(cell).to_spec() for row, cell in first.items()}
    return {"cells": digest([[cell.key, cell.hash] for cell in cells]), "specs": digest(specs)}


def of_method(name: str) -> str:
    """Digest of a whole spec whose method has only default settings."""
    return digest(fs.Experiment.from_table({"method": name}).to_spec())


def known(part: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(FILE.read_text())[part]
    return content


@pytest.mark.parametrize("name", list(tables()))
def test_finished_cells_are_found_again(name: str) -> None:
    assert of_table(tables()[name]) == known("tables").get(name), f"the specs of {name} moved"


@pytest.mark.parametrize("name", list(METHODS))
def test_default_settings_stay(name: str) -> None:
    assert of_method(name) == known("methods").get(name), f"the default settings of {name} moved"


def test_nothing_is_missing() -> None:
    assert list(known("tables")) == list(tables())
    assert list(known("methods")) == list(METHODS)


if __name__ == "__main__":
    content = {
        "tables": {name: of_table(table) for name, table in tables().items()},
        "methods": {name: of_method(name) for name in METHODS},
    }
    FILE.write_text(json.dumps(content, indent=1) + "\n")
