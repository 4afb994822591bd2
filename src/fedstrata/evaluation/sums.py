"""Compute the sums that real sites send instead of predictions. The server computes metrics from these sums."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstrata.base import records
from fedstrata.base.records import Message, record
from fedstrata.evaluation.predictions import Predictions, Rows

Ints = NDArray[np.int64]
Reals = NDArray[np.float64]

EXTREME = 12.0
"""The maximum log-odds in histograms of scores.

Histograms range from −12 to 12. The first and the last bin also contain the scores outside this range.
"""


@record("EvaluationSums")
class EvaluationSums(Message):
    """Sums over a set of samples, from which metrics can be computed. The sums of two sets can be added.

    Args:
        samples: The number of samples.
        loss: Sum of the samples' cross-entropies, in nats.
        confusion: The confusion matrix (numbers of samples), int64, shape (C, C). Rows are true classes, and columns
            are predicted classes.
        scores: Two histograms for each of C classes, int64, shape (C, 2, B) for B bins. The first histogram of class c
            counts the scores of samples of other classes. The second histogram counts the scores of samples of class c.
            A sample's score for c is the log-odds of its predicted probability of c. B is 0 if no metric uses the
            scores.
        calibration: For each of E bins of confidence, the sum of the confidences and the number of correct predictions,
            float64, shape (E, 2). The confidence of a prediction is its largest predicted probability.

    >>> one = sums_of(Predictions.of(np.array([0, 1]), np.array([[2.0, 0.0], [1.0, 0.0]])))
    >>> (one + one).confusion.tolist()
    [[2, 0], [2, 0]]
    """

    samples: int
    loss: float
    confusion: Tensor
    scores: Tensor
    calibration: Tensor

    def __add__(self, other: EvaluationSums) -> EvaluationSums:
        return records.add(self, other)  # type: ignore[no-any-return]


@record("TaskSums")
class TaskSums(Message):
    """Sums over samples of a task other than plain classification. The sums of two sets of samples can be added.

    Args:
        samples: The number of samples.
        loss: The sum of the samples' losses.
        weight: The sum of the samples' weights.
        tables: The sum of each entry that ``Task.tables`` lists.
    """

    samples: int
    loss: float
    weight: float
    tables: dict[str, Tensor]

    def __add__(self, other: TaskSums) -> TaskSums:
        return records.add(self, other)  # type: ignore[no-any-return]


def task_sums(rows: Rows, tables: Iterable[str]) -> TaskSums:
    """Compute the sums over samples of a task other than plain classification.

    Args:
        rows: The predictions of the samples.
        tables: The names of the entries to sum.
    """
    owners = np.zeros(len(rows), dtype=np.int64)
    sums = {name: torch.from_numpy(rows.sums(name, owners, 1)[0]) for name in tables if name in rows.arrays}
    return TaskSums(len(rows), float(rows.losses.sum()), float(rows.weights.sum()), sums)


def sums_of(predictions: Predictions, score_bins: int = 0, confidence_bins: int = 0) -> EvaluationSums:
    """Compute the sums that the metrics of plain classification need.

    Args:
        predictions: The predictions of N samples.
        score_bins: The number B of bins in each class's histogram of scores; 0 to omit these histograms.
        confidence_bins: The number E of bins of confidence; 0 to omit the bins.
    """
    n, classes = len(predictions), predictions.classes
    labels = predictions.labels
    scores = np.zeros((classes, 2, score_bins), dtype=np.int64)
    if score_bins:
        with np.errstate(divide="ignore", invalid="ignore"):
            odds = predictions.log_probabilities - np.log1p(-predictions.probabilities)
        place = np.nan_to_num(odds, nan=0.0, posinf=EXTREME, neginf=-EXTREME) / (2 * EXTREME) + 0.5
        bins = np.clip((place * score_bins).astype(np.int64), 0, score_bins - 1)
        member = (labels[:, None] == np.arange(classes)).astype(np.int64)
        cells = (np.arange(classes) * 2 + member) * score_bins + bins
        scores = np.bincount(cells.ravel(), minlength=scores.size).reshape(scores.shape).astype(np.int64)
    sums = calibration(predictions, np.zeros(n, dtype=np.int64), 1, confidence_bins)[0]
    return EvaluationSums(
        n,
        predictions.total_loss,
        torch.from_numpy(confusion_of(predictions)),
        torch.from_numpy(scores),
        torch.from_numpy(sums),
    )


def confusion_of(predictions: Predictions) -> Ints:
    """Return the confusion matrix, shape (C, C). Rows are true classes, and columns are predicted classes."""
    classes = predictions.classes
    cells = predictions.labels * classes + predictions.predicted
    return np.bincount(cells, minlength=classes * classes).reshape(classes, classes).astype(np.int64)


def calibration(predictions: Predictions, owners: Ints, clients: int, bins: int) -> Reals:
    """Sum the confidences, and count correct predictions, for each client and each bin of confidence.

    Bin k of E bins, counted from 1, contains the samples with a confidence in ((k − 1) / E, k / E].

    Args:
        predictions: The predictions of N samples.
        owners: The client of each sample, shape (N,).
        clients: The number of clients.
        bins: The number E of bins.

    Returns:
        For each client and bin, the sum of the confidences and the number of correct predictions, shape (clients, E,
        2).
    """
    if not bins:
        return np.zeros((clients, 0, 2))
    confidence = predictions.probabilities.max(axis=1, initial=0.0)
    hits = (predictions.predicted == predictions.labels).astype(np.float64)
    place = np.clip(np.ceil(np.nan_to_num(confidence) * bins).astype(np.int64) - 1, 0, bins - 1)
    cells, size = owners * bins + place, clients * bins
    sums = [np.bincount(cells, weights=values, minlength=size) for values in (confidence, hits)]
    binned: Reals = np.stack(sums, axis=-1).reshape(clients, bins, 2).astype(np.float64)
    return binned
