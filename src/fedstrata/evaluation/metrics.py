"""Metrics: what a spec's ``evaluation.metrics`` may name.

Most are three lines on counts, and the same three lines serve a test set, each of a thousand clients, and sums that
came from real sites. A user's own is a function, or a class with one method.
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

from fedstrata.base.config import FromRegistry, Registry, Setting, build
from fedstrata.base.errors import SpecError
from fedstrata.base.loading import load_object
from fedstrata.evaluation.predictions import Predictions
from fedstrata.evaluation.sums import EvaluationSums, calibration

Ints = NDArray[np.int64]
Reals = NDArray[np.float64]


class Metric(Setting):
    """A number that says how good predictions are. One of your own writes ``of``.

    >>> class Errors(Metric):
    ...     higher_is_better = False
    ...     def of(self, predictions):
    ...         return float((predictions.predicted != predictions.labels).sum())
    """

    higher_is_better: ClassVar[bool] = True
    """Which of two values is the better one."""

    score_bins: ClassVar[int] = 0
    """Bins of each class's scores that ``of_sums`` needs; a setting where they are to be chosen."""

    confidence_bins: ClassVar[int] = 0
    """Bins of the confidence that ``of_sums`` needs."""

    @property
    def label(self) -> str:
        """What records call it: its name, or what stands behind the colon."""
        return self.name.rpartition(":")[2]

    @abstractmethod
    def of(self, predictions: Predictions) -> float | None:
        """Its value; None where it has none, such as AUROC of a single class."""

    def by_client(self, predictions: Predictions, owners: Ints, clients: int) -> Reals:
        """Its value for each client's samples.

        Args:
            predictions: Of N samples.
            owners: Whose each sample is, (N,), from 0.
            clients: How many clients there are.

        Returns:
            (clients,); NaN where it has none.
        """
        order = np.argsort(owners, kind="stable")
        ends = np.searchsorted(owners[order], np.arange(clients + 1))
        parts = [order[ends[client] : ends[client + 1]] for client in range(clients)]
        return np.array([nan_for_none(self.of(predictions[part]) if len(part) else None) for part in parts])

    def of_sums(self, sums: EvaluationSums) -> float | None:
        """Its value by sums that came from real sites.

        Raises:
            NotImplementedError: It cannot be computed from sums.
        """
        raise NotImplementedError

    def error_of_sums(self, sums: EvaluationSums) -> float | None:
        """How far ``of_sums`` may be from the exact value; None where it is exact."""
        return None

    def by_class(self, predictions: Predictions) -> list[float | None] | None:
        """Its value for each class; None where it has none."""
        return None

    @property
    def adds_up(self) -> bool:
        """Whether it can be computed from sums."""
        return type(self).of_sums is not Metric.of_sums

    def check(self, classes: int) -> None:
        """Try it on a few made-up predictions of all classes.

        Raises:
            SpecError: It fails, or gives something else than a number or None.
        """
        labels = np.arange(4 * classes) % classes
        logits = np.random.default_rng(0).normal(size=(len(labels), classes))
        try:
            found = self.of(Predictions.of(labels, logits))
        except Exception as error:  # a user's own raises what it likes
            problem = f"fails on predictions of {classes} classes: {type(error).__name__}: {error}"
            raise SpecError("evaluation.metrics", problem, self.label) from error
        if found is not None and not isinstance(found, (int, float, np.number)):
            problem = f"gives a {type(found).__name__}; a metric is a number, or None where it has no value"
            raise SpecError("evaluation.metrics", problem, self.label)


class _OfCounts(Metric):
    """A metric of how many samples of each class were hit, are there, and were predicted."""

    @abstractmethod
    def each(self, hits: Reals, actual: Reals, predicted: Reals) -> Reals:
        """Its value for each class, (…, C) from three times (…, C); NaN for none."""

    def overall(self, hits: Reals, actual: Reals, predicted: Reals) -> Reals:
        """Its value, (…) from three times (…, C): the mean over the classes that have one."""
        each = self.each(hits, actual, predicted)
        known = np.isfinite(each)
        return _ratio(np.where(known, each, 0.0).sum(axis=-1), known.sum(axis=-1))

    def of(self, predictions: Predictions) -> float | None:
        """See ``Metric.of``."""
        return none_for_nan(self.by_client(predictions, np.zeros(len(predictions), dtype=np.int64), 1)[0])

    def by_client(self, predictions: Predictions, owners: Ints, clients: int) -> Reals:
        """All clients at once."""
        return self.overall(*_counts(predictions, owners, clients))

    def of_sums(self, sums: EvaluationSums) -> float | None:
        """From the confusion matrix."""
        confusion = sums.confusion.numpy().astype(np.float64)
        return none_for_nan(self.overall(np.diagonal(confusion), confusion.sum(axis=1), confusion.sum(axis=0)))

    def by_class(self, predictions: Predictions) -> list[float | None]:
        """See ``Metric.by_class``."""
        found = self.each(*_counts(predictions, np.zeros(len(predictions), dtype=np.int64), 1))[0]
        return [none_for_nan(value) for value in found]


class Accuracy(_OfCounts):
    """Share of samples whose largest logit is that of their label."""

    def each(self, hits: Reals, actual: Reals, predicted: Reals) -> Reals:
        """Recall of each class."""
        return _ratio(hits, actual)

    def overall(self, hits: Reals, actual: Reals, predicted: Reals) -> Reals:
        """Of all samples."""
        return _ratio(hits.sum(axis=-1), actual.sum(axis=-1))


class BalancedAccuracy(_OfCounts):
    """Mean recall of the classes that have samples (scikit-learn's ``balanced_accuracy_score``)."""

    def each(self, hits: Reals, actual: Reals, predicted: Reals) -> Reals:
        """Recall of each class."""
        return _ratio(hits, actual)


class MacroF1(_OfCounts):
    """Mean F1 over the classes that have samples or were predicted (scikit-learn's ``f1_score``, macro)."""

    def each(self, hits: Reals, actual: Reals, predicted: Reals) -> Reals:
        """F1 of each class."""
        return _ratio(2 * hits, actual + predicted)


class AUROC(Metric):
    """Area under the ROC curve: of two classes that of the second, of more the mean of one class against the rest.

    Classes without samples, or without others beside them, are left out of the mean. From real sites it comes by
    histograms of scores, with the largest error that these allow.

    Args:
        bins: Bins of each class's histogram of scores at a real site.
    """

    bins: Annotated[int, Field(ge=2, le=100_000)] = 400

    @property
    def score_bins(self) -> int:  # type: ignore[override]
        """The setting."""
        return self.bins

    def of(self, predictions: Predictions) -> float | None:
        """Exact, ties counted half."""
        return none_for_nan(self.by_client(predictions, np.zeros(len(predictions), dtype=np.int64), 1)[0])

    def by_client(self, predictions: Predictions, owners: Ints, clients: int) -> Reals:
        """All clients at once, class after class."""
        return _mean_of_known(self._each(predictions, owners, clients))

    def _each(self, predictions: Predictions, owners: Ints, clients: int) -> Reals:
        """(clients, classes), of two classes the second alone; NaN for none."""
        classes = [1] if predictions.classes == 2 else range(predictions.classes)
        return np.stack(
            [_areas(predictions.probabilities[:, c], predictions.labels == c, owners, clients) for c in classes],
            axis=1,
        )

    def by_class(self, predictions: Predictions) -> list[float | None]:
        """Each class against the rest."""
        found = self._each(predictions, np.zeros(len(predictions), dtype=np.int64), 1)[0]
        return [none_for_nan(value) for value in (np.repeat(found, 2) if predictions.classes == 2 else found)]

    def of_sums(self, sums: EvaluationSums) -> float | None:
        """As if samples in one bin had the same score."""
        below, tied, pairs = self._pairs(sums)
        return none_for_nan(_mean_of_known(_ratio(below + tied / 2, pairs)[None])[0])

    def error_of_sums(self, sums: EvaluationSums) -> float | None:
        """Half the share of pairs that fell into one bin."""
        _, tied, pairs = self._pairs(sums)
        return none_for_nan(_mean_of_known(_ratio(tied / 2, pairs)[None])[0])

    def _pairs(self, sums: EvaluationSums) -> tuple[Reals, Reals, Reals]:
        """Pairs of another sample and one of the class: the other below it, both in one bin, all; each (classes,)."""
        scores = sums.scores.numpy().astype(np.float64)
        others, members = (scores[1:] if len(scores) == 2 else scores).transpose(1, 0, 2)
        under = np.cumsum(others, axis=1) - others
        pairs = others.sum(axis=1) * members.sum(axis=1)
        return (members * under).sum(axis=1), (members * others).sum(axis=1), pairs


class LogLoss(Metric):
    """Mean cross-entropy in nats (scikit-learn's ``log_loss``)."""

    higher_is_better = False

    def of(self, predictions: Predictions) -> float | None:
        """See ``Metric.of``."""
        return none_for_nan(float(predictions.losses.mean())) if len(predictions) else None

    def by_client(self, predictions: Predictions, owners: Ints, clients: int) -> Reals:
        """All clients at once."""
        sums = np.bincount(owners, weights=predictions.losses, minlength=clients)
        return _ratio(sums, np.bincount(owners, minlength=clients))

    def of_sums(self, sums: EvaluationSums) -> float | None:
        """Sum by count."""
        return none_for_nan(sums.loss / sums.samples) if sums.samples else None


class ECE(Metric):
    """Expected calibration error (Guo et al. 2017): the mean distance of confidence and accuracy over bins.

    Args:
        bins: Bins of equal width over the confidence, which is the largest probability.
    """

    higher_is_better = False
    bins: Annotated[int, Field(ge=1, le=10_000)] = 15

    @property
    def confidence_bins(self) -> int:  # type: ignore[override]
        """The setting."""
        return self.bins

    def of(self, predictions: Predictions) -> float | None:
        """See ``Metric.of``."""
        return none_for_nan(self.by_client(predictions, np.zeros(len(predictions), dtype=np.int64), 1)[0])

    def by_client(self, predictions: Predictions, owners: Ints, clients: int) -> Reals:
        """All clients at once."""
        sums = calibration(predictions, owners, clients, self.bins)
        return self._of_sums(sums, np.bincount(owners, minlength=clients))

    def of_sums(self, sums: EvaluationSums) -> float | None:
        """From the bins."""
        return none_for_nan(self._of_sums(sums.calibration.numpy()[None], np.array([sums.samples]))[0])

    def _of_sums(self, sums: Reals, samples: Ints) -> Reals:
        return _ratio(np.abs(sums[..., 0] - sums[..., 1]).sum(axis=-1), samples)


class FunctionMetric(Metric):
    """A function of the user's own: ``fn(labels, probabilities)`` of (N,) and (N, C) gives a number, or None.

    Args:
        function: Where it is, ``"module:function"``.
        lower_is_better: Whether the lower of two values is the better one.
    """

    function: Annotated[str, Field(exclude=True)]  # by its name in a spec, not as a key
    lower_is_better: bool = False

    @property
    def higher_is_better(self) -> bool:  # type: ignore[override]
        """By the setting."""
        return not self.lower_is_better

    @property
    def label(self) -> str:
        """The function's name."""
        return self.function.rpartition(":")[2]

    def of(self, predictions: Predictions) -> float | None:
        """What the function gives; None for NaN."""
        found = load_object(self.function, "metric")(predictions.labels, predictions.probabilities)
        return none_for_nan(float(found)) if isinstance(found, (int, float, np.number)) else found

    def to_spec(self) -> dict[str, Any]:
        """By the function's name."""
        table: dict[str, Any] = {"name": self.function}
        return table | {"lower_is_better": True} if self.lower_is_better else table


class _Metrics(Registry[Metric]):
    """Names, classes, and functions of the user's own."""

    def find(self, name: str) -> type[Metric]:
        """The class called ``name``; ``FunctionMetric`` for a function."""
        if ":" in name and name not in self._paths:
            found = load_object(name, self.kind)
            if not inspect.isclass(found):
                if callable(found):
                    return FunctionMetric
                wanted = "a function of labels (N,) and probabilities (N, C), or a class derived from Metric"
                raise SpecError("name", f"{name} is no metric: expected {wanted}", name)
        return super().find(name)

    def make(self, name: str, table: Mapping[str, Any]) -> Metric:
        """See ``Registry.make``."""
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
    """Hits, samples and predictions of each class at each client, each (clients, C)."""
    classes, labels, predicted = predictions.classes, predictions.labels, predictions.predicted
    hit = labels == predicted

    def count(whose: Ints, which: Ints) -> Reals:
        found = np.bincount(whose * classes + which, minlength=clients * classes)
        return found.reshape(clients, classes).astype(np.float64)

    return count(owners[hit], labels[hit]), count(owners, labels), count(owners, predicted)


def _areas(scores: Reals, positive: NDArray[np.bool_], owners: Ints, clients: int) -> Reals:
    """The area under each client's ROC curve by the ranks of its positives (Mann and Whitney), ties counted half.

    Args:
        scores: (N,).
        positive: (N,).
        owners: Whose each sample is, (N,).
        clients: How many clients there are.

    Returns:
        (clients,); NaN for a client that lacks positives or negatives, or has a score that is NaN.
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
    """The quotient, NaN where the denominator is 0."""
    top, bottom = np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)
    found: Reals = np.full(np.broadcast(top, bottom).shape, np.nan)
    np.divide(top, bottom, out=found, where=bottom != 0)
    return found


def _mean_of_known(values: Reals) -> Reals:
    """The mean of each row's values that are not NaN; NaN where all are."""
    known = np.isfinite(values)
    return _ratio(np.where(known, values, 0.0).sum(axis=-1), known.sum(axis=-1))


def none_for_nan(value: Any) -> float | None:
    """A number, or None for one that is not finite."""
    number = float(value)
    return number if math.isfinite(number) else None


def nan_for_none(value: float | None) -> float:
    """A number, or NaN for None."""
    return math.nan if value is None else float(value)
