"""Compare the methods in a column of the board by values, ranks and differences, over whole runs and at equal cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from fedstrata.papers.board.protocol import BASELINE, Column, Entry, Protocol
from fedstrata.papers.board.ranks import Ranking, ranking
from fedstrata.papers.board.running import LATE, best, limited, refusal, results_of
from fedstrata.papers.running import Results
from fedstrata.reporting.statistics import Difference, holm, paired_difference

MEASURES = {
    "accuracy": "accuracy",
    "at_bytes": "at FedAvg's bytes",
    "at_samples": "at FedAvg's samples",
    "worst_class": "worst class",
    "worst_client": "worst tenth",
}
"""A mapping from the measures of the board to headings of a table. All measures are accuracies in percent."""
BUDGETS = {"at_bytes": 2, "at_samples": 3}
"""For each measure at equal cost, the index of the cost in the points of a learning curve; see ``running.curve``."""
FEW_MORE = 1.05
"""A run may cost up to this multiple of the baseline's cost, because the methods' messages differ by a few bytes."""
RESOLUTION = 0.01
"""The rounding step of results, in percentage points."""

Curve = Sequence[Sequence[float]]
"""The type of a learning curve; see ``running.curve``."""


@dataclass(frozen=True)
class Outcome:
    """The results of an entry (a method or a composition) in one column of the board.

    Args:
        entry: Entry of the board (a method or a composition).
        settings: Settings that tuning has chosen, as nested dicts.
        trials: Results of the entry's tuning trials.
        runs: A mapping from each finished seed to the results of the run with this seed.
    """

    entry: Entry
    settings: Mapping[str, Any]
    trials: Sequence[Mapping[str, Any]]
    runs: Mapping[int, Mapping[str, Any]]

    @property
    def hours(self) -> float:
        """The core hours of all trials and runs of the entry."""
        seconds: float = sum(result["core_seconds"] for result in [*self.trials, *self.runs.values()])
        return seconds / 3600

    @property
    def chosen(self) -> Mapping[str, Any]:
        """The results of the trial with the chosen settings."""
        return max(self.trials, key=lambda trial: ("warning" not in trial, trial["validation"]))

    def mean(self, key: str) -> float:
        """Return the mean, over the seeds, of the results with the given key."""
        return fmean(run[key] for run in self.runs.values())

    def values(self, measure: str, baseline: Outcome) -> dict[int, float | None]:
        """Map each seed to a measure's value, or to None if the run's first evaluation is already beyond the budget."""
        if (place := BUDGETS.get(measure)) is None:
            return {seed: run[measure] for seed, run in self.runs.items()}
        return {
            seed: within(run["curve"], place, baseline.runs[seed]["curve"][-1][place])
            for seed, run in self.runs.items()
            if seed in baseline.runs
        }


def within(points: Curve, place: int, budget: float) -> float | None:
    """Return a run's accuracy within a budget; None if the first evaluation is already beyond the budget.

    Only the part of the run within the budget is used (the whole run, if it costs less than the budget). The accuracy
    is the mean over the evaluations in the last fifth of this part.

    Args:
        points: Points of the run's curve; see ``running.curve``.
        place: Index of the cost in each point of the curve.
        budget: Maximum cost. Points that cost up to ``FEW_MORE`` times as much are also within the budget.
    """
    affordable = [point for point in points if point[place] <= budget * FEW_MORE]
    if not affordable:
        return None
    first = (1 - LATE) * affordable[-1][0]
    return fmean(point[1] for point in affordable if point[0] >= first)


@dataclass(frozen=True)
class Verdicts:
    """The results of a column of the board, with rankings and statistical tests.

    Args:
        column: Column of the board (a partition with an availability model).
        outcomes: Results of all entries with at least one finished seed.
        seeds: Seeds of the protocol.
        refused: For each entry that cannot be trained in the column's setting, the reason.
        missing: Names of the entries that have not finished all seeds.
        limited: For each seed, the accuracy of the baseline with a learning rate that entries with a second tuned
            setting tried (see ``running.limited``); empty if these runs are not needed or not finished.
    """

    column: Column
    outcomes: Mapping[str, Outcome]
    seeds: Sequence[int]
    refused: Mapping[str, str]
    missing: Sequence[str]
    limited: Mapping[int, float]

    @cached_property
    def complete(self) -> dict[str, Outcome]:
        """The results of the entries that have finished all seeds; empty if the baseline has not finished all seeds."""
        every = {name: each for name, each in self.outcomes.items() if set(each.runs) >= set(self.seeds)}
        return every if BASELINE in every else {}

    def values(self, name: str, measure: str) -> list[float | None]:
        """Return the values of a measure for an entry, in the order of the protocol's seeds."""
        values = self.outcomes[name].values(measure, self.outcomes[BASELINE])
        return [values.get(seed) for seed in self.seeds]

    @cached_property
    def rankings(self) -> dict[str, Ranking]:
        """A mapping from each measure to the ranking of the entries in ``complete``, with the seeds as blocks."""
        every = {measure: ranking({name: self.values(name, measure) for name in self.complete}) for measure in MEASURES}
        return {measure: each for measure, each in every.items() if each is not None}

    def difference(self, name: str, measure: str = "accuracy", other: str = BASELINE) -> Difference:
        """Return the difference between two entries, paired by seed, in percentage points."""
        own, base = (dict(zip(self.seeds, self.values(each, measure), strict=True)) for each in (name, other))
        return paired_difference(own, base, resolution=RESOLUTION)

    @cached_property
    def corrected(self) -> dict[str, float]:
        """For each entry, the p-value of the accuracy difference from the baseline, with Holm's correction."""
        return p_values({name: self.difference(name) for name in self.complete if name != BASELINE})

    @cached_property
    def limited_differences(self) -> dict[str, Difference]:
        """The accuracy differences between entries with a second tuned setting and the runs in ``limited``."""
        names = [name for name, each in self.complete.items() if each.entry.grid and self.limited]
        return {name: paired_difference(self._runs(name), self.limited, resolution=RESOLUTION) for name in names}

    @cached_property
    def limited_change(self) -> Difference:
        """The accuracy of the runs in ``limited`` minus the accuracy of the baseline's tuned runs."""
        return paired_difference(self.limited, self._runs(BASELINE), resolution=RESOLUTION)

    def _runs(self, name: str) -> dict[int, float]:
        return {seed: run["accuracy"] for seed, run in self.outcomes[name].runs.items()}

    def best_at(self, measure: str, compositions: bool | None = None) -> str | None:
        """Return the entry with the best validation accuracy within the baseline's budget; None if unknown.

        For each entry, the comparison uses the trial whose settings were chosen. Entries with personal models are left
        out, because their trials are evaluated on the clients' own test samples.

        Args:
            measure: A key of ``BUDGETS``.
            compositions: Whether to consider only compositions (True) or only methods (False). Default: all entries.
        """
        place, base = BUDGETS[measure], self.complete[BASELINE].chosen["curve"][-1]
        values = {
            name: within(each.chosen["curve"], place, base[place])
            for name, each in self.complete.items()
            if not each.entry.is_personal and compositions in (None, each.entry.is_composition)
        }
        known = {name: value for name, value in values.items() if value is not None}
        return max(known, key=lambda name: known[name], default=None)


def p_values(differences: Mapping[str, Difference]) -> dict[str, float]:
    """Return the p-values of differences with Holm's correction; differences without a p-value are left out."""
    return holm({name: each.p for name, each in differences.items() if each.p is not None})


@dataclass(frozen=True)
class Contest:
    """A comparison of the best composition with the best method, in one column and at equal cost.

    Args:
        column: Name of the column.
        measure: A key of ``BUDGETS``, which defines the cost.
        composition: Composition with the best validation accuracy.
        method: Method with the best validation accuracy.
        difference: The composition's accuracy minus the method's accuracy in percentage points, over all seeds.
    """

    column: str
    measure: str
    composition: str
    method: str
    difference: Difference


def contests(columns: Sequence[Verdicts]) -> list[Contest]:
    """In each column, compare the best composition with the best method, for each budget in ``BUDGETS``."""
    compared = []
    for column in columns:
        for measure in BUDGETS if column.complete else ():
            composition, method = (column.best_at(measure, composed) for composed in (True, False))
            if composition is not None and method is not None:
                difference = column.difference(composition, measure, method)
                compared.append(Contest(column.column.label, measure, composition, method, difference))
    return compared


def judged(protocol: Protocol, column: Column, entries: Sequence[Entry], out: Path) -> Verdicts:
    """Compare all entries in a column of the board, using the stored results of their runs."""
    results = results_of(out, column)
    outcomes, refused, missing = dict[str, Outcome](), dict[str, str](), list[str]()
    for entry in entries:
        trials = protocol.trials(column, entry)
        if (reason := refusal(trials, results)) is not None:
            refused[entry.name] = reason
            continue
        outcome = _outcome(protocol, column, entry, results)
        if outcome is not None and outcome.runs:
            outcomes[entry.name] = outcome
        if outcome is None or len(outcome.runs) < len(protocol.seeds):
            missing.append(entry.name)
    return Verdicts(column, outcomes, protocol.seeds, refused, missing, _limited(protocol, column, results))


def _outcome(protocol: Protocol, column: Column, entry: Entry, results: Results) -> Outcome | None:
    trials = protocol.trials(column, entry)
    if (settings := best(trials, results)) is None:
        return None
    runs = {cell.seed: results[cell.hash] for cell in protocol.runs(column, entry, settings) if cell.hash in results}
    return Outcome(entry, settings, [results[cell.hash] for cell, _ in trials], runs)


def _limited(protocol: Protocol, column: Column, results: Results) -> dict[int, float]:
    cells = [cell for cell, _ in limited(protocol, column, results)]
    finished = all(cell.hash in results for cell in cells)
    return {cell.seed: results[cell.hash]["accuracy"] for cell in cells} if finished else {}


def overall(columns: Sequence[Verdicts]) -> Ranking | None:
    """Rank the entries by mean accuracy, with the columns as blocks. Entries with missing seeds are left out."""
    shared = [name for name in columns[0].complete if all(name in each.complete for each in columns)] if columns else []
    return ranking({name: [each.complete[name].mean("accuracy") for each in columns] for name in shared})
