"""Metrics that need all predictions: mean average precision and those of torchmetrics, against their libraries."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from lazy import Lazy
from sklearn.metrics import average_precision_score
from task_cases import prepared_of

import fedstrata as fs
from fedstrata.base.errors import ExtraMissingError, SpecError
from fedstrata.evaluation.metrics import METRICS, values_of
from fedstrata.evaluation.predictions import Rows
from fedstrata.evaluation.sums import task_sums

pytestmark = pytest.mark.slow  # the import of torchmetrics takes seconds

torchmetrics = Lazy("torchmetrics")
CLASSES = "torchmetrics.classification"


@pytest.fixture(scope="module", autouse=True)
def _needed() -> None:
    """Import torchmetrics when the first test of this file runs, because the import takes seconds."""
    pytest.importorskip("torchmetrics")


def rows(n: int = 60, labels: int = 3) -> Rows:
    draw = np.random.default_rng(1)
    targets = (draw.random((n, labels)) < 0.4).astype(np.float32)
    predictions = (0.3 * targets + draw.random((n, labels))).astype(np.float32) / 1.3
    return Rows({"targets": targets, "predictions": predictions}, np.zeros(n), np.ones(n))


def test_mean_average_precision_equals_scikit_learn_and_torchmetrics_for_all_and_per_client():
    metric, made = METRICS.make("mean-average-precision", {}), rows()
    targets, predictions = made.arrays["targets"], made.arrays["predictions"]
    expected = average_precision_score(targets, predictions, average="macro")
    assert values_of([metric], made)["mean-average-precision"] == pytest.approx(expected, abs=1e-6)
    theirs = torchmetrics.classification.MultilabelAveragePrecision(num_labels=3)
    theirs.update(torch.from_numpy(predictions), torch.from_numpy(targets).long())
    assert values_of([metric], made)["mean-average-precision"] == pytest.approx(float(theirs.compute()), abs=1e-6)
    owners = np.arange(60) % 4
    by_client = metric.by_client_of_rows(made, owners, 5)
    for client in range(4):
        mine = owners == client
        assert by_client[client] == pytest.approx(average_precision_score(targets[mine], predictions[mine]), abs=1e-6)
    assert np.isnan(by_client[4])


def test_mean_average_precision_by_hand_leaves_out_labels_that_nobody_has():
    made = Rows(
        {"targets": np.array([[1, 0], [0, 0], [1, 0]]), "predictions": np.array([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]])},
        np.zeros(3),
        np.ones(3),
    )
    # Ranks 1 and 3 of the first label are right: (1/1 + 2/3) / 2.
    assert values_of([METRICS.make("mean-average-precision", {})], made)["mean-average-precision"] == pytest.approx(
        5 / 6
    )


@pytest.mark.parametrize(
    ("name", "arguments", "case"),
    [
        (f"{CLASSES}:MultilabelAUROC", {"num_labels": 3}, "multilabel"),
        (f"{CLASSES}:MultilabelHammingDistance", {"num_labels": 3}, "multilabel"),
        (f"{CLASSES}:MulticlassMatthewsCorrCoef", {"num_classes": 3}, "classification"),
        ("torchmetrics:MeanAbsoluteError", {"num_outputs": 1}, "regression"),
    ],
)
def test_a_run_measures_what_torchmetrics_measures(name: str, arguments: dict[str, int], case: str):
    table = {"name": name, **arguments}
    label = name.rpartition(":")[2]
    metrics = ["accuracy", table] if case == "classification" else [table]
    prepared = prepared_of(case, evaluation={"metrics": metrics, "client_test": 0.3})
    (metric,) = (each for each in prepared.spec.evaluation.metrics if each.label == label)
    assert metric.to_spec() == table
    assert metric.higher_is_better is (label not in ("MultilabelHammingDistance", "MeanAbsoluteError"))
    with fs.Simulation(prepared) as simulation:
        record = list(simulation)[-1]
        weights = simulation.evaluated()
    data, model = prepared.data, prepared.config.model
    with torch.no_grad():
        outputs = model({**weights.params, **weights.buffers}, data.inputs(slice(None), "test"))
    kept, theirs = data.task.rows(outputs, data.y_test), load(name)(**arguments)
    whole = kept["targets"].long() if name.startswith(CLASSES) else kept["targets"]
    predictions = outputs.softmax(1) if case == "classification" else kept["predictions"]
    theirs.update(predictions, whole)
    values = record if case == "classification" else record["test"]
    shown = values.get(label, record.get("test", {}).get(label))
    assert shown == pytest.approx(float(theirs.compute()), abs=1e-6)


def load(name: str) -> type:
    module, _, attribute = name.partition(":")
    return getattr(sys.modules.get(module) or __import__(module, fromlist=["_"]), attribute)


def test_wrong_arguments_and_tasks_are_refused_before_the_first_round():
    with pytest.raises(
        SpecError, match=r"evaluation\.metrics = 'MultilabelAUROC': fails on predictions of the task 'mu"
    ):
        prepared_of("multilabel", evaluation={"metrics": [{"name": f"{CLASSES}:MultilabelAUROC", "num_labels": 9}]})
    with pytest.raises(SpecError, match=r"mean-average-precision.*needs several labels per sample"):
        prepared_of("regression", evaluation={"metrics": ["mean-average-precision"]})
    with pytest.raises(SpecError, match=r"mean-average-precision.*needs several labels per sample"):
        prepared_of("classification", evaluation={"metrics": ["accuracy", "mean-average-precision"]})


def test_they_do_not_add_up():
    names = ["mean-average-precision", f"{CLASSES}:MultilabelAUROC"]
    assert not any(METRICS.find(name).adds_up(fs.MultiLabel()) for name in names)
    assert METRICS.find("micro-f1").adds_up(fs.MultiLabel())


def test_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fedstrata.evaluation.metrics.find_spec", lambda name: None)
    with pytest.raises(ExtraMissingError, match=r"pip install 'fedstrata\[metrics\]'"):
        METRICS.make(f"{CLASSES}:MultilabelAUROC", {"num_labels": 3})


@pytest.mark.long
def test_torchmetrics_is_imported_only_when_it_is_used():
    code = "import sys, fedstrata.evaluation.metrics; print('torchmetrics' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def by_sums(metric_names: list[str], made: Rows, owners: np.ndarray, clients: int) -> dict[str, list[float]]:
    """The values of metrics for all samples, per client, and from the sums that sites send of their samples."""
    metrics = [METRICS.make(name, {}) for name in metric_names]
    parts = [task_sums(made[owners == client], ["counts"]) for client in range(clients)]
    sums = dataclasses.replace(
        parts[0], tables={"counts": torch.stack([part.tables["counts"] for part in parts]).sum(0)}
    )
    return {
        metric.label: [
            values_of([metric], made)[metric.label],
            metric.of_task_sums(sums),
            *metric.by_client_of_rows(made, owners, clients),
        ]
        for metric in metrics
    }


def equal_theirs(
    values: list[float], theirs: Any, predictions: torch.Tensor, targets: torch.Tensor, owners: Any
) -> None:
    clients = int(owners.max()) + 1
    expected = [float(theirs(predictions, targets))] * 2
    expected += [float(theirs(predictions[owners == k], targets[owners == k])) for k in range(clients)]
    assert values == pytest.approx(expected, abs=1e-6)


def test_metrics_of_several_labels_equal_torchmetrics_per_client_and_from_sums():
    generator = torch.Generator().manual_seed(2)
    outputs, owners = torch.randn(90, 4, generator=generator), np.arange(90) % 3
    targets = (torch.rand(90, 4, generator=generator) < 0.4).float()
    task = fs.MultiLabel()
    kept = {name: part.numpy() for name, part in task.rows(outputs, targets).items()}
    values = by_sums(["micro-f1", "macro-f1"], Rows(kept, np.zeros(90), np.ones(90)), owners, 3)
    for average in ("micro", "macro"):
        theirs = torchmetrics.classification.MultilabelF1Score(num_labels=4, average=average)
        equal_theirs(values[f"{average}-f1"], theirs, outputs.sigmoid(), targets.long(), owners)


def test_metrics_of_pixels_equal_torchmetrics_per_client_and_from_sums():
    generator = torch.Generator().manual_seed(3)
    outputs, owners = torch.randn(12, 3, 8, 8, generator=generator), np.arange(12) % 3
    targets = torch.randint(0, 3, (12, 8, 8), generator=generator)
    targets[:, 0] = -100
    kept = {name: part.numpy() for name, part in fs.Segmentation().rows(outputs, targets).items()}
    values = by_sums(["mean-iou", "accuracy"], Rows(kept, np.zeros(12), np.ones(12)), owners, 3)
    theirs = torchmetrics.classification.MulticlassJaccardIndex(num_classes=3, average="macro", ignore_index=-100)
    equal_theirs(values["mean-iou"], theirs, outputs, targets, owners)
    accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=3, average="micro", ignore_index=-100)
    equal_theirs(values["accuracy"], accuracy, outputs, targets, owners)
