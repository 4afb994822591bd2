from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn import metrics as reference

import fedstrata as fs
from fedstrata.evaluation.evaluator import Evaluator, over_clients
from fedstrata.evaluation.messages import Evaluated
from fedstrata.evaluation.predictions import Predictions
from fedstrata.evaluation.sums import sums_of

ALL = ["accuracy", "balanced-accuracy", "macro-f1", "auroc", "log-loss", "ece"]
TABLE = {
    "partition": {"name": "dirichlet", "alpha": 0.5, "clients": 8, "min_size": 20},
    "model": {"name": "mlp", "hidden": [16]},
    "training": {"rounds": 4, "local_epochs": 1, "clients_per_round": 2, "lr": 0.05},
    "evaluation": {"metrics": ALL, "client_test": 0.2, "test_clients": 0.25, "validation": 0.1, "unheard": 2},
}


def spec(**more):
    evaluation = {**TABLE["evaluation"], **more.pop("evaluation", {})}
    return fs.Experiment.from_table({**TABLE, "evaluation": evaluation, **more})


def logits_of(simulation, indices, split="train"):
    """What the global model says, by PyTorch alone."""
    data, weights = simulation.prepared.data, simulation.evaluated()
    module = simulation.prepared.config.model.module
    with torch.no_grad():
        return torch.func.functional_call(module, weights.params, (data.inputs(indices, split),))


def by_hand(logits, labels):
    predicted, shares = logits.argmax(1).numpy(), logits.double().softmax(1).numpy()
    both = [c for c in range(10) if 0 < (labels == c).sum() < len(labels)]
    return {
        "accuracy": reference.accuracy_score(labels, predicted),
        "macro-f1": reference.f1_score(labels, predicted, average="macro"),
        "log-loss": float(F.cross_entropy(logits.double(), torch.from_numpy(labels))),
        "auroc": np.mean([reference.roc_auc_score(labels == c, shares[:, c]) for c in both]),
    }


@pytest.fixture(scope="module")
def run():
    with fs.Simulation(fs.prepare(spec())) as simulation:
        records, heard = [], []
        for record in simulation:
            records.append(record)
            heard.append(set(simulation.federation.log.returned))
        yield simulation, records, heard


@pytest.mark.slow
def test_each_client_as_if_evaluated_alone(run):
    simulation, records, _ = run
    prepared, record = simulation.prepared, records[-1]
    own, labels = prepared.held.own_test, prepared.data.y_train.numpy()
    alone = [by_hand(logits_of(simulation, own[k]), labels[own[k]]) for k in range(len(own))]
    table = simulation.score.table
    for label in ("accuracy", "macro-f1", "log-loss", "auroc"):
        values = np.array([each[label] for each in alone])
        assert table[label] == pytest.approx(values, abs=1e-5)
        found = record["clients"][label]
        assert found["clients"] == 6
        assert found["mean"] == pytest.approx(values.mean(), abs=1e-6)
        assert found["weighted_mean"] == pytest.approx(np.average(values, weights=own.sizes), abs=1e-6)
        assert found["sd"] == pytest.approx(values.std(), abs=1e-6)
        worst = values.max() if label == "log-loss" else values.min()
        assert found["worst"] == found["worst_10"] == pytest.approx(worst, abs=1e-6)


@pytest.mark.slow
def test_the_test_set_validation_and_clients_that_never_train(run):
    simulation, records, _ = run
    prepared, record = simulation.prepared, records[-1]
    labels = prepared.data.y_train.numpy()
    test = by_hand(logits_of(simulation, slice(None), "test"), prepared.data.y_test.numpy())
    held = prepared.held.validation
    validation = by_hand(logits_of(simulation, held), labels[held])
    for label in ("accuracy", "macro-f1", "log-loss", "auroc"):
        assert record["test"][label] == pytest.approx(test[label], abs=1e-5)
        assert record["validation"][label] == pytest.approx(validation[label], abs=1e-5)
    assert record["test"]["accuracy"] == record["accuracy"]
    assert record["validation"]["loss"] == pytest.approx(validation["log-loss"], abs=1e-5)
    away = prepared.held.test_clients
    values = [by_hand(logits_of(simulation, away[k]), labels[away[k]])["accuracy"] for k in range(2)]
    assert record["test_clients"]["accuracy"]["mean"] == pytest.approx(np.mean(values), abs=1e-6)
    assert record["test_clients"]["accuracy"]["clients"] == 2


@pytest.mark.slow
def test_the_unheard_are_those_without_a_reply_in_the_last_evaluations(run):
    simulation, records, heard = run
    # Evaluated every round: with k = 2, after round t, those who were not heard of in the rounds since t − 2.
    for round, record in enumerate(records, start=1):
        silent = set(range(6)).difference(*heard[max(0, round - 2) : round])
        unheard = record["clients"]["unheard"]
        assert unheard["clients"] == len(silent)
        if silent:
            assert unheard["accuracy"]["clients"] == len(silent)
    last = np.array(sorted(silent))
    assert unheard["accuracy"]["mean"] == pytest.approx(np.mean(np.array(simulation.score.table["accuracy"])[last]))


def test_confusion_matrices_are_of_the_last_and_the_best_evaluation(run):
    simulation, records, _ = run
    found = simulation.loop_state.confusions()
    assert found["last"].round == 4
    assert found["last"].counts.sum() == len(simulation.prepared.data.y_test)
    predicted = logits_of(simulation, slice(None), "test").argmax(1)
    expected = reference.confusion_matrix(simulation.prepared.data.y_test, predicted)
    assert found["last"].counts.tolist() == expected.tolist()
    best = max(records, key=lambda record: record["validation"]["accuracy"])
    assert found["best"].round == best["round"]


def test_nothing_new_is_recorded_where_nothing_new_is_asked_for():
    plain = {key: value for key, value in TABLE.items() if key != "evaluation"}
    (record, *_) = fs.run(fs.Experiment.from_table({**plain, "evaluation": {"per_class": True}}))
    new = {"test", "validation", "clients", "personal", "test_clients", "by_class", "bytes_evaluation"}
    assert not new & record.keys()
    assert len(record["per_class"]) == 10


@pytest.mark.slow
def test_what_is_held_out_does_not_change_with_what_is_measured():
    """The same training, whatever is looked at."""
    alone = fs.run(spec(evaluation={"metrics": ["accuracy"], "per_class": True}))
    more = fs.run(spec(evaluation={"fine_tune": 1}))
    assert [record["accuracy"] for record in alone] == [record["accuracy"] for record in more]
    assert [record["bytes_up"] for record in alone] == [record["bytes_up"] for record in more]
    assert all(torch.equal(w, more.params[name]) for name, w in alone.params.items())


@pytest.mark.slow
def test_the_table_of_clients_and_the_matrices_are_files(tmp_path):
    history = fs.run(spec(evaluation={"fine_tune": 1}), out=tmp_path / "run")
    assert [row["client"] for row in history.clients] == list(range(6))
    assert {"in_partition", "train_samples", "samples", "heard", "accuracy", "personal_accuracy"} <= history.clients[
        0
    ].keys()
    values = [row["accuracy"] for row in history.clients]
    assert history[-1]["clients"]["accuracy"]["mean"] == pytest.approx(np.mean(values))
    loaded = fs.History.load(tmp_path / "run")
    assert loaded.clients == history.clients
    for key in ("last", "best"):
        assert loaded.confusion[key].round == history.confusion[key].round
        assert loaded.confusion[key].counts.tolist() == history.confusion[key].counts.tolist()
    again = fs.run(spec(evaluation={"fine_tune": 1}), out=tmp_path / "run", resume=True)
    assert again.clients == history.clients


def test_the_worst_tenth_of_eleven_clients_are_two():
    values = np.arange(11)[::-1, None] / 10
    (found,) = over_clients(values, np.ones(11, dtype=int), np.array([True]))
    assert found["worst_10"] == pytest.approx(0.05)


def test_of_clients_of_which_one_withholds_its_values_only_the_sum_is_known(run):
    simulation, _, _ = run
    held = simulation.prepared.held
    place = simulation.prepared
    evaluator = Evaluator(simulation.spec.evaluation, place.config.model, place.data, held, 3, remote=True)
    part = sums_of(Predictions.of(np.array([0, 1]), np.eye(2)))
    told, withheld = Evaluated(part, {"accuracy": 1.0}), Evaluated(part, None)
    question = evaluator._question(simulation.evaluated(), 1, "test")
    total, values, sizes = evaluator._asked(question, lambda _: {0: told, 2: withheld})
    assert (total.samples, values, sizes.tolist()) == (4, None, [2, 0, 2])
    total, values, sizes = evaluator._asked(question, lambda _: {0: told, 2: told})
    assert values[:, 0].tolist() == [1.0, pytest.approx(np.nan, nan_ok=True), 1.0]


def test_over_clients_by_hand():
    values, sizes = np.array([0.1, 0.9, 0.5, np.nan]), np.array([1, 2, 1, 7])
    nobody = np.full(4, np.nan)
    up, down, none = over_clients(np.stack([values, values, nobody], axis=1), sizes, np.array([True, False, True]))
    assert up == {
        "clients": 3,
        "mean": pytest.approx(0.5),
        "weighted_mean": pytest.approx(0.6),
        "sd": pytest.approx(np.sqrt(0.32 / 3)),
        "worst": 0.1,
        "worst_10": 0.1,
    }
    assert down == {**up, "worst": 0.9, "worst_10": 0.9}
    assert none == {"clients": 0, **dict.fromkeys(("mean", "weighted_mean", "sd", "worst", "worst_10"))}
    (twenty,) = over_clients(np.arange(20)[:, None] / 20, np.ones(20, dtype=int), np.array([True]))
    assert twenty["worst_10"] == pytest.approx(0.025)
    assert over_clients(np.zeros((0, 1)), np.zeros(0, dtype=int), np.array([True]))[0]["clients"] == 0
