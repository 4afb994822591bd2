"""Several labels for each sample: targets, losses, strata and refusals by hand; laws; and runs on generated data."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn import metrics as reference
from sklearn.datasets import make_multilabel_classification
from torch import nn

import fedstrata as fs
from fedstrata.base.errors import DataError, SpecError
from fedstrata.data.tasks.multilabel import MultiLabel
from fedstrata.evaluation.metrics import METRICS, values_of
from fedstrata.evaluation.predictions import Rows
from fedstrata.evaluation.sums import task_sums
from fedstrata.runs.preparation import prepare


def generated(n=80):
    x, y = make_multilabel_classification(2 * n, n_features=6, n_classes=3, random_state=0)
    return x[:n].astype(np.float32), y[:n], x[n:].astype(np.float32), y[n:]


def spec(task=None, **tables):
    small = {
        "task": {"name": "multilabel", **(task or {})},
        "partition": {"name": "iid", "clients": 2},
        "model": {"name": "mlp", "hidden": [4]},
        "training": {"rounds": 2, "lr": 0.1, "batch_size": 8},
    }
    return {**small, **tables}


def refusal(data, table):
    with pytest.raises((SpecError, DataError)) as caught:
        prepare(fs.Experiment.from_table(table), data=data)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_losses_by_hand():
    """A logit 0 costs ln 2; a logit ln 3 gives the probability 3/4 of the label."""
    outputs = torch.tensor([[0.0, math.log(3)], [math.log(3), 0.0]])
    targets = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    losses, weights = MultiLabel().losses(outputs, targets)
    first, second = (math.log(2) + math.log(4 / 3)) / 2, (math.log(2) + math.log(4)) / 2
    assert losses.tolist() == pytest.approx([first, second])
    assert weights.tolist() == [1.0, 1.0]
    assert float(MultiLabel().mean_loss(outputs, targets)) == pytest.approx((first + second) / 2)


def test_predictions_by_hand():
    """A label is predicted if its probability is above one half."""
    found = MultiLabel().predictions(torch.tensor([[0.0, 0.1, -0.1]]))
    assert found["labels"].tolist() == [[0, 1, 0]]
    assert found["probabilities"][0, 0] == 0.5


def test_strata_are_the_samples_without_and_with_a_label():
    targets, names = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), ("cough", "fever")
    task = MultiLabel(stratum="fever")
    assert task.strata(targets, names).tolist() == [0, 1, 1]
    assert task.stratum_names(names) == ("without fever", "fever")
    assert MultiLabel().strata(targets, names) is None
    assert MultiLabel().stratum_names(names) == ()


def test_labels_get_their_names():
    x, y, *test = generated()
    data = fs.from_arrays(x, y, *test, task="multilabel", class_names=["a", "b", "c"])
    assert (data.class_names, data.outputs, data.y_train.dtype) == (("a", "b", "c"), 3, torch.float32)
    assert fs.from_arrays(x, y, *test, task="multilabel").class_names == ("0", "1", "2")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda y: y * 2, "y_train contains 2. Use 1 for each label that a sample has, and 0 for all others."),
        (lambda y: y[:, :2], "y_test has 3 labels per sample, but y_train has 2."),
        (lambda y: y.astype(str), "y_train is of type"),
        (lambda y: y[:-1], "y_train"),
        (lambda y: np.where(np.arange(3) == 1, np.nan, y), "y_train: 80 values are not finite numbers, the first at "),
    ],
)
def test_refuses_other_targets(change, words):
    x, y, *test = generated()
    assert refusal((x, change(y), *test), spec()).startswith(words)


def test_refuses_an_unknown_stratum():
    x, y, *test = generated()
    data = {"x_train": x, "y_train": y, "x_test": test[0], "y_test": test[1], "class_names": ["flu", "cold", "asthma"]}
    words = refusal(data, spec({"stratum": "astma"}))
    assert words.startswith(
        "task.stratum = 'astma': is not a label; did you mean 'asthma'? Use one of: flu, cold, asthma"
    )


def test_refuses_names_of_other_labels():
    with pytest.raises(DataError, match="class_names has 2 names for 3 labels"):
        fs.from_arrays(*generated(), task="multilabel", class_names=["a", "b"])


@pytest.mark.parametrize("metric", ["rmse", "accuracy", "auroc"])
def test_refuses_metrics_of_other_tasks(metric):
    words = refusal(generated(), spec(evaluation={"metrics": ["micro-f1", metric]}))
    assert words.startswith("evaluation.metrics")


@pytest.mark.parametrize("method", ["fedrs", "moon", "rebafl", "fedlc", "bsm-fedavg"])
def test_refuses_methods_with_a_loss_of_their_own(method):
    words = refusal(generated(), spec({"stratum": "0"}, method=method))
    assert words.startswith(f"method = '{method}': has its own loss for the tasks classification")


@pytest.mark.parametrize("table", [{"partition": {"name": "dirichlet", "clients": 2}}, {"method": "stratify"}])
def test_label_aware_settings_need_a_stratum(table):
    words = refusal(generated(), spec(**table))
    assert "needs classes, but the task 'multilabel' has no classes. Set task.stratum to the name of a label." in words


@pytest.mark.slow
def test_one_client_equals_centralised_training():
    x, y, *test = generated()
    table = spec(
        partition={"name": "iid", "clients": 1}, training={"rounds": 5, "lr": 0.5, "batch_size": 80, "local_epochs": 1}
    )
    prepared = prepare(fs.Experiment.from_table(table), data=(x, y, *test))
    network = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    for own, start in zip(network.parameters(), prepared.config.model.params().values(), strict=True):
        own.data.copy_(start)
    inputs, wanted = torch.from_numpy((x - x.mean(axis=0)) / x.std(axis=0)), torch.from_numpy(y).float()
    steps = torch.optim.SGD(network.parameters(), lr=0.5)
    for _ in range(5):
        steps.zero_grad()
        nn.BCEWithLogitsLoss()(network(inputs), wanted).backward()
        steps.step()
    history = fs.run(table, data=(x, y, *test))
    for trained, own in zip(history.params.values(), network.parameters(), strict=True):
        assert torch.allclose(trained, own.detach(), atol=1e-6, rtol=0)


def test_metrics_equal_scikit_learn():
    generator = np.random.default_rng(0)
    truth = generator.integers(2, size=(80, 3))
    outputs = torch.from_numpy(truth - 0.5 + generator.normal(size=truth.shape))
    rows = {name: tensor.numpy() for name, tensor in MultiLabel().rows(outputs, torch.from_numpy(truth)).items()}
    found, guess, owners = Rows(rows, np.zeros(80), np.ones(80)), (outputs > 0).long().numpy(), np.arange(80) % 4
    metrics = [METRICS.parse("micro-f1"), METRICS.parse("macro-f1")]
    expected = {m.label: reference.f1_score(truth, guess, average=m.label[:5]) for m in metrics}
    assert values_of(metrics, found) == pytest.approx(expected, abs=1e-6)
    both = task_sums(found[:30], MultiLabel.tables) + task_sums(found[30:], MultiLabel.tables)
    for metric in metrics:
        assert metric.of_task_sums(both) == pytest.approx(expected[metric.label], abs=1e-6)
        parts = [(truth[owners == k], guess[owners == k]) for k in range(4)]
        each = [reference.f1_score(*part, average=metric.label[:5]) for part in parts]
        assert metric.by_client_of_rows(found, owners, 4) == pytest.approx(each, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", {"name": "fedsts", "strata": 2}, "stratify"])
def test_runs(method, tmp_path):
    x, y, x_test, y_test = generated()
    table = spec({"stratum": "1"}, partition={"name": "dirichlet", "clients": 3}, method=method)
    table["training"]["rounds"] = 12
    history = fs.run(table, data=(x, y, x_test, y_test), out=tmp_path / "run")
    found = np.asarray(fs.load(tmp_path / "run").predict(x_test))
    assert history.primary == "micro-f1"
    assert history.final("test.micro-f1") == pytest.approx(reference.f1_score(y_test, found, average="micro"), abs=1e-6)
    always = reference.f1_score(y_test, np.tile(y.mean(axis=0) > 0.5, (len(y_test), 1)), average="micro")
    assert history.final("test.micro-f1") > always
