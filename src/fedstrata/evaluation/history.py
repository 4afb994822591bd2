"""Store the results of a run, in memory and in files: a record of each round, and a summary."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import statistics
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import safetensors.torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from fedstrata.base.errors import DataError, ExtraMissingError, SpecError, not_among
from fedstrata.base.jsonl import jsonable, read_jsonl, replace_file
from fedstrata.base.printable import csv_cell

if TYPE_CHECKING:
    from pandas import DataFrame

Record = dict[str, Any]
"""The type of a round's record: a dict of plain values, lists and dicts that JSON can represent."""

LOWER = frozenset({"loss", "log-loss", "ece", "perplexity", "rmse", "mae"})
"""The built-in metrics for which lower values are better."""

TARGETS = (0.5, 0.8, 0.9, 0.95)
"""The default targets.

For each target, the summary gives the first round in which the test accuracy reached the target.
"""

WEIGHTS, MODEL = "model.safetensors", "model.json"
"""The files of a run folder that contain the final model and its description."""

STANDARD = (
    "round", "accuracy", "loss", "train_loss", "clients_invited", "clients_returned", "clients_dropped",
    "clients_late", "clients_failed", "samples", "exchanges", "hops", "bytes_up", "bytes_down", "seconds",
    "simulated_seconds",
)  # fmt: skip
"""The standard columns of records. Evaluations and methods add further columns."""

EVALUATIONS, CLIENTS = "evaluation.json", "clients.csv"
"""The files of a run folder that contain the confusion matrices and the results per client."""


@dataclass(frozen=True, eq=False)
class Confusion:
    """The confusion matrix of an evaluation.

    Args:
        round: The round after which the model was evaluated.
        counts: The numbers of test samples, shape (C, C). Rows are true classes, and columns are predicted classes.
    """

    round: int
    counts: NDArray[np.int64]


class History(Sequence[Record]):
    """The results of a run: a sequence of records (dicts), one per round.

    Args:
        records: One record per round. The key ``round`` of a record contains the round's number, counted from 1.
        method: The method's name.
        seed: The experiment's seed.
        targets: Target accuracies in (0, 1]. For each target, the summary gives the first round that reached the
            target.
        metric_targets: A mapping from each metric (except the accuracy) to its targets.
        lower: The names of the metrics for which lower values are better.
        primary: The metric that determines the best round.
        path: The run folder; None if the run was not written to a folder.

    >>> history = History([{"round": 1, "accuracy": 0.4}, {"round": 2}, {"round": 3, "accuracy": 0.9}])
    >>> history.best_round, history.rounds_to_target(0.8)
    (3, 3)
    >>> history.column("accuracy")[0].tolist()
    [1, 3]
    """

    def __init__(
        self,
        records: Iterable[Mapping[str, Any]] = (),
        *,
        method: str = "",
        seed: int | None = None,
        targets: Iterable[float] = TARGETS,
        metric_targets: Mapping[str, Iterable[float]] | None = None,
        lower: Iterable[str] = LOWER,
        primary: str = "accuracy",
        path: Path | str | None = None,
    ) -> None:
        self.method, self.seed, self.targets = method, seed, tuple(targets)
        self.metric_targets = {name: tuple(values) for name, values in (metric_targets or {}).items()}
        self.lower, self.primary = frozenset(lower), primary
        self.stopped = ""
        """The reason why the run stopped before its last round; empty if the run did not stop early."""
        self.model_round: int | None = None
        """The round of the saved model; None if the model of the last round was saved."""
        self.kept: Record = {}
        """The metrics of the saved model; empty if the record of the model's round already contains them."""
        self.warning = ""
        """A reason why the results are not meaningful, such as unusable replies; usually empty."""
        self.privacy = ""
        """The privacy guarantee of ``privacy.dp``, as a sentence; empty without noise, and until the run ends."""
        self.confusion: dict[str, Confusion] = {}
        """The confusion matrix of the last evaluation (key ``last``), and of the best evaluation (key ``best``)."""
        self.clients: list[Record] = []
        """One row of results per client; empty if clients do not have their own test samples."""
        self.path = None if path is None else Path(path)
        self._params: Mapping[str, Tensor] | None = None
        self._weights: Path | None = None
        self._records: list[Record] = [jsonable(record) for record in records]

    @classmethod
    def load(cls, folder: Path | str) -> History:
        """Load the results of a run from its folder. Until the run has ended, ``params`` is None.

        Raises:
            DataError: The folder is not a run folder, or a file in it is damaged.
        """
        folder = Path(folder)
        if not (folder / "metrics.jsonl").is_file():
            raise DataError(f"{folder} is not a run folder: metrics.jsonl is missing. Give the folder of a run.")
        records = read_jsonl(folder / "metrics.jsonl")
        settings, ending = _about(folder)
        history = cls(records, path=folder, **settings)
        history.model_round, history.warning = ending.get("model_round"), ending.get("warning", "")
        history.privacy = ending.get("privacy", "")
        history.kept, history.stopped = ending.get("model", {}), ending.get("stopped", "")
        _read_evaluations(history, folder)
        if (folder / WEIGHTS).is_file():
            history._weights = folder / WEIGHTS
        return history

    @property
    def params(self) -> Mapping[str, Tensor] | None:
        """The final model's parameters and buffers by their names; None if the run has not ended.

        After ``load``, the model's file is read when this property is first used.

        Raises:
            DataError: The file is damaged or missing.
        """
        if self._params is None and self._weights is not None:
            self._params = read_weights(self._weights)
        return self._params

    @params.setter
    def params(self, params: Mapping[str, Tensor] | None) -> None:
        self._params = params

    def append(self, record: Mapping[str, Any]) -> None:
        """Append the record of a round. Arrays become lists, and NaN and infinity become None."""
        self._records.append(jsonable(record))

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        return self._records[index]

    def __repr__(self) -> str:
        parts = [self.method] if self.method else []
        parts += [f"seed {self.seed}"] if self.seed is not None else []
        parts.append(f"{len(self)} round{'' if len(self) == 1 else 's'}")
        column = column_of(self.primary)
        if (final := self.final(column)) is not None:
            best = self.best(column)
            of_best = "" if best is None else f" (best {best:.4f} in round {self.best_round})"
            parts.append(f"{self.primary} {final:.4f}{of_best}")
        parts += [self.warning] if self.warning else []
        parts += [str(self.path)] if self.path is not None else []
        return f"History({', '.join(parts)})"

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: the summary, a curve of the primary metric, and the last rounds."""
        from fedstrata.evaluation.card import card  # not imported at the top, because ``card`` imports this module

        return card(self)

    def column(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the numbers in a column of the records, and the round of each number.

        Args:
            name: A key of the records, or ``"outer.inner"`` for a key of a nested dict.

        Returns:
            The rounds and the values, both of shape (R,).

        Raises:
            SpecError: The column does not contain numbers, and is neither a standard column nor the primary metric.
        """
        rounds, values = self.points(name)
        if not len(rounds) and self and name not in (*STANDARD, column_of(self.primary)):
            raise SpecError("column", not_among("is not a column of numbers", name, self.columns), name)
        return rounds, values

    def points(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the result of ``column``. If the column does not contain numbers, return two empty arrays."""
        pairs = [(record["round"], value) for record in self if (value := number_in(record, name)) is not None]
        rounds = np.array([round for round, _ in pairs], dtype=np.int64)
        return rounds, np.array([value for _, value in pairs], dtype=np.float64)

    @property
    def columns(self) -> list[str]:
        """The columns that contain numbers, in order of appearance; ``"outer.inner"`` for keys of nested dicts."""
        return list(dict.fromkeys(name for record in self for name in _names(record) if name != "round"))

    @property
    def saved(self) -> Record | None:
        """The record of the saved model's round; None if the model of the last round was saved."""
        of_round = next((record for record in self if record["round"] == self.model_round), {})
        return of_round | self.kept or None

    def final(self, name: str) -> float | None:
        """Return the value of a column for the saved model; None if the column does not contain a number.

        If the model of the last round was saved, the result is the last number in the column.
        """
        if (saved := self.saved) is not None:
            return number_in(saved, name)
        return next((value for record in reversed(self) if (value := number_in(record, name)) is not None), None)

    def best(self, name: str) -> float | None:
        """Return the value of a column in the best round; None if the column has no number in this round."""
        best = self.best_round
        return next((number_in(record, name) for record in self if record["round"] == best), None)

    @property
    def final_accuracy(self) -> float | None:
        """Test accuracy of the saved model (by default, the last evaluated model); None without evaluations."""
        return self.final("accuracy")

    @property
    def best_on(self) -> str:
        """The samples that determine the best round: ``"validation"`` or, without validation samples, ``"test"``."""
        keys = ("validation.accuracy", "validation.loss")
        validated = any(number_in(record, key) is not None for record in self for key in keys)
        return "validation" if validated else "test"

    @property
    def best_accuracy(self) -> float | None:
        """Test accuracy of the best round; None without evaluations."""
        return self.best("accuracy")

    @property
    def best_round(self) -> int | None:
        """The first round with the best value of the primary metric on validation samples; None if there are no values.

        Without validation samples, the test set determines the best round. In this case, the test results of the best
        round are too optimistic.
        """
        validated = self.best_on == "validation"
        rounds, values = self.points(f"validation.{self.primary}" if validated else column_of(self.primary))
        best = values.argmin if self.primary in self.lower else values.argmax
        return int(rounds[best()]) if len(values) else None

    def rounds_to_target(self, target: float, metric: str = "accuracy") -> int | None:
        """Return the first evaluated round that reached ``target`` on the test set; None if no round reached it.

        Args:
            target: The value of the metric to reach.
            metric: ``accuracy``, ``loss`` or a name in ``evaluation.metrics``.
        """
        column, lower = column_of(metric), metric in self.lower
        for record in self:
            value = number_in(record, column)
            if value is not None and (value <= target if lower else value >= target):
                return int(record["round"])
        return None

    def total(self, name: str) -> float:
        """Return the sum of a column over all rounds. A missing number counts as 0."""
        return math.fsum(self.column(name)[1])

    @property
    def summary(self) -> Record:
        """The content of ``summary.json``, which is computed from the records.

        Accuracies are fractions in [0, 1] on the test set, or None without evaluations. The keys are:

        - ``method``, ``seed`` and ``rounds``: the method's name, the seed and the number of rounds.

        - ``primary``, ``lower_is_better``, ``final_PRIMARY`` and ``best_PRIMARY``: the primary metric, whether lower
          values are better, and the final and best values. These keys are missing if the primary metric is the
          accuracy.

        - ``final_accuracy``: the accuracy of the saved model, by default the model of the last evaluated round.

        - ``best_round``, ``best_accuracy`` and ``best_on``: the best round, its accuracy, and the samples that
          determined the best round.

        - ``accuracy_sd_last20``: the sample standard deviation of the accuracy over the last 20 evaluated rounds.

        - ``rounds_to_target``: a mapping from each target, as a string, to the first round that reached the target, or
          to None. For tasks without an accuracy, the mapping contains only targets for other metrics.

        - ``samples``, ``bytes_up``, ``bytes_down`` and ``seconds``: sums over all rounds.

        - ``stopped``, ``model_round``, ``model``, ``warning`` and ``privacy``: present only if they are set.
        """
        accuracy = self.column("accuracy")[1][-20:]
        name, column = self.primary, column_of(self.primary)
        primary: Record = {"primary": name, "lower_is_better": name in self.lower}
        primary |= {f"final_{name}": self.final(column), f"best_{name}": self.best(column)}
        reached: Record = {target_text(target): self.rounds_to_target(target) for target in self.targets}
        for metric, targets in self.metric_targets.items():
            reached[metric] = {target_text(target): self.rounds_to_target(target, metric) for target in targets}
        summary = {
            "method": self.method,
            "seed": self.seed,
            "rounds": len(self),
            **({} if name == "accuracy" else primary),
            "final_accuracy": self.final_accuracy,
            "best_accuracy": self.best_accuracy,
            "best_round": self.best_round,
            "best_on": self.best_on,
            "accuracy_sd_last20": statistics.stdev(accuracy.tolist()) if len(accuracy) > 1 else None,
            "rounds_to_target": reached,
            **{name: int(self.total(name)) for name in ("samples", "bytes_up", "bytes_down")},
            "seconds": self.total("seconds"),
        }
        ending: Record = {"stopped": self.stopped, "model_round": self.model_round, "warning": self.warning}
        ending |= {"model": self.kept, "privacy": self.privacy}
        return summary | {key: value for key, value in ending.items() if value not in (None, "", {})}

    @property
    def row(self) -> Record:
        """The run's row in a table of runs: the summary, and the final values of the loss and of all metrics."""
        names = [name for name in self.columns if name == "loss" or name.startswith("test.")]
        finals = {f"final_{name.removeprefix('test.')}": self.final(name) for name in names}
        return self.summary | finals

    def to_frame(self) -> DataFrame:
        """Return a pandas data frame with one row per round. Missing values are NaN. See ``frame``.

        Raises:
            ExtraMissingError: The extra ``tables`` is not installed.
        """
        return frame(self._records)

    def to_csv(self, path: Path | str) -> None:
        """Write a CSV file with one row per round. Lists and dicts become JSON; missing values become empty cells."""
        names = list(dict.fromkeys(name for record in self for name in record))
        with Path(path).open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(map(csv_cell, names))
            for record in self:
                values = (record.get(name) for name in names)
                writer.writerow([json.dumps(v) if isinstance(v, (list, dict)) else csv_cell(v) for v in values])


def frame(rows: Sequence[Mapping[str, Any]]) -> DataFrame:
    """Convert rows to a pandas data frame. A key in a nested dict becomes a column ``outer.inner``.

    Raises:
        ExtraMissingError: The extra ``tables`` is not installed.
    """
    try:
        from pandas import json_normalize
    except ModuleNotFoundError:
        raise ExtraMissingError("a data frame", "tables") from None
    return json_normalize(list(rows))


def _read_evaluations(history: History, folder: Path) -> None:
    """Read the confusion matrices and the results per client, if the run has written these files."""
    try:
        if (folder / EVALUATIONS).is_file():
            matrices = json.loads((folder / EVALUATIONS).read_text(encoding="utf-8"))
            history.confusion = {
                key: Confusion(int(each["round"]), np.array(each["confusion"], dtype=np.int64))
                for key, each in matrices.items()
            }
        if (folder / CLIENTS).is_file():
            with (folder / CLIENTS).open(encoding="utf-8", newline="") as file:
                history.clients = [
                    {key: text if key == "name" else _cell(text) for key, text in row.items()}
                    for row in csv.DictReader(file)
                ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"the file {EVALUATIONS} or {CLIENTS} in {folder} cannot be read: {error}. Restore the file."
        ) from error


def write_evaluations(history: History, folder: Path) -> None:
    """Write confusion matrices and results per client into a run folder, if the run has them."""
    matrices = {key: {"round": each.round, "confusion": each.counts} for key, each in history.confusion.items()}
    if matrices:
        # Write one matrix per line, because indented JSON would have a line for each number.
        lines = [f"{json.dumps(key)}: {json.dumps(jsonable(each))}" for key, each in matrices.items()]
        replace_file(folder / EVALUATIONS, ("{" + ",\n".join(lines) + "}\n").encode())
    if history.clients:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(history.clients[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(history.clients)
        replace_file(folder / CLIENTS, text.getvalue().encode())


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors in a file ``model.safetensors``, and verify them with the checksum in ``model.json``.

    Raises:
        DataError: The file is missing or damaged.
    """
    try:
        content = path.read_bytes()
        tensors = safetensors.torch.load(content)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read: {error}. Restore the file.") from error
    checksum = None
    # Ignore a damaged model.json, because functions that need the file report the damage.
    with suppress(OSError, ValueError, AttributeError, RecursionError):
        checksum = json.loads((path.parent / MODEL).read_text(encoding="utf-8")).get("parameters")
    if checksum not in (None, hashlib.sha256(content).hexdigest()):
        raise DataError(f"{path} is damaged: its checksum differs from the checksum in {MODEL}. Restore the file.")
    return tensors


def column_of(metric: str) -> str:
    """Return the column that contains a metric's value on the test set.

    >>> column_of("accuracy"), column_of("auroc")
    ('accuracy', 'test.auroc')
    """
    return metric if metric in STANDARD else f"test.{metric}"


def target_text(target: float) -> str:
    """Return a target's key in ``rounds_to_target``: the shortest text that represents the target exactly.

    >>> target_text(0.8), target_text(1.0), target_text(2 / 3)
    ('0.8', '1', '0.6666666666666666')
    """
    return short if float(short := f"{target:g}") == target else repr(float(target))


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return a mapping from columns to the numbers in a record.

    A number in a nested dict goes into the column ``outer.inner``.

    >>> numbers({"round": 3, "accuracy": 0.5, "loss": None, "validation": {"loss": 1}})
    {'accuracy': 0.5, 'validation.loss': 1.0}
    """
    columns = ((name, number_in(record, name)) for name in _names(record) if name != "round")
    return {name: value for name, value in columns if value is not None}


def _names(record: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _names(value, f"{prefix}{key}.")
        elif _is_number(value):
            yield prefix + key


def number_in(record: Mapping[str, Any], name: str) -> float | None:
    """Return the number in a column of a record; None if the record does not contain this number.

    A key in a nested dict is ``"outer.inner"``.
    """
    value: Any = record.get(name)
    if value is None and "." in name:
        table, _, rest = name.partition(".")
        inner = record.get(table)
        return number_in(inner, rest) if isinstance(inner, dict) else None
    return float(value) if _is_number(value) else None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _about(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a run's spec and summary. Return the arguments of ``History``, and the summary (empty if missing)."""
    about: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    try:
        if (folder / "spec.toml").is_file():
            spec = tomllib.loads((folder / "spec.toml").read_text(encoding="utf-8"))
            method = spec.get("method", "")
            about["method"] = method.get("name", "") if isinstance(method, dict) else str(method)
            about["seed"] = spec.get("seed")
            evaluation = spec.get("evaluation", {})
            about["primary"] = evaluation.get("primary", "accuracy")
            about |= _targets(evaluation.get("targets", TARGETS))
            tables = [metric for metric in evaluation.get("metrics", []) if isinstance(metric, dict)]
            falling = {each["name"].rpartition(":")[2] for each in tables if each.get("lower_is_better")}
            about["lower"] = LOWER | falling
        if (folder / "summary.json").is_file():
            summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
            about |= {key: summary[key] for key in ("method", "seed", "primary") if key in summary}
            if summary.get("lower_is_better"):
                # The spec may not say whether lower values of a user's own metric are better. For the primary metric,
                # the summary says so.
                about["lower"] = about.get("lower", LOWER) | {summary["primary"]}
            if "rounds_to_target" in summary:
                reached = summary["rounds_to_target"].items()
                others = {name: [float(t) for t in rounds] for name, rounds in reached if isinstance(rounds, dict)}
                accuracies = [float(target) for target, rounds in reached if not isinstance(rounds, dict)]
                about |= _targets({"accuracy": accuracies, **others})
    except (ValueError, AttributeError, TypeError) as error:
        raise DataError(f"the spec or the summary in {folder} cannot be read: {error}. Restore the file.") from error
    return about, summary


def _targets(targets: Any) -> dict[str, Any]:
    """Convert a spec's targets to arguments of ``History``.

    Targets are a list of accuracies, or a mapping from each metric to a list of values.
    """
    if not isinstance(targets, dict):
        return {"targets": targets, "metric_targets": {}}
    others = {name: values for name, values in targets.items() if name != "accuracy"}
    return {"targets": targets.get("accuracy", []), "metric_targets": others}


def _cell(text: str) -> Any:
    """Convert a CSV cell: an empty cell to None, a number to int or float, and other cells to strings."""
    if text == "":
        return None
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text


__all__ = ["STANDARD", "TARGETS", "History", "Record"]
