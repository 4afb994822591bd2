"""Define the metrics that a spec may list in ``evaluation.metrics``.

Most metrics are computed from counts. One implementation therefore works for a test set, for many clients, and for sums
from real sites. Users can define metrics as functions, or as classes with a single method.
"""

from __future__ import annotations

import inspect
import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field
from typing_extensions import override

from fedstrata.base.config import FromRegistry, Registry, Setting, build, plain
from fedstrata.base.errors import ExtraMissingError, SpecError
from fedstrata.base.loading import load_object
from fedstrata.data.tasks.base import Task
from fedstrata.evaluation.predictions import Predictions, Rows
from fedstrata.evaluation.sums import EvaluationSums, TaskSums, calibration

Ints = NDArray[np.int64]
Reals = NDArray[np.float64]


class Metric(Setting):
    """Base class of metrics, which measure the quality of predictions. To define your own metric, override ``of``.

    >>> class Errors(Metric):
    ...     higher_is_better = False
    ...     def of(self, predictions):
    ...         return float((predictions.predicted != predictions.labels).sum())
    """

    higher_is_better: ClassVar[bool] = True
    """Whether a higher value of the metric is better."""

    table: ClassVar[str] = "classes"
    """The data from which the metric is computed: ``"loss"`` (losses), ``"rows"`` (targets and predictions of each
    sample), ``"classes"`` (predictions of a task that has classes), or an entry of ``Task.tables``.
    """

    score_bins: ClassVar[int] = 0
    """The number of bins in each class's score histogram for ``of_sums``; 0 if ``of_sums`` does not use one."""

    confidence_bins: ClassVar[int] = 0
    """The number of bins in the confidence histogram that ``of_sums`` uses; 0 if ``of_sums`` does not use this
    histogram."""

    @property
    def label(self) -> str:
        """The metric's name in records.

        For a metric named ``"module:name"`` in the spec, the label is the part after the last colon.
        """
        return self.name.rpartition(":")[2]

    @abstractmethod
    def of(self, predictions: Predictions) -> float | None:
        """Return the metric's value; None if it is undefined, such as the AUROC for samples of a single class."""

    def by_client(self, predictions: Predictions, owners: Ints, clients: int) -> Reals:
        """Return the metric's value on each client's samples.

        Args:
            predictions: The predictions of N samples.
            owners: The index (from 0) of each sample's client, shape (N,).
            clients: The number of clients.

        Returns:
            One value per client, shape (clients,); NaN if the value is undefined.
        """
        order = np.argsort(owners, kind="stable")
        ends = np.searchsorted(owners[order], np.arange(clients + 1))
        parts = [order[ends[client] : ends[client + 1]] for client in range(clients)]
        return np.array([nan_for_none(self.of(predictions[part]) if len(part) else None) for part in parts])

    def of_sums(self, sums: EvaluationSums) -> float | None:
        """Compute the metric's value from the sums that real sites sent.

        Raises:
            NotImplementedError: The metric cannot be computed from sums.
        """
        raise NotImplementedError

    def error_of_sums(self, sums: EvaluationSums) -> float | None:
        """Return an upper bound on the error of ``of_sums``; None if the value is exact."""
        return None

    def by_class(self, predictions: Predictions) -> list[float | None] | None:
        """Return the metric's value for each class; None if the metric is not defined for individual classes."""
        return None

    def of_tables(self, tables: Mapping[str, Reals], loss: Reals, weight: Reals) -> Reals:
        """Compute the metric's values on M sets of samples, for tasks other than plain classification.

        Args:
            tables: A mapping from each entry of ``Task.tables`` to an array of one sum per set, shape (M, …).
            loss: For each set, the sum of the losses, shape (M,).
            weight: For each set, the sum of the weights, shape (M,).

        Raises:
            NotImplementedError: The metric cannot be computed from sums.
        """
        raise NotImplementedError

    @classmethod
    def adds_up(cls, task: Task) -> bool:
        """Return True if the metric can be computed from sums, which real sites send instead of predictions."""
        return cls.of_sums is not Metric.of_sums if task.has_classes else cls.of_tables is not Metric.of_tables

    def check_rows(self, rows: Rows, task: Task) -> None:
        """For a ``task`` other than plain classification, check that the metric supports it.

        Args:
            rows: The predictions of a few samples.
            task: The task.

        Raises:
            SpecError: The metric does not support the task, or computing the metric fails.
        """
        if self.table not in ("loss", "rows", *task.tables) or (self.label == "accuracy" and not task.has_accuracy):
            accepted = ", ".join(task.default_metrics)
            problem = f"is not a metric of the task {task.name!r}. Use {accepted}, or your own function."
            raise SpecError("evaluation.metrics", problem, self.label)
        everything = np.zeros(len(rows), dtype=np.int64)
        self._try(
            lambda: none_for_nan(self.by_client_of_rows(rows, everything, 1)[0]),
            f"predictions of the task {task.name!r}",
        )

    def by_client_of_rows(self, rows: Rows, owners: Ints, clients: int) -> Reals:
        """Return the metric's value on each client's samples, for tasks other than plain classification.

        Args:
            rows: The predictions of N samples.
            owners: The index (from 0) of each sample's client, shape (N,).
            clients: The number of clients.

        Returns:
            One value per client, shape (clients,); NaN if the value is undefined.
        """
        tables = {name: rows.sums(name, owners, clients) for name in (self.table,) if name in rows.arrays}
        loss: Reals = np.bincount(owners, weights=rows.losses, minlength=clients).astype(np.float64)
        weight: Reals = np.bincount(owners, weights=rows.weights, minlength=clients).astype(np.float64)
        return self.of_tables(tables, loss, weight)

    def of_task_sums(self, sums: TaskSums) -> float | None:
        """Compute the metric's value from the sums that real sites send."""
        tables = {name: table.numpy()[None] for name, table in sums.tables.items()}
        return none_for_nan(self.of_tables(tables, np.array([sums.loss]), np.array([sums.weight]))[0])

    def check(self, classes: int) -> None:
        """Test the metric on a few artificial predictions that cover all classes.

        Raises:
            SpecError: The metric fails, or returns neither a number nor None.
        """
        if self.table not in ("classes", "counts", "loss", "rows"):
            problem = (
                "is a metric for predicted numbers, not for classes. Set task = 'regression', or use another metric, "
                "such as 'accuracy'."
            )
            raise SpecError("evaluation.metrics", problem, self.label)
        labels = np.arange(4 * classes) % classes
        logits = np.random.default_rng(0).normal(size=(len(labels), classes))
        self._try(lambda: self.of(Predictions.of(labels, logits)), f"predictions of {classes} classes")

    def _try(self, measure: Callable[[], float | None], on: str) -> None:
        try:
            value = measure()
        except Exception as error:  # A user's own metric may raise any exception.
            problem = f"fails on {on}: {type(error).__name__}: {error}. Correct the metric."
            raise SpecError("evaluation.metrics", problem, self.label) from error
        if value is not None and not isinstance(value, (int, float, np.number)):
            problem = f"returns a {type(value).__name__}. Return a number, or None if the metric has no value."
            raise SpecError("evaluation.metrics", problem, self.label)


class _ByClient(Metric):
    """Base class of metrics whose ``by_client`` computes the values of all clients at once."""

    @override
    def of(self, predictions: Predictions) -> float | None:
        return none_for_nan(self.by_client(predictions, np.zeros(len(predictions), dtype=np.int64), 1)[0])


class _OfCounts(_ByClient):
    """Base class of metrics that are computed from counts of samples, predictions and correct predictions."""

    table = "counts"

    @override
    def of_tables(self, tables: Mapping[str, Reals], loss: Reals, weight: Reals) -> Reals:
        return self.overall(*np.moveaxis(tables["counts"], -1, 0))

    def each(self, hits: Reals, actual: Reals, predicted: Reals) -> Reals:
        """Return the metric's value for each class; NaN if the value is undefined. Default: the recall.

        Args:
            hits: The number of correctly predicted samples of each class, shape (…, C).
            actual: The number of samples of each class, shape (…, C).
            predicted: The number of predictions of each class, shape (…, C).

        Returns:
            The values, shape (…, C).
        """
        return _ratio(hits, actual)

    def overall(self, hits: Reals, actual: Reals, predicted: Reals) -> Reals:
        """Return the metric's value over all classes together.

        Default: the mean of the classes' values. See ``each`` for the arguments.
        """
        return _mean_of_known(self.each(hits, actual, predicted))

    @override
    def by_client(self, predictions: Predictions, owners: Ints, clients: int) -> Reals:
        return self.overall(*_counts(predictions, owners, clients))

    @override
    def of_sums(self, sums: EvaluationSums) -> float | None:
        confusion = sums.confusion.numpy().astype(np.float64)
        return none_for_nan(self.overall(np.diagonal(confusion), confusion.sum(axis=1), confusion.sum(axis=0)))

    @override
    def by_class(self, predictions: Predictions) -> list[float | None]:
        values = self.each(*_counts(predictions, np.zeros(len(predictions), dtype=np.int64), 1))[0]
        return [none_for_nan(value) for value in values]


class Accuracy(_OfCounts):
    """Fraction of correctly classified samples. The accuracy of a single class is its recall."""

    @override
    def overall(self, hits: Reals, actual: Reals, predicted: Reals) -> Reals:
        return _ratio(hits.sum(axis=-1), actual.sum(axis=-1))


class BalancedAccuracy(_OfCounts):
    """Recall, averaged over the classes that have samples (scikit-learn's ``balanced_accuracy_score``)."""


class WorstClass(_OfCounts):
    """Lowest recall of all classes that have samples."""

    @override
    def overall(self, hits: Reals, actual: Reals, predicted: Reals) -> Reals:
        lowest: Reals = np.fmin.reduce(self.each(hits, actual, predicted), axis=-1)  # fmin ignores NaN
        return lowest


class MacroF1(_OfCounts):
    """F1 score, averaged over the classes that have samples or predictions (scikit-learn's macro ``f1_score``)."""

    @override
    def each(self, hits: Reals, actual: Reals, predicted: Reals) -> Reals:
        return _ratio(2 * hits, actual + predicted)


class MicroF1(_OfCounts):
    """F1 score from counts that are summed over all classes or labels (scikit-learn's micro ``f1_score``)."""

    @override
    def overall(self, hits: Reals, actual: Reals, predicted: Reals) -> Reals:
        return _ratio(2 * hits.sum(axis=-1), actual.sum(axis=-1) + predicted.sum(axis=-1))


class MeanIoU(_OfCounts):
    """Intersection over union (IoU) of true and predicted pixels, averaged over the classes.

    The mean leaves out classes that occur neither in the true nor in the predicted pixels.
    """

    @override
    def each(self, hits: Reals, actual: Reals, predicted: Reals) -> Reals:
        return _ratio(hits, actual + predicted - hits)


class _OfErrors(Metric):
    """Base class of regression metrics, which are computed from sums over samples and averaged over targets."""

    table = "errors"
    higher_is_better = False

    @override
    def of(self, predictions: Predictions) -> float | None:
        raise NotImplementedError

    @abstractmethod
    def each(self, n: Reals, absolute: Reals, square: Reals, total: Reals, squares: Reals) -> Reals:
        """Return the metric's value for each target.

        Args:
            n: The number of samples.
            absolute: The sum of the absolute errors, in the unit of the target.
            square: The sum of the squared errors.
            total: The sum of the differences between the targets and the mean of the training targets.
            squares: The sum of the squared differences between the targets and the mean of the training targets.
        """

    @override
    def of_tables(self, tables: Mapping[str, Reals], loss: Reals, weight: Reals) -> Reals:
        values = self.each(*np.moveaxis(tables["errors"], -1, 0)).mean(axis=-1)
        return np.where(np.isfinite(values), values, np.nan)


class RMSE(_OfErrors):
    """Root mean squared error, in the unit of the target (scikit-learn's ``root_mean_squared_error``)."""

    @override
    def each(self, n: Reals, absolute: Reals, square: Reals, total: Reals, squares: Reals) -> Reals:
        return np.sqrt(_ratio(square, n))


class MAE(_OfErrors):
    """Mean absolute error, in the unit of the target (scikit-learn's ``mean_absolute_error``)."""

    @override
    def each(self, n: Reals, absolute: Reals, square: Reals, total: Reals, squares: Reals) -> Reals:
        return _ratio(absolute, n)


class R2(_OfErrors):
    """Coefficient of determination R² (scikit-learn's ``r2_score``)."""

    higher_is_better = True

    @override
    def each(self, n: Reals, absolute: Reals, square: Reals, total: Reals, squares: Reals) -> Reals:
        return 1 - _ratio(square, squares - _ratio(total * total, n))


class AUROC(_ByClient):
    """Area under the ROC curve: for the second class if there are two classes, and otherwise the mean over all classes.

    The ROC curve of a class compares samples of this class with all other samples. The mean leaves out a class if all
    samples or none of the samples belong to the class. If real sites send histograms, the value is approximate, and the
    record also contains an upper bound on its error.

    Args:
        bins: Number of bins in each class's histogram of scores. Sites of a deployment send these histograms instead of
            scores.
    """

    bins: Annotated[int, Field(ge=2, le=100_000)] = 400

    @property
    @override
    def score_bins(self) -> int:  # type: ignore[override]
        return self.bins

    @override
    def by_client(self, predictions: Predictions, owners: Ints, clients: int) -> Reals:
        return _mean_of_known(self._each(predictions, owners, clients))

    def _each(self, predictions: Predictions, owners: Ints, clients: int) -> Reals:
        """Return each client's area for each class, (clients, C); NaN if undefined.

        With two classes, only the area of the second class is used.
        """
        classes = [1] if predictions.classes == 2 else range(predictions.classes)
        return np.stack(
            [_areas(predictions.probabilities[:, c], predictions.labels == c, owners, clients) for c in classes],
            axis=1,
        )

    @override
    def by_class(self, predictions: Predictions) -> list[float | None]:
        areas = self._each(predictions, np.zeros(len(predictions), dtype=np.int64), 1)[0]
        return [none_for_nan(value) for value in (np.repeat(areas, 2) if predictions.classes == 2 else areas)]

    @override
    def of_sums(self, sums: EvaluationSums) -> float | None:
        # The order of two scores in the same bin is unknown, so the pair counts half, like a tie.
        below, tied, pairs = self._pairs(sums)
        return none_for_nan(_mean_of_known(_ratio(below + tied / 2, pairs)[None])[0])

    @override
    def error_of_sums(self, sums: EvaluationSums) -> float | None:
        _, tied, pairs = self._pairs(sums)
        return none_for_nan(_mean_of_known(_ratio(tied / 2, pairs)[None])[0])

    def _pairs(self, sums: EvaluationSums) -> tuple[Reals, Reals, Reals]:
        """For each class, count the pairs that consist of a sample of this class and a sample of another class.

        Returns:
            Three counts for each class: pairs in which the sample of another class is in the lower bin, pairs with both
            samples in the same bin, and all pairs.
        """
        scores = sums.scores.numpy().astype(np.float64)
        others, members = (scores[1:] if len(scores) == 2 else scores).transpose(1, 0, 2)
        under = np.cumsum(others, axis=1) - others
        pairs = others.sum(axis=1) * members.sum(axis=1)
        return (members * under).sum(axis=1), (members * others).sum(axis=1), pairs


class LogLoss(Metric):
    """Mean cross-entropy in nats (scikit-learn's ``log_loss``)."""

    table = "loss"
    higher_is_better = False

    @override
    def of_tables(self, tables: Mapping[str, Reals], loss: Reals, weight: Reals) -> Reals:
        return _ratio(loss, weight)

    @override
    def of(self, predictions: Predictions) -> float | None:
        return none_for_nan(float(predictions.losses.mean())) if len(predictions) else None

    @override
    def by_client(self, predictions: Predictions, owners: Ints, clients: int) -> Reals:
        sums = np.bincount(owners, weights=predictions.losses, minlength=clients)
        return _ratio(sums, np.bincount(owners, minlength=clients))

    @override
    def of_sums(self, sums: EvaluationSums) -> float | None:
        return none_for_nan(sums.loss / sums.samples) if sums.samples else None


class Perplexity(LogLoss):
    """Exponential of the mean cross-entropy (in nats) per token."""

    @override
    def of(self, predictions: Predictions) -> float | None:
        value = super().of(predictions)
        return None if value is None else none_for_nan(np.exp(value))

    @override
    def by_client(self, predictions: Predictions, owners: Ints, clients: int) -> Reals:
        return np.exp(super().by_client(predictions, owners, clients))

    @override
    def of_sums(self, sums: EvaluationSums) -> float | None:
        value = super().of_sums(sums)
        return None if value is None else none_for_nan(np.exp(value))

    @override
    def of_tables(self, tables: Mapping[str, Reals], loss: Reals, weight: Reals) -> Reals:
        return np.exp(super().of_tables(tables, loss, weight))


class ECE(_ByClient):
    """Expected calibration error: the mean absolute difference between confidence and accuracy over confidence bins.

    Samples are divided into bins by their confidence, which is the largest predicted probability. In each bin, the
    error is the absolute difference between mean confidence and accuracy. The result is the mean error of all bins,
    weighted by the bins' numbers of samples.

    Args:
        bins: Number of confidence bins of equal width.
    """

    higher_is_better = False
    bins: Annotated[int, Field(ge=1, le=10_000)] = 15

    @property
    @override
    def confidence_bins(self) -> int:  # type: ignore[override]
        return self.bins

    @override
    def by_client(self, predictions: Predictions, owners: Ints, clients: int) -> Reals:
        sums = calibration(predictions, owners, clients, self.bins)
        return self._of_bins(sums, np.bincount(owners, minlength=clients))

    @override
    def of_sums(self, sums: EvaluationSums) -> float | None:
        return none_for_nan(self._of_bins(sums.calibration.numpy()[None], np.array([sums.samples]))[0])

    def _of_bins(self, sums: Reals, samples: Ints) -> Reals:
        return _ratio(np.abs(sums[..., 0] - sums[..., 1]).sum(axis=-1), samples)


class _OfRows(Metric):
    """Base class of metrics that need all targets and predictions at once, instead of sums."""

    table = "rows"

    @abstractmethod
    def measure(self, targets: NDArray[Any], predictions: NDArray[Any]) -> float | None:
        """Return the metric's value for targets and predictions; None if the value is undefined."""

    @override
    def by_client_of_rows(self, rows: Rows, owners: Ints, clients: int) -> Reals:
        values = np.full(clients, math.nan)
        for client in np.unique(owners).tolist():
            part = rows[owners == client].arrays
            values[client] = nan_for_none(self.measure(part["targets"], part["predictions"]))
        return values

    @override
    def of(self, predictions: Predictions) -> float | None:
        value = self.measure(predictions.labels, predictions.probabilities)
        return none_for_nan(float(value)) if isinstance(value, (int, float, np.number)) else value


class MeanAveragePrecision(_OfRows):
    """Average precision, averaged over the labels.

    Labels without samples are left out. The metric needs all predictions, so it cannot be computed from the sums that
    real sites send.
    """

    @override
    def measure(self, targets: NDArray[Any], predictions: NDArray[Any]) -> float | None:
        from sklearn.metrics import average_precision_score

        if targets.ndim != 2 or not np.isin(targets, (0, 1)).all():
            raise ValueError("the metric needs several labels per sample, and each label must be 0 or 1")
        there = targets.any(axis=0)
        scores = [average_precision_score(targets[:, k], predictions[:, k]) for k in np.flatnonzero(there)]
        return float(np.mean(scores)) if scores else None


class _Named(_OfRows):
    """Base class of metrics with a path ``"module:name"`` in the spec.

    Args:
        path: The path of the class or function.
    """

    path: Annotated[str, Field(exclude=True)]  # Excluded, because ``to_spec`` writes the path as the metric's name.

    @property
    @override
    def implementation(self) -> Any:
        return load_object(self.path, "metric")

    @property
    @override
    def label(self) -> str:
        return self.path.rpartition(":")[2]


class TorchMetric(_Named):
    """A metric of torchmetrics, such as ``"torchmetrics.classification:MultilabelAUROC"``.

    Args:
        arguments: The arguments of the class, such as ``num_labels``. In a spec, the arguments are keys of the metric's
            table.
    """

    arguments: dict[str, Any] = Field(default_factory=dict)

    @property
    @override
    def higher_is_better(self) -> bool:  # type: ignore[override]
        return self.implementation.higher_is_better is not False

    @override
    def measure(self, targets: NDArray[Any], predictions: NDArray[Any]) -> float | None:
        import torch

        metric = self.implementation(**self.arguments)
        if metric.__module__.startswith("torchmetrics.classification") and np.array_equal(targets, np.rint(targets)):
            targets = targets.astype(np.int64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchMetrics warns about each client without samples of a class.
            metric.update(torch.from_numpy(predictions), torch.from_numpy(targets))
            return none_for_nan(float(metric.compute()))

    @override
    def to_spec(self) -> dict[str, Any]:
        return {"name": self.path, **plain(self.arguments)}


class FunctionMetric(_Named):
    """A metric that a user defines as a function ``fn(labels, probabilities)``.

    For classification, the function gets arrays of shapes (N,) and (N, C). For other tasks, the function gets the
    targets and the predictions, for example of shape (N, K). The function returns a number, or None if the value is
    undefined.

    Args:
        lower_is_better: Whether a lower value is better.
    """

    lower_is_better: bool = False

    @property
    @override
    def higher_is_better(self) -> bool:  # type: ignore[override]
        return not self.lower_is_better

    @override
    def measure(self, targets: NDArray[Any], predictions: NDArray[Any]) -> float | None:
        value: float | None = self.implementation(targets, predictions)
        return value

    @override
    def to_spec(self) -> dict[str, Any]:
        table: dict[str, Any] = {"name": self.path}
        return table | {"lower_is_better": True} if self.lower_is_better else table


class _Metrics(Registry[Metric]):
    """A registry that also finds a user's own metrics: classes and functions with a path ``"module:name"``."""

    @override
    def find(self, name: str) -> type[Metric]:
        if ":" in name and name not in self._paths:
            if name.startswith("torchmetrics") and find_spec("torchmetrics") is None:
                raise ExtraMissingError(f"the metric {name!r}", "metrics")
            metric = load_object(name, self.kind)
            if inspect.isclass(metric) and metric.__module__.startswith("torchmetrics"):
                return TorchMetric
            if not inspect.isclass(metric):
                if callable(metric):
                    return FunctionMetric
                wanted = "a function fn(labels, probabilities), or a class that is derived from Metric"
                raise SpecError("name", f"is not a metric. Use {wanted}.", name)
        return super().find(name)

    @override
    def make(self, name: str, table: Mapping[str, Any]) -> Metric:
        cls = self.find(name)
        if cls is TorchMetric:
            return build(cls, {"path": name, "arguments": dict(table)})
        return build(cls, {**table, "path": name} if cls is FunctionMetric else table)


_HERE = "fedstrata.evaluation.metrics"
METRICS: Registry[Metric] = _Metrics(
    "metric",
    Metric,  # type: ignore[type-abstract]
    {
        "accuracy": f"{_HERE}:Accuracy",
        "balanced-accuracy": f"{_HERE}:BalancedAccuracy",
        "worst-class": f"{_HERE}:WorstClass",
        "macro-f1": f"{_HERE}:MacroF1",
        "auroc": f"{_HERE}:AUROC",
        "log-loss": f"{_HERE}:LogLoss",
        "ece": f"{_HERE}:ECE",
        "micro-f1": f"{_HERE}:MicroF1",
        "mean-average-precision": f"{_HERE}:MeanAveragePrecision",
        "mean-iou": f"{_HERE}:MeanIoU",
        "perplexity": f"{_HERE}:Perplexity",
        "rmse": f"{_HERE}:RMSE",
        "mae": f"{_HERE}:MAE",
        "r2": f"{_HERE}:R2",
    },
)

AnyMetric = Annotated[Metric, FromRegistry(METRICS)]


def values_of(metrics: Sequence[Metric], predictions: Predictions | Rows) -> dict[str, float | None]:
    """Return a mapping from the label of each metric to its value; None if the value is undefined."""
    if isinstance(predictions, Predictions):
        return {metric.label: metric.of(predictions) for metric in metrics}
    owners = np.zeros(len(predictions), dtype=np.int64)
    return {metric.label: none_for_nan(metric.by_client_of_rows(predictions, owners, 1)[0]) for metric in metrics}


def _counts(predictions: Predictions, owners: Ints, clients: int) -> tuple[Reals, Reals, Reals]:
    """Count correct predictions, samples and predictions per client and class, each of shape (clients, C)."""
    classes, labels, predicted = predictions.classes, predictions.labels, predictions.predicted
    hit = labels == predicted

    def count(owners: Ints, values: Ints) -> Reals:
        counts = np.bincount(owners * classes + values, minlength=clients * classes)
        return counts.reshape(clients, classes).astype(np.float64)

    return count(owners[hit], labels[hit]), count(owners, labels), count(owners, predicted)


def _areas(scores: Reals, positive: NDArray[np.bool_], owners: Ints, clients: int) -> Reals:
    """Compute the area under each client's ROC curve from ranks of scores (Mann and Whitney).

    The area is the fraction of (positive, negative) pairs of samples in which the positive sample has the higher score.
    A pair with equal scores contributes one half.

    Args:
        scores: The score of each sample, shape (N,).
        positive: Whether each sample is positive, shape (N,).
        owners: The client of each sample, shape (N,).
        clients: The number of clients.

    Returns:
        The areas, shape (clients,): NaN if a client lacks positive samples or negative samples, or has a score that is
        NaN.
    """
    order = np.lexsort((scores, owners))
    s, k, p = scores[order], owners[order], positive[order]
    n = len(s)
    sizes = np.bincount(owners, minlength=clients)
    starts = np.cumsum(sizes) - sizes
    new = np.ones(n, dtype=bool)
    new[1:] = (s[1:] != s[:-1]) | (k[1:] != k[:-1])
    first = np.flatnonzero(new)
    last = np.append(first[1:], n) - 1
    middle = ((first + last) / 2)[np.cumsum(new) - 1] if n else np.zeros(0)
    ranks = middle - starts[k] + 1
    positives = np.bincount(k[p], minlength=clients)
    above = np.bincount(k[p], weights=ranks[p], minlength=clients) - positives * (positives + 1) / 2
    areas = _ratio(above, positives * (sizes - positives))
    areas[np.unique(owners[np.isnan(scores)])] = np.nan
    return areas


def _ratio(above: ArrayLike, below: ArrayLike) -> Reals:
    """Return the quotient ``above / below`` of each pair of elements; NaN if the denominator is 0."""
    top, bottom = np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)
    ratio: Reals = np.full(np.broadcast(top, bottom).shape, np.nan)
    np.divide(top, bottom, out=ratio, where=bottom != 0)
    return ratio


def _mean_of_known(values: Reals) -> Reals:
    """Return the mean of the finite values in each row; NaN if a row does not contain finite values."""
    known = np.isfinite(values)
    return _ratio(np.where(known, values, 0.0).sum(axis=-1), known.sum(axis=-1))


def none_for_nan(value: Any) -> float | None:
    """Convert a value to a float; None if it is not finite."""
    number = float(value)
    return number if math.isfinite(number) else None


def nan_for_none(value: float | None) -> float:
    """Convert a value to a float; NaN if the value is None."""
    return math.nan if value is None else float(value)
