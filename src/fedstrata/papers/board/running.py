"""Run the board's experiments: first each method's tuning trials, and then all seeds with the best trial's settings.

Several processes may run experiments at the same time. If a process is killed, another process resumes its run.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.base.errors import FedstrataError, SpecError
from fedstrata.evaluation.history import History, number_in
from fedstrata.papers.board.protocol import BASELINE, LIMITED, Column, Entry, Protocol
from fedstrata.papers.running import Results, keep, read, results_file, run_one
from fedstrata.papers.tables import Cell, experiment_of
from fedstrata.runs.preparation import prepare

REFUSED = "refused"
"""The key under which a result stores the reason why an entry cannot be trained in a column's setting."""
TRAFFIC = ("bytes_up", "bytes_down")
"""Metrics whose sum is the number of bytes that a run sends."""
LATE = 0.2
"""The length of a run's last part as a fraction of the run. Accuracies are means over the evaluations in this part."""


def results_of(out: Path, column: Column) -> Results:
    """Return the results of a column, as a mapping from ``Cell.hash`` to results."""
    return {result["spec_sha256"]: result for result in read(results_file(out, column)).values()}


def best(trials: Sequence[tuple[Cell, dict[str, Any]]], results: Results) -> dict[str, Any] | None:
    """Return the settings of the trial with the best validation result; None if a trial is not finished.

    A trial that broke down is chosen only if all trials broke down. If several trials are equally good, the first of
    these trials is chosen.
    """
    finished = [(results[cell.hash], settings) for cell, settings in trials if cell.hash in results]
    if len(finished) < len(trials) or any(REFUSED in result for result, _ in finished):
        return None
    return max(finished, key=lambda each: ("warning" not in each[0], each[0]["validation"]))[1]


def limited(protocol: Protocol, column: Column, results: Results) -> list[tuple[Cell, dict[str, Any]]]:
    """Return the baseline's runs with the better of the learning rates in ``Protocol.rates_with_setting``.

    Entries with a second tuned setting try only these learning rates. With these runs, such entries can be compared
    with a baseline that tried the same rates. The list is empty if the baseline's trials are not finished, or if the
    baseline's tuned learning rate is one of these rates.

    Returns:
        A list of cells, one per seed, each with the chosen settings as nested dicts.
    """
    (baseline,) = protocol.entries([BASELINE])
    trials, rates = protocol.trials(column, baseline), protocol.rates_with_setting
    tuned = best(trials, results)
    if tuned is None or tuned["training"]["lr"] in rates:
        return []
    settings = best([trial for trial in trials if trial[1]["training"]["lr"] in rates], results)
    return [] if settings is None else [(cell, settings) for cell in protocol.runs(column, baseline, settings, LIMITED)]


def refusal(trials: Sequence[tuple[Cell, dict[str, Any]]], results: Results) -> str | None:
    """Return the reason why an entry cannot be trained in a column's setting; None if no reason is known."""
    reasons = (results.get(cell.hash, {}).get(REFUSED) for cell, _ in trials)
    return next((str(reason) for reason in reasons if reason is not None), None)


class Board:
    """An object that runs the experiments of the board in this process.

    Args:
        protocol: Protocol of the board.
        out: Folder in which the results are stored.
        runs: Folder that contains the run folders.
        seeds: Seeds to run; None for all seeds of the protocol.
        show: Function to call with one line of text about each finished run.
    """

    def __init__(
        self, protocol: Protocol, out: Path, runs: Path, seeds: Iterable[int] | None, show: Callable[[str], None]
    ) -> None:
        self.protocol, self.out, self.runs, self.show = protocol, out, runs, show
        self.seeds = set(protocol.seeds if seeds is None else seeds)
        self.failed: dict[str, str] = {}

    def run(self, columns: Sequence[Column], entries: Sequence[Entry]) -> None:
        """Run the experiments that have no result yet. Stop when this process cannot run any remaining experiment."""
        for column in columns:
            self._check(column)
        fast_first = sorted(entries, key=lambda entry: self.protocol.expected(entry.name))
        places = [(column, entry) for column in columns for entry in fast_first]
        while sum(self._run_entry(column, entry) for column, entry in places):
            pass

    def _check(self, column: Column) -> None:
        """Prepare a run of the baseline. If the preparation succeeds, later errors are not due to missing data."""
        (baseline,) = self.protocol.entries([BASELINE])
        prepare(experiment_of(self.protocol.trials(column, baseline)[0][0]))

    def _run_entry(self, column: Column, entry: Entry) -> int:
        """Run the missing experiments of an entry in a column, and return the number of experiments that were run."""
        trials = self.protocol.trials(column, entry)
        if not self._can_run(column, trials):
            return 0
        measure = partial(of_trial, personal=entry.is_personal)
        progress = [self._run_cell(column, cell, measure) for cell, _ in trials]
        results = results_of(self.out, column)
        runs = limited(self.protocol, column, results) if entry.name == BASELINE else []
        if (tuned := best(trials, results)) is not None:
            runs += [(cell, tuned) for cell in self.protocol.runs(column, entry, tuned)]
        for cell, settings in runs:
            if cell.seed in self.seeds:
                progress.append(self._run_cell(column, cell, partial(of_run, settings=settings)))
        return sum(progress)

    def _can_run(self, column: Column, trials: Sequence[tuple[Cell, dict[str, Any]]]) -> bool:
        """Return True if an entry can be trained in the setting of a column. Otherwise, store the reason."""
        results = results_of(self.out, column)
        if any(cell.hash in results for cell, _ in trials):
            return refusal(trials, results) is None
        cell = trials[0][0]
        spec = experiment_of(cell)
        try:
            prepare(spec)
        except SpecError as error:
            keep(self.out, column, {cell.key: {"spec_sha256": cell.hash, REFUSED: str(error)}})
            self.show(f"{column.label}: {cell.row} cannot run: {error}")
            return False
        return True

    def _run_cell(self, column: Column, cell: Cell, measure: Callable[[History, Path], dict[str, Any]]) -> bool:
        name = f"{column.label}: {cell.key}"
        if name in self.failed:
            return False
        start = time.process_time()

        def timed(history: History, folder: Path) -> dict[str, Any]:
            return {**measure(history, folder), "core_seconds": round(time.process_time() - start, 2)}

        try:
            finished = partial(results_of, column=column)
            result = run_one(column, cell, self.out, self.runs, timed, finished)
        except FedstrataError as error:
            self.failed[name] = str(error)
            return False
        if result is None:
            return False
        shutil.rmtree(self.runs / cell.folder / "checkpoint", ignore_errors=True)
        accuracy = result.get("accuracy", result.get("validation"))
        self.show(f"{name}: {accuracy:.2f} % in {result['core_seconds']:.0f} s")
        return True


def of_trial(history: History, _folder: Path, *, personal: bool) -> dict[str, Any]:
    """Return the results of a tuning trial: the learning curve, and the accuracy by which tuning chooses settings.

    Args:
        history: History of the trial.
        personal: True to evaluate personal models on the clients' own test samples; False to evaluate the global model
            on the validation samples. If the models diverged, and therefore were not evaluated, the accuracy is 0.
    """
    column = "personal.accuracy.mean" if personal else "validation.accuracy"
    values = [number_in(record, column) for record in late(history)]
    validation = _percent([value for value in values if value is not None] or [0.0])
    return {"validation": validation, "curve": curve(history, column), **_ending(history)}


def of_run(history: History, _folder: Path, *, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of a run with the chosen settings.

    Accuracies are in percent, and are means over the evaluations in the last rounds (see ``late``).

    Returns:
        A dict of results. ``accuracy`` and ``worst_class`` are measured on the test set. ``client_mean`` is the mean
        accuracy of all clients on their own test samples. ``worst_client`` is the mean accuracy of the 10 % of clients
        with the lowest accuracies. ``curve`` is the learning curve; see the function ``curve``.
    """
    records = late(history)
    by_class = np.array([record["per_class"] for record in records], dtype=np.float64)
    # If the model diverged, personal models have no finite loss, and are not evaluated.
    clients = [(record.get("personal") or record["clients"])["accuracy"] for record in records]
    return {
        "rounds": len(history),
        "settings": settings,
        "accuracy": _percent([record["accuracy"] for record in records]),
        "worst_class": _percent([float(by_class.mean(axis=0).min())]),
        "worst_client": _percent([each["worst_10"] for each in clients]),
        "client_mean": _percent([each["mean"] for each in clients]),
        **{name: round(history.total(name)) for name in (*TRAFFIC, "samples")},
        "curve": curve(history),
        **_ending(history),
    }


def late(history: History) -> list[Mapping[str, Any]]:
    """From the last fifth of a run, return the records of all rounds that were evaluated.

    Results are averaged over these evaluations, because the accuracy fluctuates from round to round.
    """
    first = (1 - LATE) * len(history)
    return [record for record in history if record.get("accuracy") is not None and record["round"] >= first]


def curve(history: History, column: str = "accuracy") -> list[tuple[int, float, int, int]]:
    """Return a learning curve: the accuracy at each evaluation, and the cost of the run until this evaluation.

    Returns:
        A list with one entry per evaluation: the round, the accuracy in percent, the number of bytes, and the number of
        per-sample gradients. The last two numbers are sums over all rounds until the evaluation.
    """
    points, spent, trained = [], 0, 0
    for record in history:
        spent += sum(int(record.get(name) or 0) for name in TRAFFIC)
        trained += int(record.get("samples") or 0)
        if (value := number_in(record, column)) is not None:
            points.append((record["round"], _percent([value]), spent, trained))
    return points


def _ending(history: History) -> dict[str, Any]:
    warning = {"warning": history.warning} if history.warning else {}
    return {"seconds": round(history.total("seconds"), 2), **warning}


def _percent(fractions: Sequence[float]) -> float:
    return round(100 * statistics.fmean(fractions), 2)
