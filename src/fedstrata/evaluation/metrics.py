"""The metrics that ``evaluation.metrics`` of a spec may name.

Most metrics are computed from counts. The same lines then serve a test set, each of a thousand clients, and sums from
real sites. A metric of the user's own is a function, or a class with one method.
"""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field
from typing_extensions import override

from fedstrata.base.config import FromRegistry, Registry, Setting, build
from fedstrata.base.errors import SpecError
from fedstrata.base.loading import load_object
from fedstrata.evaluation.predictions import Predictions
from fedstrata.evaluation.sums import EvaluationSums, calibration

Ints = NDArray[np.int64]
Reals = NDArray[np.float64]


class Metric(Setting):
    """A measure of the quality of predictions. A metric of your own overrides ``of``.

    >>> class Errors(Metric):
    ...     higher_is_better = False
    ...     def of(self, predictions):
    ...         return float((predictions.predicted != predictions.labels).sum())
    """

    higher_is_better: ClassVar[bool] = True
    """Whether the higher of two values is better."""

    score_bins: ClassVar[int] = 0
    """The bins of each class's scores that ``of_sums`` needs."""

    confidence_bins: ClassVar[int] = 0
    """The bins of the confidence that ``of_sums`` needs."""

    @property
    def label(self) -> str:
        """The metric's name in records: the part of its name after the last colon."""
        return self.name.rpartition(":")[2]

    @abstractmethod
    def of(self, predictions: Predictions) -> float | None:
        """Return the value; None if it is undefined, such as AUROC of a single class."""

    def by_client(self, predictions: Predictions, owners: Ints, clients: int) -> Reals:
        """Return the value for each client's samples.

        Args:
            predictions: The predictions of N samples.
            owners: The client of each sample, (N,), from 0.
            clients: The number of clients.

        Returns:
            (clients,); NaN if a client's value is undefined.
        """
        order = np.argsort(owners, kind="stable")
        ends = np.searchsorted(owners[order], np.arange(clients + 1))
        parts = [order[ends[client] : ends[client + 1]] for client in range(clients)]
        return np.array([nan_for_none(self.of(predictions[part]) if len(part) else None) for part in parts])

    def of_sums(self, sums: EvaluationSums) -> float | None:
        """Return the value from sums that real sites sent.

        Raises:
            NotImplementedError: The metric cannot be computed from sums.
        """
        raise NotImplementedError

    def error_of_sums(self, sums: EvaluationSums) -> float | None:
        """Return the largest error of ``of_sums``; None if it is exact."""
        return None

    def by_class(self, predictions: Predictions) -> list[float | None] | None:
        """Return the value for each class; None if the metric has no values by class."""
        return None

    @property
    def adds_up(self) -> bool:
        """Whether the metric can be computed from sums."""
        return type(self).of_sums is not Metric.of_sums

    def check(self, classes: int) -> None:
        """Try the metric on a few artificial predictions of all classes.

        Raises:
            SpecError: The metric fails, or returns neither a number nor None.
        """
        labels = np.arange(4 * classes) % classes
        logits = np.random.default_rng(0).normal(size=(len(labels), classes))
        try:
            value = self.of(Predictions.of(labels, logits))
        except Exception as error:  # a metric of the user's own may raise anything
            problem = f"fails on predictions of {classes} classes: {type(error).__name__}: {error}"
            raise SpecError("evaluation.metrics", problem, self.label) from error
        if value is not None and not isinstance(value, (int, float, np.number)):
            problem = f"gives a {type(value).__name__}; a metric is a number, or None where it has no value"
            raise SpecError("evaluation.metrics", problem, self.label)


class _ByClient(Metric):
    """A metric that is computed for all clients at once, by ``by_client``."""

    @override
    def of(self, predictions: Predictions) -> float | None:
        return none_for_nan(self.by_client(predictions, np.zeros(len(predictions), dtype=np.int64), 1)[0])


class _OfCounts(_ByClient):
    """A metric of the numbers of correct predictions, samples and predictions of each class."""

    def each(self, hits: Reals, actual: Reals, predicted: Reals) -> Reals:
        """Return the value for each class, (…, C) from three times (…, C), NaN if undefined; recall by default."""
        return _ratio(hits, actual)

    def overall(self, hits: Reals, actual: Reals, predicted: Reals) -> Reals:
        """Return the value, (…) from three times (…, C): the mean over the classes that have a value."""
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
    """Share of samples whose largest logit is that of their label; by class, the recall."""

    @override
    def overall(self, hits: Reals, actual: Reals, predicted: Reals) -> Reals:
        return _ratio(hits.sum(axis=-1), actual.sum(axis=-1))


class BalancedAccuracy(_OfCounts):
    """Mean recall of the classes that have samples (scikit-learn's ``balanced_accuracy_score``)."""


class MacroF1(_OfCounts):
    """Mean F1 over the classes that have samples or were predicted (scikit-learn's ``f1_score``, macro)."""

    @override
    def each(self, hits: Reals, actual: Reals, predicted: Reals) -> Reals:
        return _ratio(2 * hits, actual + predicted)


class AUROC(_ByClient):
    """Area under the ROC curve: of the second of two classes, or the mean over classes of one against the rest.

    A class is left out of the mean if it has no samples or has all of them. Real sites send histograms of scores, and
    the value then has a largest error.

    Args:
        bins: Bins of each class's histogram of scores at a real site.
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
        """Return the areas, (clients, classes), of two classes only the second; NaN if undefined."""
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
        # Samples in one bin count as tied.
        below, tied, pairs = self._pairs(sums)
        return none_for_nan(_mean_of_known(_ratio(below + tied / 2, pairs)[None])[0])

    @override
    def error_of_sums(self, sums: EvaluationSums) -> float | None:
        _, tied, pairs = self._pairs(sums)
        return none_for_nan(_mean_of_known(_ratio(tied / 2, pairs)[None])[0])

    def _pairs(self, sums: EvaluationSums) -> tuple[Reals, Reals, Reals]:
        """Return the number of pairs of another sample and one of the class, each (classes,).

        Returns:
            The pairs in which the other sample is in a lower bin, those with both in one bin, and all pairs.
        """
        scores = sums.scores.numpy().astype(np.float64)
        others, members = (scores[1:] if len(scores) == 2 else scores).transpose(1, 0, 2)
        under = np.cumsum(others, axis=1) - others
        pairs = others.sum(axis=1) * members.sum(axis=1)
        return (members * under).sum(axis=1), (members * others).sum(axis=1), pairs


class LogLoss(Metric):
    """Mean cross-entropy in nats (scikit-learn's ``log_loss``)."""

    higher_is_better = False

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


class ECE(_ByClient):
    """Expected calibration error (Guo et al. 2017): the mean distance of confidence and accuracy over bins.

    Args:
        bins: Bins of equal width over the confidence, which is the largest probability.
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


class FunctionMetric(Metric):
    """A function of the user's own: ``fn(labels, probabilities)`` of (N,) and (N, C) returns a number, or None.

    Args:
        function: The function, as ``"module:function"``.
        lower_is_better: Whether the lower of two values is better.
    """

    function: Annotated[str, Field(exclude=True)]  # by its name in a spec, not as a key
    lower_is_better: bool = False

    @property
    @override
    def higher_is_better(self) -> bool:  # type: ignore[override]
        return not self.lower_is_better

    @property
    @override
    def label(self) -> str:
        return self.function.rpartition(":")[2]

    @override
    def of(self, predictions: Predictions) -> float | None:
        value = load_object(self.function, "metric")(predictions.labels, predictions.probabilities)
        return none_for_nan(float(value)) if isinstance(value, (int, float, np.number)) else value

    @override
    def to_spec(self) -> dict[str, Any]:
        table: dict[str, Any] = {"name": self.function}
        return table | {"lower_is_better": True} if self.lower_is_better else table


class _Metrics(Registry[Metric]):
    """The metrics by name, with classes and functions of the user's own."""

    @override
    def find(self, name: str) -> type[Metric]:
        if ":" in name and name not in self._paths:
            metric = load_object(name, self.kind)
            if not inspect.isclass(metric):
                if callable(metric):
                    return FunctionMetric
                wanted = "a function of labels (N,) and probabilities (N, C), or a class derived from Metric"
                raise SpecError("name", f"{name} is no metric: expected {wanted}", name)
        return super().find(name)

    @override
    def make(self, name: str, table: Mapping[str, Any]) -> Metric:
        cls = self.find(name)
        return build(cls, {**table, "function": name} if cls is FunctionMetric else table)


_HERE = "fedstrata.evaluation.metrics"
METRICS: Registry[Metric] = _Metrics(
    "metric",
    Metric,  # type: ignore[type-abstract]
    {
        "accuracy": f"{_HERE}:Accuracy",
        "balanced-accuracy": f"{_HERE}:BalancedAccuracy",
        "macro-f1": f"{_HERE}:MacroF1",
        "auroc": f"{_HERE}:AUROC",
        "log-loss": f"{_HERE}:LogLoss",
        "ece": f"{_HERE}:ECE",
    },
)

AnyMetric = Annotated[Metric, FromRegistry(METRICS)]


def _counts(predictions: Predictions, owners: Ints, clients: int) -> tuple[Reals, Reals, Reals]:
    """Return the numbers of correct predictions, samples and predictions of each class, each (clients, C)."""
    classes, labels, predicted = predictions.classes, predictions.labels, predictions.predicted
    hit = labels == predicted

    def count(owners: Ints, values: Ints) -> Reals:
        counts = np.bincount(owners * classes + values, minlength=clients * classes)
        return counts.reshape(clients, classes).astype(np.float64)

    return count(owners[hit], labels[hit]), count(owners, labels), count(owners, predicted)


def _areas(scores: Reals, positive: NDArray[np.bool_], owners: Ints, clients: int) -> Reals:
    """Return the area under each client's ROC curve by the ranks of its positives (Mann and Whitney); ties count half.

    Args:
        scores: The scores, (N,).
        positive: Whether each sample is positive, (N,).
        owners: The client of each sample, (N,).
        clients: The number of clients.

    Returns:
        (clients,); NaN for a client without positives, without negatives, or with a score that is NaN.
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
    """Return the quotient, NaN for a denominator of 0."""
    top, bottom = np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)
    ratio: Reals = np.full(np.broadcast(top, bottom).shape, np.nan)
    np.divide(top, bottom, out=ratio, where=bottom != 0)
    return ratio


def _mean_of_known(values: Reals) -> Reals:
    """Return the mean of each row's finite values; NaN if there are none."""
    known = np.isfinite(values)
    return _ratio(np.where(known, values, 0.0).sum(axis=-1), known.sum(axis=-1))


def none_for_nan(value: Any) -> float | None:
    """Return a number, or None if it is not finite."""
    number = float(value)
    return number if math.isfinite(number) else None


def nan_for_none(value: float | None) -> float:
    """Return a number, or NaN for None."""
    return math.nan if value is None else float(value)
