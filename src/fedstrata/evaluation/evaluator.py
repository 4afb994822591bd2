"""One evaluation of a run: all sets of samples that it is measured on, and what is recorded of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstrata.data.dataset import Dataset
from fedstrata.evaluation.holdouts import HeldOut
from fedstrata.evaluation.messages import Evaluate, Evaluated, Part
from fedstrata.evaluation.metrics import nan_for_none
from fedstrata.evaluation.predictions import Predictions, predict
from fedstrata.evaluation.settings import Evaluation
from fedstrata.evaluation.sums import EvaluationSums, confusion_of
from fedstrata.federation.messages import ClientId, Weights
from fedstrata.models.model import Model

Ints = NDArray[np.int64]
Reals = NDArray[np.float64]
Ask = Callable[[Evaluate], Mapping[ClientId, Evaluated]]
"""Puts the question to all clients; those whose reply cannot be had are absent."""


@dataclass(frozen=True, eq=False)
class Score:
    """The result of an evaluation.

    Args:
        loss: Mean cross-entropy on the test set.
        accuracy: Share of test samples whose largest logit is that of their label (top-1), in [0, 1].
        per_class: The same within each class; None for a class without test samples.
        confusion: How many test samples of each class (row) were taken for each class (column), (C, C).
        more: What else is recorded: see ``docs/evaluation.md``.
        table: What is known of each client, a column a key, each of one entry a client; empty where nothing is.
    """

    loss: float | None
    accuracy: float | None
    per_class: list[float | None]
    confusion: Ints
    more: dict[str, Any] = field(default_factory=dict)
    table: dict[str, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Measures models by the settings of a run.

    Args:
        settings: The run's.
        model: The architecture, where it computes.
        data: The data set, there; its test samples may be elsewhere, at real sites.
        held: What nobody trains on.
        clients: N.
        batch_statistics: Whether BatchNorm normalises with each batch's statistics.
        remote: Whether the clients' samples are at real sites, and none here.
    """

    settings: Evaluation
    model: Model
    data: Dataset
    held: HeldOut
    clients: int
    batch_statistics: bool = False
    remote: bool = False

    def score(self, weights: Weights, round: int, ask: Ask, unheard: Collection[ClientId] = ()) -> Score:
        """How good a model is.

        Args:
            weights: The global model.
            round: The round.
            ask: Reaches the clients.
            unheard: Clients without a reply that counted for long.
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
                found, _, _ = self._asked(self._question(weights, round, "validation"), ask)
                more["validation"] = None if found is None else self._of_sums(found)
            score = self._of_test(weights, more)[0] if len(self.data.y_test) else self._of_pooled(pooled, more)
        else:
            score, everything = self._of_test(weights, more)
            parts = self._predict_held(weights)
            if "validation" in parts:
                more["validation"] = self._measured(parts["validation"])
            if tests is not None:
                mine = parts["clients"] if "clients" in parts else everything[tests.indices]
                sizes, per_client = tests.sizes, self._by_client(mine, tests.owners, len(tests))
            if (away := self.held.test_clients) is not None:
                values = self._by_client(parts["test_clients"], away.owners, len(away))
                (more["test_clients"],) = self._over_clients([values], away.sizes)
        if per_client is not None:
            more["clients"] = self._with_unheard(per_client, sizes, unheard)
            table = self._table(per_client, sizes)
        if tests is not None and self.settings.fine_tune is not None:
            _, own, sizes = self._asked(self._question(weights, round, "test", personal=True), ask)
            if own is not None:
                more["personal"] = self._with_unheard(own, sizes, unheard)
                table |= {
                    f"personal_{key}": column for key, column in self._table(own, sizes).items() if key != "samples"
                }
        return Score(score.loss, score.accuracy, score.per_class, score.confusion, more, table)

    def _of_test(self, weights: Weights, more: dict[str, Any]) -> tuple[Score, Predictions]:
        """On the server's test set, and what was predicted of it."""
        found = self._predict(weights)
        n, confusion = len(found), confusion_of(found)
        hits, totals = np.diagonal(confusion), confusion.sum(axis=1)
        per_class = [h / t if t else None for h, t in zip(hits.tolist(), totals.tolist(), strict=True)]
        if self.settings.chosen:
            more["test"] = self._values(found)
        if self.settings.per_class and self.settings.chosen:
            more["by_class"] = {m.label: each for m in self.settings.metrics if (each := m.by_class(found)) is not None}
        return Score(found.total_loss / max(n, 1), int(hits.sum()) / max(n, 1), per_class, confusion), found

    def _of_pooled(self, sums: EvaluationSums | None, more: dict[str, Any]) -> Score:
        """On the sites' own test parts together."""
        if sums is None or not sums.samples:
            nothing = np.zeros((self.data.classes, self.data.classes), dtype=np.int64)
            return Score(None, None, [None] * self.data.classes, nothing)
        confusion = sums.confusion.numpy()
        hits, totals = np.diagonal(confusion).tolist(), confusion.sum(axis=1).tolist()
        if self.settings.chosen:
            more["test"] = self._of_sums(sums, both=False)
        per_class = [h / t if t else None for h, t in zip(hits, totals, strict=True)]
        return Score(sums.loss / sums.samples, sum(hits) / sums.samples, per_class, confusion)

    def _predict(self, weights: Weights, indices: Ints | None = None) -> Predictions:
        return predict(
            self.model,
            weights,
            self.data,
            "test" if indices is None else "train",
            indices,
            batch_size=self.settings.batch_size,
            batch_statistics=self.batch_statistics,
        )

    def _predict_held(self, weights: Weights) -> dict[str, Predictions]:
        """What the model says of all that was held out of the training samples, in one pass, cut by what it is for."""
        held = self.held
        wanted = {
            "validation": held.validation,
            "clients": held.own_test.indices if held.own_test is not None and held.own_test_split == "train" else None,
            "test_clients": None if held.test_clients is None else held.test_clients.indices,
        }
        parts = {name: indices for name, indices in wanted.items() if indices is not None}
        if not parts:
            return {}
        found = self._predict(weights, np.concatenate(list(parts.values())))
        if len(parts) == 1:
            return dict.fromkeys(parts, found)
        ends = np.cumsum([len(indices) for indices in parts.values()]).tolist()
        return {name: found[begin:end] for name, begin, end in zip(parts, [0, *ends[:-1]], ends, strict=True)}

    def _values(self, found: Predictions) -> dict[str, float | None]:
        return {metric.label: metric.of(found) for metric in self.settings.metrics}

    def _measured(self, found: Predictions) -> dict[str, float | None]:
        """Accuracy and loss, and the metrics."""
        accuracy = float((found.predicted == found.labels).mean())
        return {"accuracy": accuracy, "loss": found.total_loss / len(found)} | self._values(found)

    def _of_sums(self, sums: EvaluationSums, *, both: bool = True) -> dict[str, float | None]:
        """Metrics by sums, and their largest errors; ``both``: with accuracy and loss."""
        known: dict[str, float | None] = {}
        if both and sums.samples:
            hits = int(np.diagonal(sums.confusion.numpy()).sum())
            known = {"accuracy": hits / sums.samples, "loss": sums.loss / sums.samples}
        for metric in self.settings.metrics:
            known[metric.label] = metric.of_sums(sums)
            if (error := metric.error_of_sums(sums)) is not None:
                known[f"{metric.label}_error"] = error
        return known

    def _by_client(self, found: Predictions, owners: Ints, clients: int) -> Reals:
        """(clients, metrics); NaN where a client has no value."""
        columns = [metric.by_client(found, owners, clients) for metric in self.settings.metrics]
        return np.stack(columns, axis=1)

    def _question(self, weights: Weights, round: int, part: Part, *, personal: bool = False) -> Evaluate:
        metrics = self.settings.metrics
        epochs = (self.settings.fine_tune or 0) if personal else 0
        scores, confidences = (max(getattr(m, key) for m in metrics) for key in ("score_bins", "confidence_bins"))
        return Evaluate(round, weights, part, personal, epochs, scores, confidences)

    def _asked(self, question: Evaluate, ask: Ask) -> tuple[EvaluationSums | None, Reals | None, Ints]:
        """The sum of the clients' sums; their values (N, metrics), None where not all tell them; samples (N,)."""
        replies = ask(question)
        total: EvaluationSums | None = None
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
        """What is recorded over all clients, and over those who have not been heard of."""
        who = sorted(unheard)
        away = np.full_like(values, math.nan)
        away[who] = values[who]
        everybody, apart = self._over_clients([values, away], sizes)
        return everybody | {"unheard": {"clients": len(who)} | (apart if who else {})}

    def _over_clients(self, groups: Sequence[Reals], sizes: Ints) -> list[dict[str, Any]]:
        """What is recorded over each of some groups of clients; NaN where one is not of the group."""
        labels, metrics = self.settings.labels, self.settings.metrics
        higher = np.repeat([metric.higher_is_better for metric in metrics], len(groups))
        found = over_clients(np.stack(groups, axis=2).reshape(len(sizes), -1), sizes, higher)
        return [dict(zip(labels, found[n :: len(groups)], strict=True)) for n in range(len(groups))]

    def _table(self, values: Reals, sizes: Ints) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {"samples": sizes.tolist()}
        for place, label in enumerate(self.settings.labels):
            columns[label] = [value if math.isfinite(value) else None for value in values[:, place].tolist()]
        return columns


def over_clients(values: Reals, sizes: Ints | Reals, higher_is_better: NDArray[np.bool_]) -> list[dict[str, Any]]:
    """Metrics over clients.

    Args:
        values: Each client's, (N, M); NaN where it has none, and is left out.
        sizes: Test samples of each, (N,), its weight.
        higher_is_better: Which end of each metric is the worst, (M,).

    Returns:
        For each metric ``clients`` (how many have a value), ``mean``, ``weighted_mean``, ``sd`` (of these clients, not
        of a sample of them), ``worst``, and ``worst_10``, the mean of the tenth of the clients (rounded up) that fare
        worst; None where no client has a value.

    >>> over_clients(np.array([[0.5], [1.0], [np.nan]]), np.array([30, 10, 5]), np.array([True]))[0]["weighted_mean"]
    0.625
    """
    if not len(values):
        values, sizes = np.full((1, len(higher_is_better)), math.nan), np.zeros(1)
    known = np.isfinite(values)
    found, count = np.where(known, values, 0.0), known.sum(axis=0)
    weights = sizes[:, None] * known
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = found.sum(axis=0) / count
        weighted = (found * weights).sum(axis=0) / weights.sum(axis=0)
        sd = np.sqrt((np.where(known, values - mean, 0.0) ** 2).sum(axis=0) / count)
        # The worst ones first, those without a value last.
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
