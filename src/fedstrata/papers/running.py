"""Run the experiments of the papers' tables, and store the results.

Each pair of a row and a column has one run per seed.
Several processes may work on a table at the same time, but only one process executes each run. If this process is
killed, another process resumes the run from its last checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock, Timeout

from fedstrata.base.errors import DataError, FedstrataError
from fedstrata.base.jsonl import replace_file
from fedstrata.evaluation.history import History
from fedstrata.experiments.run import carry_out
from fedstrata.papers.tables import Cell, Table, experiment_of
from fedstrata.reporting.replayed_strata import strata_of_folder

Results = dict[str, dict[str, Any]]
"""A mapping from the key of each run to the results of the run."""

ALSO = ("samples", "expected_samples", "bytes_up", "bytes_down", "hops")
"""Metrics that the results store as means over the rounds of a run."""


class Stored(Protocol):
    """A set of runs, such as the runs of a table, whose results are stored in one file."""

    @property
    def paper(self) -> str:
        """The name of the folder that contains the file with the results."""

    @property
    def name(self) -> str:
        """The name of the file with the results, without its suffix."""


def results_file(out: Path, table: Stored) -> Path:
    """Return the path of the file that stores the results of a table."""
    return out / "cells" / table.paper / f"{table.name}.json"


def read(path: Path) -> Results:
    """Read the results of a table from a file, as a mapping from the key of each run to its results.

    If the file does not exist, the mapping is empty.

    Raises:
        DataError: The file does not contain valid JSON.
    """
    try:
        results: Results = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise DataError(f"{path} is not a result file: {error}. Delete this file.") from None
    return results


def keep(out: Path, table: Stored, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Add results to the file of a table. Other processes may add results at the same time."""
    path = results_file(out, table)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        all_results = sorted({**read(path), **results}.items())
        lines = [f"{json.dumps(key)}: {json.dumps(result, separators=(',', ':'))}" for key, result in all_results]
        replace_file(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def known(out: Path) -> Results:
    """Read the results of all tables, as a mapping from ``Cell.hash`` to results. Several tables may share a run."""
    paths = sorted((out / "cells").glob("*/*.json"))
    return {result["spec_sha256"]: result for path in paths for result in read(path).values()}


def run(
    tables: Iterable[Table],
    out: Path,
    runs: Path,
    *,
    quick: bool = False,
    seeds: Iterable[int] | None = None,
    device: str = "cpu",
    show: Callable[[str], None] = print,
) -> dict[str, str]:
    """Run those experiments of the given tables that do not have results yet.

    An experiment (``Cell``) is a run for one row and one column of a table, with one seed.

    Args:
        tables: Tables whose experiments are run.
        out: Folder in which the results are stored.
        runs: Folder that contains the run folders.
        quick: Whether to run the small experiments of ``--quick``.
        seeds: Seeds to run; None for all seeds.
        device: Value of ``training.device`` in all runs.
        show: Function that is called with one line of text about each finished run.

    Returns:
        A mapping from the name of each failed run to the error message.
    """
    failed: dict[str, str] = {}
    wanted = None if seeds is None else set(seeds)
    for table in tables:
        for cell in table.cells(quick=quick):
            if wanted is not None and cell.seed not in wanted:
                continue
            try:
                done = run_one(table, cell, out, runs, device=device)
            except FedstrataError as error:
                failed[f"{table.paper}/{table.name}/{cell.key}"] = str(error)
                continue
            if done is not None:
                show(f"{table.paper}/{table.name}/{cell.key}: {done['final']:.2f} % in {done['seconds']:.0f} s")
    return failed


def measured(history: History, folder: Path) -> dict[str, Any]:
    """Compute the results of a finished run for the tables of the papers.

    Raises:
        FedstrataError: The history of the run contains a warning, because the run broke down.
    """
    if history.warning:
        raise FedstrataError(history.warning)
    return {**figures(history), **about_strata(history, folder)}


def run_one(
    table: Stored,
    cell: Cell,
    out: Path,
    runs: Path,
    measure: Callable[[History, Path], dict[str, Any]] = measured,
    finished: Callable[[Path], Container[str]] = known,
    device: str = "cpu",
) -> dict[str, Any] | None:
    """Run one experiment of a table. Skip the experiment if it is finished, or if another process is running it.

    An experiment (``Cell``) is a run for one row and one column of a table, with one seed.

    Args:
        table: Table that contains the cell. The results are stored in the file of this table.
        cell: Cell to run.
        out: Folder in which the results are stored.
        runs: Folder that contains the run folders.
        measure: Function that computes the results of a run from the run's history and folder.
        finished: Function that returns the hashes (``Cell.hash``) of all finished cells in the folder of the results.
        device: Value of ``training.device`` in the run.

    Returns:
        The results of the cell; None if the cell was not run.

    Raises:
        FedstrataError: The run failed.
    """
    folder = runs / cell.folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(f"{folder}.lock", blocking=False):
            if cell.hash in finished(out):
                return None
            history = carry_out(experiment_of(cell, device), out=folder, resume=True)
            result = {**about(cell, folder), **measure(history, folder)}
            keep(out, table, {cell.key: result})
            return result
    except Timeout:
        return None


def about(cell: Cell, folder: Path) -> dict[str, Any]:
    """Return the origin of a run's results: software versions, and hashes of the spec, data, model and partition."""
    made = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    identity = made["identity"]
    return {
        "spec_sha256": cell.hash,
        "results_version": identity["results_version"],
        "fingerprint": {key: identity[key] for key in ("data", "model", "partition")},
        "versions": made["made_with"],
    }


def figures(history: History) -> dict[str, Any]:
    """Compute the results of a run from its history, with accuracies in percent.

    Raises:
        DataError: The run never evaluated the model.
    """
    curve = [round(100 * record["accuracy"], 2) for record in history if record.get("accuracy") is not None]
    if not curve:
        raise DataError("the model was never evaluated, so the run has no accuracy. Evaluate at least the last round.")
    seconds = round(sum(record["seconds"] for record in history), 2)
    result: dict[str, Any] = {"rounds": len(history), **of_curve(curve), "seconds": seconds}
    result |= {name: round(float(history.column(name)[1].mean()), 1) for name in ALSO if name in history.columns}
    if "weight_diversity" in history.columns:
        result["diversity"] = float(f"{history.column('weight_diversity')[1].mean():.4g}")
    if "test.balanced-accuracy" in history.columns:
        result["macro"] = round(100 * float(history.column("test.balanced-accuracy")[1][-1]), 2)
    losses = [round(float(loss), 4) for loss in history.column("train_loss")[1]]
    return {**result, "curve": curve, "train_loss": losses}


def about_strata(history: History, folder: Path) -> dict[str, Any]:
    """Return statistics of the strata of a run; an empty dict if the sampler does not form strata.

    Returns:
        A dict of statistics. ``strata`` is the number of strata in the first round. ``undrawn`` is the percentage of
        strata from which no client was drawn, averaged over the rounds. ``purity`` is the percentage of samples whose
        label is the most frequent label of their stratum, for the strata in the last checkpoint.
    """
    if "strata_sizes" not in history[0]:
        return {}
    result: dict[str, Any] = {"strata": len(history[0]["strata_sizes"])}
    drawn = [record["strata_allocation"] for record in history if "strata_allocation" in record]
    if drawn:
        result["undrawn"] = round(100 * sum(each.count(0) / len(each) for each in drawn) / len(drawn), 1)
    if (folder / "checkpoint").exists():
        result["purity"] = round(100 * strata_of_folder(folder).purity(), 1)
    return result


def of_curve(curve: list[float]) -> dict[str, float]:
    """Compute the metrics of tables (see ``METRICS``) from the accuracies of all evaluated rounds, in percent.

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
