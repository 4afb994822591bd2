from __future__ import annotations

import math
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as reference

from fedstrata.base.errors import SpecError
from fedstrata.data.tasks.classification import Classification
from fedstrata.data.tasks.regression import Regression
from fedstrata.evaluation.metrics import METRICS, Metric
from fedstrata.evaluation.predictions import Predictions
from fedstrata.evaluation.sums import EvaluationSums, sums_of

LABELS = [label for label in METRICS if METRICS.find(label).table not in ("errors", "rows")]
"""The metrics of classes."""


def drawn(n, classes, seed, *, coarse=False):
    """Predictions that know something; coarse ones have many ties."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(classes, size=n)
    logits = generator.normal(size=(n, classes)) + 1.5 * np.eye(classes)[labels]
    return Predictions.of(labels, np.round(logits) if coarse else logits)


def by_reference(label, found):
    """What scikit-learn says of the same predictions."""
    truth, shares = found.labels, found.probabilities
    classes = list(range(found.classes))
    if label == "accuracy":
        return reference.accuracy_score(truth, found.predicted)
    if label == "balanced-accuracy":
        return reference.balanced_accuracy_score(truth, found.predicted)
    if label == "worst-class":
        return min(reference.recall_score(truth, found.predicted, average=None))
    if label == "macro-f1":
        return reference.f1_score(truth, found.predicted, average="macro")
    if label == "micro-f1":
        return reference.f1_score(truth, found.predicted, average="micro")
    if label == "mean-iou":
        return reference.jaccard_score(truth, found.predicted, average="macro")
    if label == "perplexity":
        return np.exp(reference.log_loss(truth, shares, labels=classes))
    if label == "auroc":
        return reference.roc_auc_score(truth, shares[:, 1] if found.classes == 2 else shares, multi_class="ovr")
    if label == "log-loss":
        return reference.log_loss(truth, shares, labels=classes)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("label", [label for label in LABELS if label != "ece"])
@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("coarse", [False, True])
def test_equal_to_scikit_learn(label, classes, coarse):
    for seed in range(5):
        found = drawn(300, classes, seed, coarse=coarse)
        assert METRICS.parse(label).of(found) == pytest.approx(by_reference(label, found), abs=1e-6)


def test_calibration_error_by_hand():
    """Confidences 0.9, 0.8 and 0.6 in bins (0.5, 0.75] and (0.75, 1]; the second and third miss."""
    shares = np.array([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6]])
    found = Predictions.of(np.array([0, 1, 0]), np.log(shares))
    # (|1.7 − 1| + |0.6 − 0|) / 3
    assert METRICS.parse({"name": "ece", "bins": 4}).of(found) == pytest.approx(1.3 / 3, abs=1e-6)
    # In two bins all three fall into (0.5, 1]: |2.3 − 1| / 3
    assert METRICS.parse({"name": "ece", "bins": 2}).of(found) == pytest.approx(1.3 / 3, abs=1e-6)
    # In ten, 0.9 and 0.8 are apart: (0.1 + 0.8 + 0.6) / 3
    assert METRICS.parse({"name": "ece", "bins": 10}).of(found) == pytest.approx(1.5 / 3, abs=1e-6)


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("classes", [2, 4])
def test_of_clients_equal_to_each_by_itself(label, classes):
    found, metric = drawn(400, classes, 7, coarse=True), METRICS.parse(label)
    owners = np.random.default_rng(1).integers(29, size=400)
    owners[owners == 3] = 4  # one has no sample
    owners[(owners == 5) & (found.labels != 0)] = 6  # and one a single class
    values = metric.by_client(found, owners, 30)
    alone = [metric.of(found[np.flatnonzero(owners == client)]) for client in range(30)]
    assert [math.isnan(value) for value in values] == [value is None for value in alone]
    assert values[np.isfinite(values)] == pytest.approx([value for value in alone if value is not None], abs=1e-12)
    assert alone[3] is None
    if label == "auroc":
        assert alone[5] is None


@pytest.mark.parametrize("label", [label for label in LABELS if label != "auroc"])
def test_of_sums_equal_to_that_of_the_samples(label):
    found, metric = drawn(300, 4, 3), METRICS.parse(label)
    parts = [sums_of(found[part], metric.score_bins, metric.confidence_bins) for part in np.split(np.arange(300), 6)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    assert isinstance(total, EvaluationSums)
    assert metric.of_sums(total) == pytest.approx(metric.of(found), abs=1e-9)
    assert metric.error_of_sums(total) is None


@pytest.mark.slow
@given(st.integers(0, 10_000), st.sampled_from([2, 3, 5]), st.sampled_from([2, 8, 64, 400]))
def test_auroc_of_histograms_is_within_its_bound(seed, classes, bins):
    found, metric = drawn(120, classes, seed), METRICS.parse({"name": "auroc", "bins": bins})
    sums = sums_of(found[:50], bins) + sums_of(found[50:], bins)
    error = metric.error_of_sums(sums)
    assert abs(metric.of_sums(sums) - metric.of(found)) <= error + 1e-12
    assert bins < 400 or error < 0.05


def test_auroc_of_two_bins_by_hand():
    """One of each two others is in each bin, and both of the class in the upper: of 4 pairs 2 are right and 2 tied."""
    metric = METRICS.parse({"name": "auroc", "bins": 2})
    sums = sums_of(Predictions.of(np.array([0, 1]), np.zeros((2, 2))), 2)
    by_class = torch.tensor([[[0, 2], [1, 1]], [[1, 1], [0, 2]]])
    found = replace(sums, samples=4, scores=by_class)
    assert metric.of_sums(found) == 0.75
    assert metric.error_of_sums(found) == 0.25  # had the tied pairs been right, 1; wrong, 0.5


def test_scores_at_the_ends_and_confidence_at_an_edge_by_hand():
    # So certain that a probability is 1 and its log-odds are infinite: a member in the last bin, another in the first.
    certain = sums_of(Predictions.of(np.array([0, 1]), np.array([[800.0, 0.0], [0.0, 800.0]])), 4)
    assert certain.scores.tolist() == [[[1, 0, 0, 0], [0, 0, 0, 1]]] * 2
    # A half is the upper edge of the first of two bins, and belongs to it.
    even = sums_of(Predictions.of(np.array([0, 1]), np.zeros((2, 2))), confidence_bins=2)
    assert even.calibration.tolist() == [[1.0, 1.0], [0.0, 0.0]]


def test_what_has_no_value():
    one_class = Predictions.of(np.zeros(4, dtype=int), np.random.default_rng(0).normal(size=(4, 3)))
    assert METRICS.parse("auroc").of(one_class) is None
    assert METRICS.parse("auroc").of_sums(sums_of(one_class, 400)) is None
    nothing = Predictions.of(np.zeros(0, dtype=int), np.zeros((0, 3)))
    diverged = Predictions.of(np.array([0, 1]), np.full((2, 3), np.nan))
    for label in LABELS:
        assert METRICS.parse(label).of(nothing) is None
        assert METRICS.parse(label).of_sums(sums_of(nothing, 400, 15)) is None
    for label in ("auroc", "log-loss", "ece"):
        assert METRICS.parse(label).of(diverged) is None


def test_by_class():
    found = drawn(200, 3, 5)
    recalls = reference.recall_score(found.labels, found.predicted, average=None)
    assert METRICS.parse("accuracy").by_class(found) == pytest.approx(recalls)
    assert METRICS.parse("balanced-accuracy").by_class(found) == pytest.approx(recalls)
    assert METRICS.parse("macro-f1").by_class(found) == pytest.approx(
        reference.f1_score(found.labels, found.predicted, average=None)
    )
    areas = [reference.roc_auc_score(found.labels == c, found.probabilities[:, c]) for c in range(3)]
    assert METRICS.parse("auroc").by_class(found) == pytest.approx(areas)
    assert METRICS.parse("ece").by_class(found) is None
    missing = METRICS.parse("accuracy").by_class(found[np.flatnonzero(found.labels != 1)])
    assert missing[1] is None


@pytest.fixture
def module(monkeypatch):
    made = types.ModuleType("my_metrics")
    monkeypatch.setitem(sys.modules, "my_metrics", made)
    return made


def test_a_function_of_ones_own(module):
    module.brier = lambda labels, shares: float(((shares - np.eye(shares.shape[1])[labels]) ** 2).sum(axis=1).mean())
    metric = METRICS.parse({"name": "my_metrics:brier", "lower_is_better": True})
    found = drawn(50, 3, 0)
    assert metric.of(found) == pytest.approx(module.brier(found.labels, found.probabilities))
    assert (metric.label, metric.higher_is_better) == ("brier", False)
    assert not metric.adds_up(Classification())
    assert METRICS.parse(metric.to_spec()) == metric
    metric.check(3)


def test_a_class_of_ones_own(module):
    class Errors(Metric):
        higher_is_better = False

        def of(self, predictions):
            return float((predictions.predicted != predictions.labels).sum())

    Errors.__module__, Errors.__qualname__ = "my_metrics", "Errors"
    module.Errors = Errors
    metric = METRICS.parse("my_metrics:Errors")
    assert metric.label == "Errors"
    found = drawn(50, 3, 0)
    owners = np.arange(50) % 7
    values = metric.by_client(found, owners, 8)
    assert values[:7].sum() == metric.of(found)
    assert math.isnan(values[7])
    assert not metric.adds_up(Classification())
    assert not metric.adds_up(Regression())
    with pytest.raises(NotImplementedError):
        metric.of_sums(sums_of(found))


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda labels, shares: shares[:, 1] / 0, "fails on predictions of 3 classes: "),
        (lambda labels, shares: shares.shape[7], "fails on predictions of 3 classes: IndexError: "),
        (lambda labels, shares: "good", "returns a str. Return a number, or None"),
        (lambda labels, shares: shares.mean(axis=1), "returns a ndarray. Return a number, or None"),
    ],
)
def test_a_function_that_is_no_metric(module, function, problem):
    module.fn = function
    with np.errstate(all="raise"), pytest.raises(SpecError, match=f"evaluation.metrics = 'fn': {problem}"):
        METRICS.parse("my_metrics:fn").check(3)


def test_a_name_that_is_none(module):
    module.number = 3
    with pytest.raises(
        SpecError,
        match=r"name = 'f1': is not a known metric. Use one of: accuracy, .*, or your own class as 'module:Class'",
    ):
        METRICS.parse("f1")
    with pytest.raises(SpecError, match="my_metrics:number': is not a metric"):
        METRICS.parse("my_metrics:number")
    with pytest.raises(SpecError, match=r"the module 'my_metrics' does not define 'nothing'\. Check the name\."):
        METRICS.parse("my_metrics:nothing")
