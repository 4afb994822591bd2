"""What a run recorded: one record a round, its summary, and the files that hold them."""

from __future__ import annotations

import csv
import hashlib
import html
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

from fedstrata.base.errors import DataError, ExtraMissingError, SpecError, nearest
from fedstrata.base.jsonl import MetricsLog, jsonable, read_jsonl, replace_file

if TYPE_CHECKING:
    from pandas import DataFrame

Record = dict[str, Any]
"""One round: plain values, lists and tables that JSON can hold."""

LOWER = frozenset({"loss", "log-loss", "ece"})
"""Measures of which the lower value is the better one, unless told otherwise."""

TARGETS = (0.5, 0.8, 0.9, 0.95)
"""Accuracies whose first round the summary gives unless told otherwise."""

LAST = 10
"""Rounds that a notebook shows."""

WEIGHTS, MODEL = "model.safetensors", "model.json"
"""Where a run folder has the final model, and what using it needs."""

STANDARD = (
    "round", "accuracy", "loss", "train_loss", "clients_invited", "clients_returned", "clients_dropped",
    "clients_late", "clients_failed", "samples", "exchanges", "hops", "bytes_up", "bytes_down", "seconds",
    "simulated_seconds",
)  # fmt: skip
"""What every method records; any other key is a method's own."""


EVALUATIONS, CLIENTS = "evaluation.json", "clients.csv"
"""Where a run folder has the confusion matrices of its last and best evaluation, and the table of its clients."""


@dataclass(frozen=True, eq=False)
class Confusion:
    """The confusion matrix of an evaluation.

    Args:
        round: Its round.
        counts: How many test samples of each class (row) were taken for each class (column), (C, C).
    """

    round: int
    counts: NDArray[np.int64]


class History(Sequence[Record]):
    """The records of a run, in the order of its rounds; a sequence of dicts.

    Args:
        records: One a round, with ``round`` counted from 1.
        method: The method's name.
        seed: The experiment's seed.
        targets: Accuracies in (0, 1] for ``rounds_to_target`` in the summary.
        metric_targets: The same for other metrics, by name.
        lower: Metrics of which the lower value is the better one.
        path: The run folder, where there is one.
        params: The final model's parameters and buffers by name, where they are at hand.
        stopped: Why the run ended before its last round; empty where it did not.
        model_round: The round whose model the run left behind, where that was not the last one.
        warning: Why the run says nothing about its method, such as that it never took a step; empty where it does.

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
        path: Path | str | None = None,
        params: Mapping[str, Tensor] | None = None,
        stopped: str = "",
        model_round: int | None = None,
        warning: str = "",
    ) -> None:
        self.method, self.seed, self.targets = method, seed, tuple(targets)
        self.metric_targets = {name: tuple(values) for name, values in (metric_targets or {}).items()}
        self.lower = frozenset(lower)
        self.stopped, self.model_round, self.warning = stopped, model_round, warning
        self.confusion: dict[str, Confusion] = {}
        self.clients: list[Record] = []
        self.path = None if path is None else Path(path)
        self._params = params
        self._weights: Path | None = None
        self._records: list[Record] = [jsonable(record) for record in records]

    @classmethod
    def load(cls, folder: Path | str) -> History:
        """The history of a run folder; a run that is still going or was killed has one too, without ``params``.

        Raises:
            DataError: The folder is no run folder, or a file in it is damaged.
        """
        folder = Path(folder)
        if not (folder / "metrics.jsonl").is_file():
            raise DataError(f"{folder} is no run folder: it has no metrics.jsonl")
        records = read_jsonl(folder / "metrics.jsonl")
        history = cls(records, path=folder, **_about(folder))
        history._read_evaluations(folder)
        if (folder / WEIGHTS).is_file():
            history._weights = folder / WEIGHTS
        return history

    @property
    def params(self) -> Mapping[str, Tensor] | None:
        """The final model's parameters and buffers by name; None for a run that has not ended.

        Those of a run folder are read when they are first asked for.

        Raises:
            DataError: The folder's file is damaged, or gone.
        """
        if self._params is None and self._weights is not None:
            self._params = read_weights(self._weights)
        return self._params

    @params.setter
    def params(self, params: Mapping[str, Tensor] | None) -> None:
        self._params = params

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a round; arrays and tensors become lists, NaN and infinity None, as they would in the file."""
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
        if self.final_accuracy is not None:
            best = f"best {self.best_accuracy:.4f} in round {self.best_round}"
            parts.append(f"accuracy {self.final_accuracy:.4f} ({best})")
        parts += [self.warning] if self.warning else []
        parts += [str(self.path)] if self.path is not None else []
        return f"History({', '.join(parts)})"

    def _repr_html_(self) -> str:
        """What a notebook shows: the last rounds' standard columns."""
        last = self[-LAST:]
        names = [name for name in STANDARD if any(_number(record, name) is not None for record in last)]
        head = "".join(f"<th>{name.replace('_', ' ')}</th>" for name in names)
        lines = ["".join(f"<td>{_short(record.get(name))}</td>" for name in names) for record in last]
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        left_out = f"<p>The last {LAST} of {len(self)} rounds.</p>" if len(self) > LAST else ""
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if names else ""
        return f"<p>{html.escape(repr(self))}</p>{table}{left_out}"

    def column(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The numbers recorded under a name; rounds without one are left out.

        Args:
            name: A key of the records; ``"table.key"`` reaches into a nested table.

        Returns:
            The rounds and the values, both (R,).

        Raises:
            SpecError: No round has a number of that name.
        """
        pairs = [(record["round"], value) for record in self if (value := _number(record, name)) is not None]
        if not pairs and self and name not in STANDARD:
            accepted = self.columns
            problem = f"no column of numbers; there are: {', '.join(accepted)}{nearest(name, accepted)}"
            raise SpecError("column", problem, name)
        rounds = np.array([round for round, _ in pairs], dtype=np.int64)
        return rounds, np.array([value for _, value in pairs], dtype=np.float64)

    @property
    def columns(self) -> list[str]:
        """The names under which numbers were recorded, in order of appearance; nested ones with dots."""
        return list(dict.fromkeys(name for record in self for name in _names(record) if name != "round"))

    @property
    def final_accuracy(self) -> float | None:
        """Test accuracy of the last evaluated round, or None."""
        values = self.column("accuracy")[1]
        return float(values[-1]) if len(values) else None

    @property
    def best_on(self) -> str:
        """What the best round was picked on: ``"validation"`` samples where there are any, else the ``"test"`` set."""
        validated = any(_number(record, "validation.accuracy") is not None for record in self)
        return "validation" if validated else "test"

    @property
    def best_accuracy(self) -> float | None:
        """Test accuracy of the best round, or None."""
        best = self.best_round
        return next((_number(record, "accuracy") for record in self if record["round"] == best), None)

    @property
    def best_round(self) -> int | None:
        """The first round with the highest accuracy on the validation samples, or None.

        Without validation samples it is picked on the test set, and its accuracy flatters.
        """
        rounds, values = self.column("validation.accuracy" if self.best_on == "validation" else "accuracy")
        return int(rounds[values.argmax()]) if len(values) else None

    def rounds_to_target(self, target: float, metric: str = "accuracy") -> int | None:
        """The first evaluated round that is at least as good as ``target`` on the test set, or None.

        Args:
            target: An accuracy, or a value of another metric.
            metric: ``accuracy``, ``loss`` or another of ``evaluation.metrics``.
        """
        standard = metric in STANDARD
        pairs = [(record["round"], _number(record, metric if standard else f"test.{metric}")) for record in self]
        lower = metric in self.lower
        known = ((round, value) for round, value in pairs if value is not None)
        return next((round for round, value in known if (value <= target if lower else value >= target)), None)

    def total(self, name: str) -> float:
        """The sum of a column over all rounds; 0 where nothing was recorded."""
        return math.fsum(self.column(name)[1])

    @property
    def summary(self) -> Record:
        """What ``summary.json`` holds, computed from the records: see ``summarise``."""
        accuracy = self.column("accuracy")[1][-20:]
        others = {
            name: {target_text(target): self.rounds_to_target(target, name) for target in targets}
            for name, targets in self.metric_targets.items()
        }
        early: Record = {"stopped": self.stopped} if self.stopped else {}
        early |= {} if self.model_round is None else {"model_round": self.model_round}
        early |= {"warning": self.warning} if self.warning else {}
        return {
            "method": self.method,
            "seed": self.seed,
            "rounds": len(self),
            "final_accuracy": self.final_accuracy,
            "best_accuracy": self.best_accuracy,
            "best_round": self.best_round,
            "best_on": self.best_on,
            "accuracy_sd_last20": statistics.stdev(accuracy.tolist()) if len(accuracy) > 1 else None,
            "rounds_to_target": {
                **{target_text(target): self.rounds_to_target(target) for target in self.targets},
                **others,
            },
            **{name: int(self.total(name)) for name in ("samples", "bytes_up", "bytes_down")},
            "seconds": self.total("seconds"),
            **early,
        }

    def _read_evaluations(self, folder: Path) -> None:
        """Confusion matrices and the table of clients, where the run left them."""
        try:
            if (folder / EVALUATIONS).is_file():
                found = json.loads((folder / EVALUATIONS).read_text(encoding="utf-8"))
                self.confusion = {
                    key: Confusion(int(each["round"]), np.array(each["confusion"], dtype=np.int64))
                    for key, each in found.items()
                }
            if (folder / CLIENTS).is_file():
                with (folder / CLIENTS).open(encoding="utf-8", newline="") as file:
                    self.clients = [{key: _cell(text) for key, text in row.items()} for row in csv.DictReader(file)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{folder}: cannot read its {EVALUATIONS} or {CLIENTS}: {error}") from error

    def to_frame(self) -> DataFrame:
        """A pandas data frame with a row a round; nested tables become columns with dots, what is missing is NaN.

        Raises:
            ExtraMissingError: The extra ``tables`` is not installed.
        """
        return frame(self._records)

    def to_csv(self, path: Path | str) -> None:
        """Write one row a round; lists and tables are JSON text, what is missing is empty."""
        names = list(dict.fromkeys(name for record in self for name in record))
        with Path(path).open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(names)
            for record in self:
                values = (record.get(name) for name in names)
                writer.writerow([json.dumps(v) if isinstance(v, (list, dict)) else v for v in values])


def frame(rows: Sequence[Mapping[str, Any]]) -> DataFrame:
    """Rows as a pandas data frame; nested tables become columns with dots.

    Raises:
        ExtraMissingError: The extra ``tables`` is not installed.
    """
    try:
        from pandas import json_normalize
    except ModuleNotFoundError:
        raise ExtraMissingError("a data frame", "tables") from None
    return json_normalize(list(rows))


def summarise(
    records: Iterable[Mapping[str, Any]],
    targets: Iterable[float] = TARGETS,
    *,
    method: str = "",
    seed: int | None = None,
) -> Record:
    """The summary of a run.

    Args:
        records: One a round.
        targets: Accuracies in (0, 1].
        method: The method's name.
        seed: The experiment's seed.

    Returns:
        ``final_accuracy`` (of the last evaluated round), ``best_round`` and ``best_accuracy`` (on the test set),
        ``best_on`` (what the round was picked on), ``rounds_to_target`` (target as text to round or None),
        ``accuracy_sd_last20`` (sample standard deviation over the last 20 evaluated rounds), the totals ``samples``,
        ``bytes_up``, ``bytes_down`` and ``seconds``, and ``rounds``, ``method``, ``seed``. Accuracies are fractions;
        None where nothing was evaluated.
    """
    return History(records, method=method, seed=seed, targets=targets).summary


def write_evaluations(history: History, folder: Path) -> None:
    """Write the confusion matrices, and the table of clients where there is one, into a run folder."""
    found = {key: {"round": each.round, "confusion": each.counts} for key, each in history.confusion.items()}
    if found:
        # A matrix a line: indented it would take a line a number.
        lines = [f"{json.dumps(key)}: {json.dumps(jsonable(each))}" for key, each in found.items()]
        replace_file(folder / EVALUATIONS, ("{" + ",\n".join(lines) + "}\n").encode())
    if history.clients:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(history.clients[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(history.clients)
        replace_file(folder / CLIENTS, text.getvalue().encode())


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a ``model.safetensors``, checked against what ``model.json`` beside it says of them.

    Raises:
        DataError: The file is gone or damaged.
    """
    try:
        content = path.read_bytes()
        tensors = safetensors.torch.load(content)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    checksum = None
    with suppress(OSError, ValueError, AttributeError, RecursionError):  # whoever needs that file says what is wrong
        checksum = json.loads((path.parent / MODEL).read_text(encoding="utf-8")).get("parameters")
    if checksum not in (None, hashlib.sha256(content).hexdigest()):
        raise DataError(f"{path} is damaged: it is not what the run wrote, by its checksum in {MODEL}")
    return tensors


def target_text(target: float) -> str:
    """A target as the key of a table: the shortest text that reads as the same number.

    >>> target_text(0.8), target_text(1.0), target_text(2 / 3)
    ('0.8', '1', '0.6666666666666666')
    """
    return short if float(short := f"{target:g}") == target else repr(float(target))


def _short(value: object) -> str:
    """A cell for a notebook: nothing that is long, and nothing that could be markup."""
    if not _is_number(value):
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a round by their column, nested ones with dots; lists and what is missing are left out.

    >>> numbers({"round": 3, "accuracy": 0.5, "loss": None, "validation": {"loss": 1}})
    {'accuracy': 0.5, 'validation.loss': 1.0}
    """
    found = {name: _number(record, name) for name in _names(record) if name != "round"}
    return {name: value for name, value in found.items() if value is not None}


def _names(record: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _names(value, f"{prefix}{key}.")
        elif _is_number(value):
            yield prefix + key


def _number(record: Mapping[str, Any], name: str) -> float | None:
    value: Any = record.get(name)
    if value is None and "." in name:
        table, _, rest = name.partition(".")
        inner = record.get(table)
        return _number(inner, rest) if isinstance(inner, dict) else None
    return float(value) if _is_number(value) else None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _about(folder: Path) -> dict[str, Any]:
    """Method, seed and targets of a run, from its summary or, before there is one, from its spec."""
    about: dict[str, Any] = {}
    try:
        if (folder / "spec.toml").is_file():
            spec = tomllib.loads((folder / "spec.toml").read_text(encoding="utf-8"))
            method = spec.get("method", "")
            about["method"] = method.get("name", "") if isinstance(method, dict) else str(method)
            about["seed"] = spec.get("seed")
            evaluation = spec.get("evaluation", {})
            about |= _targets(evaluation.get("targets", TARGETS))
            tables = [metric for metric in evaluation.get("metrics", []) if isinstance(metric, dict)]
            falling = {each["name"].rpartition(":")[2] for each in tables if each.get("lower_is_better")}
            about["lower"] = LOWER | falling
        if (folder / "summary.json").is_file():
            summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
            about |= {
                key: summary[key] for key in ("method", "seed", "stopped", "model_round", "warning") if key in summary
            }
            if "rounds_to_target" in summary:
                reached = summary["rounds_to_target"].items()
                others = {name: [float(t) for t in found] for name, found in reached if isinstance(found, dict)}
                own = [float(target) for target, found in reached if not isinstance(found, dict)]
                about |= _targets({"accuracy": own, **others})
    except (ValueError, AttributeError, TypeError) as error:
        raise DataError(f"{folder}: cannot read its spec or summary: {error}") from error
    return about


def _targets(targets: Any) -> dict[str, Any]:
    """Targets of the accuracy, and those of other metrics."""
    if not isinstance(targets, dict):
        return {"targets": targets, "metric_targets": {}}
    others = {name: values for name, values in targets.items() if name != "accuracy"}
    return {"targets": targets.get("accuracy", []), "metric_targets": others}


def _cell(text: str) -> Any:
    """A cell of a table: nothing, a number or text."""
    if text == "":
        return None
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return text


__all__ = ["STANDARD", "TARGETS", "History", "MetricsLog", "Record", "summarise"]
