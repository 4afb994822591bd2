"""Regression: targets, losses, strata and refusals by hand; laws; and runs on scikit-learn's diabetes data."""

from __future__ import annotations

import json

import numpy as np
import pandas
import pytest
import torch
from sklearn import metrics as reference
from sklearn.datasets import load_diabetes
from torch import nn

import fedstrata as fs
from fedstrata.base.errors import DataError, SpecError
from fedstrata.cli import main
from fedstrata.data.tasks.regression import Regression, quantile_edges
from fedstrata.evaluation.metrics import METRICS, values_of
from fedstrata.evaluation.predictions import Rows
from fedstrata.evaluation.sums import task_sums
from fedstrata.runs.preparation import prepare

METRIC_NAMES = ("rmse", "mae", "r2")


def diabetes():
    """Diabetes data in a fixed order: 342 training and 100 test samples, with features of deviation 1."""
    x, y = load_diabetes(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x[order] / x.std(axis=0)).astype(np.float32), y[order]
    return x[:342], y[:342], x[342:], y[342:]


def arrays(n=40, width=1, seed=0):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(2 * n, 3)).astype(np.float32)
    y = 50 + 10 * (x @ generator.normal(size=(3, width))) + generator.normal(size=(2 * n, width))
    return x[:n], y[:n], x[n:], y[n:]


def spec(task=None, **tables):
    small = {
        "task": {"name": "regression", **(task or {})},
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


# Losses and strata by hand.


@pytest.mark.parametrize(
    ("loss", "expected"),
    [("mse", [0.25, 2.5]), ("mae", [0.5, 1.5]), ("huber", [0.125, 0.5 * (0.5 + 1.5)])],
)
def test_losses_are_in_standardised_units(loss, expected):
    """Errors are 0.5 and 0.5 deviations for the first sample, and 1 and 2 for the second."""
    task = Regression(loss=loss, mean=(10.0, 100.0), deviation=(2.0, 20.0))
    targets = torch.tensor([[12.0, 120.0], [10.0, 60.0]], dtype=torch.float64)  # standardised: (1, 1), (0, −2)
    outputs = torch.tensor([[0.5, 1.5], [1.0, 0.0]])
    losses, weights = task.losses(outputs, targets)
    assert losses.tolist() == pytest.approx(expected)
    assert weights.tolist() == [1.0, 1.0]
    assert float(task.mean_loss(outputs, targets)) == pytest.approx(sum(expected) / 2)
    assert task.total_loss(outputs, targets) == pytest.approx(sum(expected))
    assert task.predictions(outputs)["values"].tolist() == [[11.0, 130.0], [12.0, 100.0]]


def test_a_constant_target_keeps_its_unit():
    data = (np.ones((4, 2), np.float32), np.full(4, 7.5), np.ones((2, 2), np.float32), np.array([7.5, 8.5]))
    task = prepare(fs.Experiment.from_table(spec()), data=data).data.task
    assert (task.mean, task.deviation) == ((7.5,), (1.0,))


@pytest.mark.parametrize(
    ("values", "bins", "edges"),
    [
        ([1, 2, 3, 4], 2, (3.0,)),
        ([1, 1, 1, 4], 2, (4.0,)),
        ([1, 2, 3, 4, 5, 6], 3, (3.0, 5.0)),
        ([1, 2], 5, (2.0,)),
        ([1, 1, 2, 2, 9, 9], 3, (2.0, 9.0)),
    ],
)
def test_quantile_edges(values, bins, edges):
    counts = np.stack(np.unique(np.array(values, float), return_counts=True), axis=1).astype(float)
    assert quantile_edges(counts, bins) == edges


def test_strata_contain_their_lower_end():
    task = Regression(edges=(1.5, 20.0))
    targets = torch.tensor([[-3.0], [1.5], [19.0], [20.0], [1e9]], dtype=torch.float64)
    assert task.strata(targets, ()).tolist() == [0, 1, 1, 2, 2]
    assert task.stratum_names(()) == ("below 1.5", "1.5 to 20", "from 20")


def test_without_bins_there_are_no_strata():
    assert Regression().strata(torch.zeros(2, 1), ()) is None
    assert Regression().stratum_names(()) == ()


@pytest.mark.parametrize("held", [{}, {"validation": 0.25}, {"client_test": 0.25}, {"test_clients": 0.4}])
def test_statistics_are_those_of_the_samples_that_clients_train_on(held):
    x, y, *test = arrays(60, 2)
    table = spec({"bins": 3}, partition={"name": "iid", "clients": 5}, evaluation=held)
    prepared = prepare(fs.Experiment.from_table(table), data=(x, y, *test))
    trained = np.setdiff1d(prepared.assignment.indices, prepared.held.samples)
    assert (len(trained) < len(y)) == bool(held)
    task = prepared.config.task
    assert task.mean == pytest.approx(tuple(y[trained].mean(axis=0)), rel=1e-12)
    assert task.deviation == pytest.approx(tuple(y[trained].std(axis=0)), rel=1e-12)
    ordered = np.sort(y[trained, 0])
    sizes = np.bincount(prepared.data.strata[trained])
    assert len(sizes) == 3
    assert sizes.max() - sizes.min() <= 1
    assert set(task.edges) <= set(ordered)


# Refusals.


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ([1.5, np.nan, 2.5, 3.5], "y_train: 1 values are not finite numbers, the first at index (1,)"),
        ([1.5, 2.5, 3.5], "y_train"),
        (["a", "b", "c", "d"], "y_train is of type <U1. The task needs numbers as targets."),
        (np.zeros((4, 2, 2)), "y_train has shape (4, 2, 2)."),
        (np.zeros((4, 2)), "y_test has 1 values for each sample, but y_train has 2."),
    ],
)
def test_refuses_other_targets(targets, words):
    x = np.zeros((4, 2), np.float32)
    assert refusal((x, np.array(targets), x, np.array([1.5, 2.5, 3.5, 0.5])), spec()).startswith(words)


def test_refuses_edges_that_do_not_ascend():
    assert refusal(arrays(), spec({"edges": [3.0, 1.0]})).startswith(
        "task.edges = [3.0, 1.0]: must be in ascending order."
    )


def test_refuses_bins_of_equal_targets():
    x = np.ones((4, 2), np.float32)
    assert refusal((x, np.full(4, 1.5), x, np.full(4, 1.5)), spec({"bins": 2})).startswith(
        "y_train: all targets are equal"
    )


def test_refuses_many_whole_numbers_without_a_task():
    x, _, test, _ = diabetes()
    y, y_test = np.arange(342), np.arange(100)
    table = {key: value for key, value in spec().items() if key != "task"}
    assert refusal((x, y, test, y_test), table).startswith("task: is not set, and y_train has 342 different")
    assert prepare(fs.Experiment.from_table(spec()), data=(x, y, test, y_test)).data.outputs == 1


def test_classes_are_not_a_regression():
    x, _, *test = arrays()
    words = refusal((x, np.repeat(["ant", "bee"], 20), *test), spec())
    assert words.startswith("y_train is of type")


@pytest.mark.parametrize("metrics", [["rmse", "accuracy"], ["auroc"], ["macro-f1"]])
def test_refuses_metrics_of_classes(metrics):
    words = refusal(arrays(), spec(evaluation={"metrics": metrics}))
    assert words.startswith("evaluation.metrics")
    assert "is not a metric of the task 'regression'. Use rmse, mae, r2" in words


def test_classification_refuses_metrics_of_numbers():
    x, y, test, y_test = arrays()
    table = spec(evaluation={"metrics": ["rmse"]})
    del table["task"]
    words = refusal((x, (y[:, 0] > 50).astype(int), test, (y_test[:, 0] > 50).astype(int)), table)
    assert words.startswith("evaluation.metrics")


@pytest.mark.parametrize("method", ["fedrs", "moon", "rebafl", "fedlc", "bsm-fedavg"])
def test_refuses_methods_with_a_loss_of_their_own(method):
    words = refusal(arrays(), spec({"bins": 2}, method=method))
    assert words.startswith(f"method = '{method}': has its own loss for the tasks classification")


@pytest.mark.parametrize("table", [{"partition": {"name": "dirichlet", "clients": 2}}, {"method": "stratify"}])
def test_label_aware_settings_need_strata(table):
    words = refusal(arrays(), spec(**table))
    assert "needs classes, but the task 'regression' has no classes. Set task.bins, such as task.bins = 10" in words


# Laws.


@pytest.mark.parametrize("loss", ["mse", "mae", "huber"])
def test_one_client_equals_centralised_training(loss):
    """One client with all data and full-batch steps trains as PyTorch does with the same data."""
    x, y, *test = diabetes()
    table = spec(
        {"loss": loss},
        partition={"name": "iid", "clients": 1},
        training={"rounds": 5, "lr": 0.1, "batch_size": len(y), "local_epochs": 1},
    )
    prepared = prepare(fs.Experiment.from_table(table), data=(x, y, *test))
    model = prepared.config.model
    network = nn.Sequential(nn.Linear(10, 4), nn.ReLU(), nn.Linear(4, 1))
    for own, (_, start) in zip(network.parameters(), model.params().items(), strict=True):
        own.data.copy_(start)
    inputs = torch.from_numpy((x - x.mean(axis=0)) / x.std(axis=0)).float()
    wanted = torch.from_numpy((y - y.mean()) / y.std()).float()[:, None]
    measure = {"mse": nn.MSELoss(), "mae": nn.L1Loss(), "huber": nn.HuberLoss()}[loss]
    steps = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(5):
        steps.zero_grad()
        measure(network(inputs), wanted).backward()
        steps.step()
    history = fs.run(table, data=(x, y, *test))
    for trained, own in zip(history.params.values(), network.parameters(), strict=True):
        assert torch.allclose(trained.double(), own.detach().double(), atol=1e-6, rtol=0)


def found_rows(n=60, width=2, seed=0):
    """Rows of predictions that know something, and the arrays from which they were computed."""
    generator = np.random.default_rng(seed)
    targets = 50 + 10 * generator.normal(size=(n, width))
    outputs = torch.from_numpy((targets - 50) / 10 + 0.3 * generator.normal(size=(n, width)))
    task = Regression(mean=(50.0,) * width, deviation=(10.0,) * width)
    rows = task.rows(outputs, torch.from_numpy(targets))
    losses = task.losses(outputs, torch.from_numpy(targets))[0].numpy()
    return Rows({k: v.numpy() for k, v in rows.items()}, losses, np.ones(n)), targets, 50 + 10 * outputs.numpy()


def by_reference(truth, values):
    return {
        "rmse": reference.root_mean_squared_error(truth, values),
        "mae": reference.mean_absolute_error(truth, values),
        "r2": reference.r2_score(truth, values),
    }


@pytest.mark.parametrize("width", [1, 3])
def test_metrics_equal_scikit_learn(width):
    rows, truth, values = found_rows(width=width)
    metrics = [METRICS.parse(name) for name in METRIC_NAMES]
    expected = by_reference(truth, values)
    assert values_of(metrics, rows) == pytest.approx(expected, abs=1e-6)
    owners = np.arange(60) % 4
    halves = task_sums(rows[:20], Regression.tables) + task_sums(rows[20:], Regression.tables)
    for metric in metrics:
        assert metric.of_task_sums(halves) == pytest.approx(expected[metric.label], abs=1e-6)
        each = [by_reference(truth[owners == k], values[owners == k])[metric.label] for k in range(4)]
        assert metric.by_client_of_rows(rows, owners, 4) == pytest.approx(each, abs=1e-6)


def test_r2_of_equal_targets_is_undefined():
    task = Regression(mean=(1.0,), deviation=(1.0,))
    rows = task.rows(torch.tensor([[0.0], [1.0]]), torch.ones(2, 1, dtype=torch.float64))
    found = Rows({k: v.numpy() for k, v in rows.items()}, np.zeros(2), np.ones(2))
    assert values_of([METRICS.parse("r2")], found) == {"r2": None}


# First steps.


@pytest.mark.parametrize("loss", ["mse", "mae", "huber"])
def test_first_round_of_fedavg_equals_autograd(loss):
    """With one full-batch step per client, the new model is the mean of the clients' gradient steps."""
    x, y, *test = arrays(40)
    training = {"rounds": 1, "lr": 0.1, "batch_size": 40, "local_epochs": 1}
    table = spec({"loss": loss}, training=training, evaluation={"metrics": ["rmse"]})
    prepared = prepare(fs.Experiment.from_table(table), data=(x, y, *test))
    start = {name: tensor.clone().requires_grad_() for name, tensor in prepared.config.model.params().items()}
    measure = {"mse": nn.MSELoss(), "mae": nn.L1Loss(), "huber": nn.HuberLoss()}[loss]
    total = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    wanted = torch.from_numpy((y - y.mean()) / y.std()).float()
    for client in range(2):
        rows = prepared.assignment[client]
        weight, bias, last, shift = start.values()
        outputs = torch.relu(prepared.data.inputs(rows) @ weight.T + bias) @ last.T + shift
        gradients = torch.autograd.grad(measure(outputs, wanted[rows]), list(start.values()))
        for sums, gradient in zip(total.values(), gradients, strict=True):
            sums += len(rows) / 40 * gradient
    found = fs.run(table, data=(x, y, *test)).params
    for name, tensor in start.items():
        assert torch.allclose(found[name], (tensor - 0.1 * total[name]).detach(), atol=1e-6, rtol=0)
        assert float(total[name].abs().max()) > 1e-3


# Runs on the diabetes data.


def diabetes_spec(**tables):
    small = {
        "task": {"name": "regression", "bins": 10},
        "partition": {"name": "dirichlet", "clients": 5},
        "model": {"name": "mlp", "hidden": [16]},
        "training": {"rounds": 12, "lr": 0.05, "batch_size": 16},
    }
    return {**small, **tables}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        "fedavg",
        {"name": "fedsts", "strata": 2},
        "stratify",
        pytest.param({"name": "stratify", "mode": "single"}, marks=pytest.mark.long),
    ],
)
def test_runs_learn_and_predict_in_the_unit_of_the_target(method, tmp_path):
    data = diabetes()
    history = fs.run(diabetes_spec(method=method), data=data, out=tmp_path / "run")
    values = fs.load(tmp_path / "run").predict(data[2])
    assert values.shape == (100,)
    found = {name: history.final(f"test.{name}") for name in METRIC_NAMES}
    assert found == pytest.approx(by_reference(data[3], values), abs=1e-6)
    assert found["rmse"] < 0.9 * data[3].std()  # the error of the constant prediction is the deviation


@pytest.mark.long
@pytest.mark.slow
def test_the_best_round_has_the_lowest_error(tmp_path):
    history = fs.run(diabetes_spec(), data=diabetes(), out=tmp_path / "run")
    rounds, errors = history.points("test.rmse")
    assert history.summary["lower_is_better"] is True
    assert history.summary["best_rmse"] == min(errors)
    assert history.best_round == rounds[np.argmin(errors)]
    assert fs.History.load(tmp_path / "run").best_round == history.best_round


TARGETS = {"accuracy": [0.5], "rmse": [1000.0, 1.0]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("targets", "reached"),
    [({}, {}), ({"metrics": ["rmse"], "targets": TARGETS}, {"rmse": {"1000": 1, "1": None}})],
    ids=["by default", "of two metrics"],
)
def test_the_summary_has_no_targets_of_an_accuracy(targets, reached, tmp_path):
    table = diabetes_spec(evaluation=targets, training={"rounds": 1})
    history = fs.run(table, data=diabetes(), out=tmp_path / "run")
    assert history.summary["rounds_to_target"] == reached
    assert json.loads((tmp_path / "run/summary.json").read_text())["rounds_to_target"] == reached
    assert fs.History.load(tmp_path / "run").summary["rounds_to_target"] == reached


@pytest.mark.slow
def test_early_stopping_waits_for_lower_errors():
    table = diabetes_spec(callbacks=[{"name": "early-stopping", "patience": 3}], evaluation={"validation": 0.2})
    table["training"]["rounds"] = 60
    history = fs.run(table, data=diabetes())
    assert len(history) < 60
    rounds, errors = history.points("validation.rmse")
    assert rounds[-1] - rounds[np.argmin(errors)] == 3


@pytest.mark.slow
def test_every_part_of_an_evaluation():
    held = {"validation": 0.2, "client_test": 0.2, "test_clients": 0.25, "fine_tune": 1}
    history = fs.run(diabetes_spec(evaluation=held), data=diabetes())
    for part in ("test.rmse", "validation.rmse", "clients.rmse.mean"):
        assert 30 < history.final(part) < 120, part


@pytest.mark.slow
def test_two_workers_give_the_same_bytes(tmp_path, monkeypatch):
    # Sharing is forced: such small work would not pay.
    monkeypatch.setattr("fedstrata.engines.local.STARTING_PAYS", -1.0)
    monkeypatch.setattr("fedstrata.engines.local.ASKING_PAYS", -1.0)
    contents = []
    for workers in (1, 2):
        table = diabetes_spec()
        table["training"] |= {"rounds": 3, "workers": workers, "execution": "per-client"}
        fs.run(table, data=diabetes(), out=tmp_path / str(workers))
        contents.append((tmp_path / str(workers) / "model.safetensors").read_bytes())
    assert contents[0] == contents[1]


@pytest.mark.slow
def test_a_resumed_run_gives_the_same_bytes(tmp_path):
    """A run that stopped after round 3 continues to the same model as a run without a pause."""

    def stop(record):
        if record["round"] == 3:
            raise KeyboardInterrupt

    fs.run(diabetes_spec(), data=diabetes(), out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fs.run(diabetes_spec(), data=diabetes(), out=tmp_path / "parts", callbacks=[stop])
    fs.run(diabetes_spec(), data=diabetes(), out=tmp_path / "parts", resume=True)
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert models[0] == models[1]


# Tables.


def write_csv(path, rows=200):
    x, y = load_diabetes(return_X_y=True)
    lines = [",".join([*(f"f{i}" for i in range(10)), "progress"])]
    lines += [",".join([*(f"{value:.5f}" for value in a), str(b + 0.5)]) for a, b in zip(x, y, strict=True)][:rows]
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.slow
def test_a_table_whose_labels_have_fractions_is_a_regression(tmp_path, caplog):
    write_csv(tmp_path / "table.csv")
    schema = {"label": "progress", "test": 0.25}
    table = diabetes_spec(
        data={"name": str(tmp_path / "table.csv"), "schema": schema}, partition={"clients": 3, "name": "iid"}
    )
    del table["task"]
    history = fs.run(table, out=tmp_path / "run")
    assert history.primary == "rmse"
    assert [record.getMessage() for record in caplog.records if "regression" in record.getMessage()] == [
        "the task is set to regression, because the targets have fractions. To use another task, set 'task'."
    ]
    frame = pandas.read_csv(tmp_path / "table.csv")
    data = fs.from_dataframe(frame, label="progress", test=0.25)
    assert (data.task.name, data.outputs) == ("regression", 1)
    values = fs.load(tmp_path / "run").predict(frame.drop(columns="progress"))
    assert reference.root_mean_squared_error(frame["progress"], values) < frame["progress"].std()
    new = tmp_path / "new.csv"
    frame.drop(columns="progress").head(3).to_csv(new, index=False)
    assert main(["predict", str(tmp_path / "run"), str(new), "--out", str(tmp_path / "found.csv")]) in (0, None)
    found = pandas.read_csv(tmp_path / "found.csv")
    assert found.iloc[:, -1].tolist() == pytest.approx(values[:3].tolist(), rel=1e-6)


def test_labels_of_a_data_frame_are_numbers_if_the_task_says_so():
    """Whole numbers are classes otherwise, also if the schema describes them as numbers."""
    frame = {"x": [float(n) for n in range(12)], "days": [n % 4 for n in range(12)]}
    columns = {"x": {}, "days": {"range": [0, 3], "unit": "days"}}
    data = fs.from_dataframe(frame, label="days", task="regression", columns=columns)
    assert (data.task.name, data.y_train.dtype, data.shape) == ("regression", torch.float64, (1,))
    assert fs.from_dataframe(frame, label="days").task.name == "classification"
    with pytest.raises(
        SpecError, match=r"columns\.days: describes the label as a number, but the task has classes\. Set"
    ):
        fs.from_dataframe(frame, label="days", columns=columns)
    columns["days"]["range"] = [0, 2]
    with pytest.raises(DataError, match=r"row 3, column 'days' = 3: is out of range\. Use numbers from 0 to 2 days"):
        fs.from_dataframe(frame, label="days", task="regression", columns=columns)


def test_a_table_with_many_whole_numbers_needs_the_task():
    frame = {"x": [float(n) for n in range(300)], "days": list(range(300))}
    with pytest.raises(SpecError, match=r"task: is not set, and y_train has \d+ different integers"):
        fs.from_dataframe(frame, label="days")
