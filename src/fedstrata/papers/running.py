"""Cells are run once, each resumed from its checkpoint, by as many processes as there are; files keep the results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fedstrata.base.errors import DataError, FedstrataError
from fedstrata.base.jsonl import replace_file
from fedstrata.evaluation.history import History
from fedstrata.experiments.run import carry_out
from fedstrata.papers.tables import Cell, Table, experiment_of

Results = dict[str, dict[str, Any]]
"""What is kept of a table's cells, by their key."""

ALSO = ("samples", "expected_samples", "bytes_up", "bytes_down", "hops")
"""Columns of a run whose mean over the rounds is kept."""


def results_file(out: Path, table: Table) -> Path:
    """Where a table's results are."""
    return out / "cells" / table.paper / f"{table.name}.json"


def read(path: Path) -> Results:
    """A table's results by their cells' keys.

    Raises:
        DataError: The file is damaged.
    """
    if not path.is_file():
        return {}
    try:
        found: Results = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is no result file: {error}") from None
    return found


def keep(out: Path, table: Table, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Add results to a table's file; other processes may do so at the same time."""
    path = results_file(out, table)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        found = {**read(path), **results}
        lines = [f"{json.dumps(key)}: {json.dumps(found[key], separators=(',', ':'))}" for key in sorted(found)]
        replace_file(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def known(out: Path) -> Results:
    """All results by the hash of their spec: tables have some cells in common."""
    found: Results = {}
    for path in sorted((out / "cells").glob("*/*.json")):
        found |= {result["spec_sha256"]: result for result in read(path).values()}
    return found


def run(
    tables: Iterable[Table],
    out: Path,
    runs: Path,
    *,
    quick: bool = False,
    seeds: Iterable[int] | None = None,
    show: Callable[[str], None] = print,
) -> dict[str, str]:
    """Run what is missing.

    Args:
        tables: Which.
        out: Where results are kept.
        runs: Where the run folders are.
        quick: At small scale.
        seeds: These alone.
        show: Is called with a line about every cell that ends.

    Returns:
        Why cells failed, by their names.
    """
    failed: dict[str, str] = {}
    wanted = None if seeds is None else set(seeds)
    for table in tables:
        for cell in table.cells(quick=quick):
            if wanted is not None and cell.seed not in wanted:
                continue
            try:
                done = run_one(table, cell, out, runs)
            except FedstrataError as error:
                failed[f"{table.paper}/{table.name}/{cell.key}"] = str(error)
                continue
            if done is not None:
                show(f"{table.paper}/{table.name}/{cell.key}: {done['final']:.2f} % in {done['seconds']:.0f} s")
    return failed


def run_one(table: Table, cell: Cell, out: Path, runs: Path) -> dict[str, Any] | None:
    """Run a cell unless it is done or another process is at it; what is kept of it, or None.

    Raises:
        FedstrataError: It failed.
    """
    folder = runs / cell.folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(f"{folder}.lock", blocking=False):
            if cell.hash in known(out):
                return None
            history = carry_out(experiment_of(cell), out=folder, resume=True)
            if history.warning:
                raise FedstrataError(history.warning)
            found = {**about(cell, folder), **figures(history)}
            keep(out, table, {cell.key: found})
            return found
    except Timeout:
        return None


def about(cell: Cell, folder: Path) -> dict[str, Any]:
    """What a cell was made of: its spec, data, model and partition, and what they ran with."""
    made = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    identity = made["identity"]
    return {
        "spec_sha256": cell.hash,
        "results_version": identity["results_version"],
        "fingerprint": {key: identity[key] for key in ("data", "model", "partition")},
        "versions": made["made_with"],
    }


def figures(history: History) -> dict[str, Any]:
    """What tables need of a run, accuracies in percent.

    Raises:
        DataError: It has no accuracy.
    """
    curve = [round(100 * record["accuracy"], 2) for record in history if record.get("accuracy") is not None]
    if not curve:
        raise DataError("the run has no accuracy")
    found: dict[str, Any] = {
        "rounds": len(history),
        **of_curve(curve),
        "seconds": round(sum(record["seconds"] for record in history), 2),
    }
    for name in ALSO:
        if name in history.columns:
            found[name] = round(float(history.column(name)[1].mean()), 1)
    if "strata_sizes" in history[0]:
        found["strata"] = len(history[0]["strata_sizes"])
    return {**found, "curve": curve}


def of_curve(curve: list[float]) -> dict[str, float]:
    """What tables are judged by, of accuracies in percent.

    >>> of_curve([50.0, 80.0, 70.0])
    {'final': 70.0, 'last10': 66.67, 'best': 80.0, 'mean': 66.67}
    """
    last = curve[-10:]
    return {
        "final": curve[-1],
        "last10": round(sum(last) / len(last), 2),
        "best": max(curve),
        "mean": round(sum(curve) / len(curve), 2),
    }
