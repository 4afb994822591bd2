"""Evaluate a model on all test and validation samples, for the record of a round."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstrata.data.dataset import Dataset
from fedstrata.evaluation.holdouts import HeldOut
from fedstrata.evaluation.messages import Evaluate, Evaluated, EvaluateTask, Part
from fedstrata.evaluation.metrics import Accuracy, nan_for_none, values_of
from fedstrata.evaluation.predictions import Predictions, Rows, collect, predict
from fedstrata.evaluation.settings import Evaluation
from fedstrata.evaluation.sums import EvaluationSums, TaskSums, confusion_of, task_sums
from fedstrata.federation.messages import ClientId, Weights
from fedstrata.models.model import Model

Ints = NDArray[np.int64]
Reals = NDArray[np.float64]
Ask = Callable[[Evaluate], Mapping[ClientId, Evaluated]]
"""The type of a function that sends a request to all clients and returns all usable replies."""


@dataclass(frozen=True, eq=False)
class Score:
    """The result of evaluating a model.

    Args:
        loss: Mean cross-entropy on the test set, in nats.
        accuracy: Fraction of test samples for which the true class has the largest logit (top-1), in [0, 1].
        per_class: The accuracy on the test samples of each class; None for a class without test samples.
        confusion: The confusion matrix, an array of shape (C, C). Rows are true classes, and columns are predicted
            classes.
        more: Further columns of the round's record, as described in ``docs/guides/evaluation.md``.
        table: A table of results per client: a mapping from each column to a list with one entry per client. The table
            is empty if clients do not have their own test samples.
    """

    loss: float | None
    accuracy: float | None
    per_class: list[float | None]
    confusion: Ints
    more: dict[str, Any] = field(default_factory=dict)
    table: dict[str, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Evaluates the models of a run.

    Args:
        settings: The settings of the evaluations.
        model: The architecture, on the device for evaluations.
        data: The data set, on the same device. In a deployment, test samples may exist only at the sites, and not in
            this data set.
        held: The samples that are not used for training.
        clients: The number N of clients.
        batch_statistics: Whether BatchNorm normalises with the statistics of each batch instead of the running
            statistics.
        remote: Whether the clients are real sites, which evaluate models on their own samples.
    """

    settings: Evaluation
    model: Model
    data: Dataset
    held: HeldOut
    clients: int
    batch_statistics: bool = False
    remote: bool = False

    def score(self, weights: Weights, round: int, ask: Ask, unheard: Collection[ClientId] = ()) -> Score:
        """Evaluate a model on all test and validation samples of the run.

        Args:
            weights: The global model.
            round: The round after which the model is evaluated.
            ask: The function that sends a request to all clients.
            unheard: The clients whose replies the server has not used recently; see ``evaluation.unheard``.
        """
        more: dict[str, Any] = {}
        table: dict[str, list[Any]] = {}
        per_client: Reals | None = None
        sizes: Ints = np.zeros(0, dtype=np.int64)
        tests = self.held.own_test
        if self.remote:
            pooled = None
            if tests is not None:
                pooled, per_client, sizes = self._asked(self._question(weights, round, "test"), ask)
            if self.held.validation is not None:
                sums, _, _ = self._asked(self._question(weights, round, "validation"), ask)
                more["validation"] = None if sums is None else self._of_sums(sums)
            score = self._of_test(weights, more)[0] if len(self.data.y_test) else self._of_pooled(pooled, more)
        else:
            score, predictions = self._of_test(weights, more)
            parts = self._predict_held(weights)
            if "validation" in parts:
                more["validation"] = self._mean(parts["validation"]) | self._values(parts["validation"])
            if tests is not None:
                own_predictions = parts["clients"] if "clients" in parts else predictions[tests.indices]
                sizes, per_client = tests.sizes, self._by_client(own_predictions, tests.owners, len(tests))
            if (testers := self.held.test_clients) is not None:
                values = self._by_client(parts["test_clients"], testers.owners, len(testers))
                (more["test_clients"],) = self._over_clients([values], testers.sizes)
        if per_client is not None:
            more["clients"] = self._with_unheard(per_client, sizes, unheard)
            table = self._table(per_client, sizes)
        if tests is not None and self.settings.fine_tune is not None:
            _, own, sizes = self._asked(self._question(weights, round, "test", personal=True), ask)
            if own is not None:
                more["personal"] = self._with_unheard(own, sizes, unheard)
                columns = self._table(own, sizes)
                table |= {f"personal_{key}": column for key, column in columns.items() if key != "samples"}
        return replace(score, more=more, table=table)

    def _of_test(self, weights: Weights, more: dict[str, Any]) -> tuple[Score, Predictions | Rows]:
        """Evaluate a model on the server's test set, and add columns to ``more``.

        Return the score and the predictions.
        """
        predictions = self._predict(weights)
        if self.settings.chosen or isinstance(predictions, Rows):
            more["test"] = self._values(predictions)
        if self.settings.per_class and self.settings.chosen and isinstance(predictions, Predictions):
            by_class = {metric.label: metric.by_class(predictions) for metric in self.settings.metrics}
            more["by_class"] = {label: values for label, values in by_class.items() if values is not None}
        if isinstance(predictions, Rows):
            mean = self._mean(predictions)
            return Score(mean["loss"], mean.get("accuracy"), [], np.zeros((0, 0), dtype=np.int64)), predictions
        return _score(confusion_of(predictions), predictions.total_loss, max(len(predictions), 1)), predictions

    def _mean(self, predictions: Predictions | Rows) -> dict[str, float | None]:
        """Return the mean loss and, if the task has an accuracy, the accuracy."""
        if isinstance(predictions, Predictions):
            accuracy = float((predictions.predicted == predictions.labels).mean())
            return {"accuracy": accuracy, "loss": predictions.total_loss / len(predictions)}
        return self._mean_of_sums(task_sums(predictions, self.data.task.tables))

    def _mean_of_sums(self, sums: TaskSums) -> dict[str, float | None]:
        known = {"loss": sums.loss / sums.weight if sums.weight else None}
        return {"accuracy": Accuracy().of_task_sums(sums)} | known if self.data.task.has_accuracy else known

    def _of_pooled(self, sums: EvaluationSums | TaskSums | None, more: dict[str, Any]) -> Score:
        """Return the score on the combined test samples of all sites, and add columns to ``more``.

        Args:
            sums: The total of the sums that the sites sent; None if no site replied.
            more: Further columns of the round's record.
        """
        classes = self.data.outputs if self.data.task.has_classes else 0
        if sums is None or not sums.samples:
            return Score(None, None, [None] * classes, np.zeros((classes, classes), dtype=np.int64))
        if self.settings.chosen or isinstance(sums, TaskSums):
            more["test"] = self._of_sums(sums, both=False)
        if isinstance(sums, TaskSums):
            mean = self._mean_of_sums(sums)
            return Score(mean["loss"], mean.get("accuracy"), [], np.zeros((0, 0), dtype=np.int64))
        return _score(sums.confusion.numpy(), sums.loss, sums.samples)

    def _predict(self, weights: Weights, indices: Ints | None = None) -> Predictions | Rows:
        return (predict if self.data.task.has_classes else collect)(
            self.model,
            weights,
            self.data,
            "test" if indices is None else "train",
            indices,
            batch_size=self.settings.batch_size,
            batch_statistics=self.batch_statistics,
        )

    def _predict_held(self, weights: Weights) -> dict[str, Predictions | Rows]:
        """Compute predictions for all samples that are held out of the training set, in one pass.

        Returns:
            A mapping with up to three keys: ``validation`` (the validation samples), ``clients`` (each client's own
            test samples) and ``test_clients`` (samples of the clients that never train). The values are the predictions
            for these samples.
        """
        held = self.held
        wanted = {
            "validation": held.validation,
            "clients": held.own_test.indices if held.own_test is not None and held.own_test_split == "train" else None,
            "test_clients": None if held.test_clients is None else held.test_clients.indices,
        }
        parts = {name: indices for name, indices in wanted.items() if indices is not None}
        if not parts:
            return {}
        predictions = self._predict(weights, np.concatenate(list(parts.values())))
        if len(parts) == 1:
            return dict.fromkeys(parts, predictions)
        ends = np.cumsum([len(indices) for indices in parts.values()]).tolist()
        return {name: predictions[begin:end] for name, begin, end in zip(parts, [0, *ends[:-1]], ends, strict=True)}

    def _values(self, predictions: Predictions | Rows) -> dict[str, float | None]:
        return values_of(self.settings.metrics, predictions)

    def _of_sums(self, sums: EvaluationSums | TaskSums, *, both: bool = True) -> dict[str, float | None]:
        """Compute the values of all metrics from sums.

        If ``both`` is true, compute the accuracy and the loss, too. If the value of a metric is approximate,
        ``LABEL_error`` is an upper bound on its error.
        """
        if isinstance(sums, TaskSums):
            values = {metric.label: metric.of_task_sums(sums) for metric in self.settings.metrics}
            return (self._mean_of_sums(sums) if both else {}) | values
        known: dict[str, float | None] = {}
        if both and sums.samples:
            hits = int(np.diagonal(sums.confusion.numpy()).sum())
            known = {"accuracy": hits / sums.samples, "loss": sums.loss / sums.samples}
        for metric in self.settings.metrics:
            known[metric.label] = metric.of_sums(sums)
            if (error := metric.error_of_sums(sums)) is not None:
                known[f"{metric.label}_error"] = error
        return known

    def _by_client(self, predictions: Predictions | Rows, owners: Ints, clients: int) -> Reals:
        """Return the value of each metric for each client, shape (clients, metrics); NaN if undefined."""
        metrics = self.settings.metrics
        if isinstance(predictions, Rows):
            columns = [metric.by_client_of_rows(predictions, owners, clients) for metric in metrics]
        else:
            columns = [metric.by_client(predictions, owners, clients) for metric in metrics]
        return np.stack(columns, axis=1)

    def _question(self, weights: Weights, round: int, part: Part, *, personal: bool = False) -> Evaluate:
        metrics = self.settings.metrics
        epochs = (self.settings.fine_tune or 0) if personal else 0
        scores, confidences = (max(getattr(m, key) for m in metrics) for key in ("score_bins", "confidence_bins"))
        kind = Evaluate if self.data.task.has_classes else EvaluateTask
        return kind(round, weights, part, personal, epochs, scores, confidences)

    def _asked(self, question: Evaluate, ask: Ask) -> tuple[EvaluationSums | TaskSums | None, Reals | None, Ints]:
        """Send a request to all clients, and combine the replies.

        Returns:
            - The total of the sums that clients sent; None without replies.
            - The metrics of each client, shape (N, metrics), with NaN for clients without a reply. None if any site
            withholds its metrics.
            - The number of evaluated samples of each client, shape (N,), with 0 for clients without a reply.
        """
        replies = ask(question)
        total: Any = None
        values = np.full((self.clients, len(self.settings.metrics)), math.nan)
        sizes = np.zeros(self.clients, dtype=np.int64)
        for client in sorted(replies):
            reply = replies[client]
            total = reply.sums if total is None else total + reply.sums
            values[client] = [nan_for_none((reply.values or {}).get(label)) for label in self.settings.labels]
            sizes[client] = reply.sums.samples
        by_all = bool(replies) and all(reply.values is not None for reply in replies.values())
        return total, values if by_all else None, sizes

    def _with_unheard(self, values: Reals, sizes: Ints, unheard: Collection[ClientId]) -> dict[str, Any]:
        """Summarise the metrics over all clients.

        The key ``unheard`` contains a summary over the clients whose replies the server has not used recently.
        """
        silent = sorted(unheard)
        their_values = np.full_like(values, math.nan)
        their_values[silent] = values[silent]
        over_all, over_silent = self._over_clients([values, their_values], sizes)
        return over_all | {"unheard": {"clients": len(silent)} | (over_silent if silent else {})}

    def _over_clients(self, groups: Sequence[Reals], sizes: Ints) -> list[dict[str, Any]]:
        """Summarise the distribution of each metric in each group of clients.

        Args:
            groups: For each group, an array of shape (N, metrics). The array contains the metrics of clients in the
                group, and NaN for all other clients.
            sizes: The number of evaluated samples of each client, shape (N,).

        Returns:
            For each group, a mapping from each metric's label to its summary; see ``over_clients``.
        """
        labels, metrics = self.settings.labels, self.settings.metrics
        higher = np.repeat([metric.higher_is_better for metric in metrics], len(groups))
        summaries = over_clients(np.stack(groups, axis=2).reshape(len(sizes), -1), sizes, higher)
        return [dict(zip(labels, summaries[n :: len(groups)], strict=True)) for n in range(len(groups))]

    def _table(self, values: Reals, sizes: Ints) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {"samples": sizes.tolist()}
        for place, label in enumerate(self.settings.labels):
            columns[label] = [value if math.isfinite(value) else None for value in values[:, place].tolist()]
        return columns


def _score(confusion: Ints, loss: float, samples: int) -> Score:
    """Compute a score from a confusion matrix, the sum of the samples' losses, and the number of samples."""
    hits, totals = np.diagonal(confusion).tolist(), confusion.sum(axis=1).tolist()
    per_class = [h / t if t else None for h, t in zip(hits, totals, strict=True)]
    return Score(loss / samples, sum(hits) / samples, per_class, confusion)


def over_clients(values: Reals, sizes: Ints | Reals, higher_is_better: NDArray[np.bool_]) -> list[dict[str, Any]]:
    """Summarise the distribution of metrics over clients.

    Args:
        values: The values of M metrics for each of N clients, shape (N, M). A metric's summary leaves out clients with
            the value NaN.
        sizes: The number of test samples of each client, shape (N,). These numbers are the weights in
            ``weighted_mean``.
        higher_is_better: Whether a higher value of each metric is better, shape (M,).

    Returns:
        For each metric, a summary with the keys ``clients`` (the number of clients with a value), ``mean``,
        ``weighted_mean`` and ``sd`` (population standard deviation). The key ``worst`` contains the value of the worst
        client. The key ``worst_10`` contains the mean over the worst tenth of the clients (rounded up to whole
        clients). If no client has a value, ``clients`` is 0 and all other entries are None.

    >>> over_clients(np.array([[0.5], [1.0], [np.nan]]), np.array([30, 10, 5]), np.array([True]))[0]["weighted_mean"]
    0.625
    """
    if not len(values):
        values, sizes = np.full((1, len(higher_is_better)), math.nan), np.zeros(1)
    known = np.isfinite(values)
    filled, count = np.where(known, values, 0.0), known.sum(axis=0)
    weights = sizes[:, None] * known
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = filled.sum(axis=0) / count
        weighted = (filled * weights).sum(axis=0) / weights.sum(axis=0)
        sd = np.sqrt((np.where(known, values - mean, 0.0) ** 2).sum(axis=0) / count)
        # Sort each column so that the worst values come first and missing values last.
        sign = np.where(higher_is_better, 1.0, -1.0)
        ordered = sign * np.sort(np.where(known, sign * values, np.inf), axis=0)
        tenth = -(-count // 10)
        worst = np.cumsum(ordered, axis=0)[tenth - 1, np.arange(len(tenth))] / tenth
    rows = np.stack([mean, weighted, sd, ordered[0], worst], axis=1).tolist()
    keys = ("mean", "weighted_mean", "sd", "worst", "worst_10")
    return [
        {"clients": n} | {key: value if math.isfinite(value) else None for key, value in zip(keys, row, strict=True)}
        for n, row in zip(count.tolist(), rows, strict=True)
    ]
