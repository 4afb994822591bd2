"""The methods that change the local softmax, FedBABU and FedAvg-FT: what they show and what they leave alone."""

from __future__ import annotations

import pickle
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata import checkpoint
from fedstrata.aggregation.base import AGGREGATORS
from fedstrata.errors import SpecError
from fedstrata.methods.fedavg_ft import FedAvgFT
from fedstrata.methods.head_tuning import HeadTuning
from fedstrata.preparation import assemble, prepare
from fedstrata.rng import rng
from fedstrata.spec import variants

ONE_CLASS = {
    "data": {"name": "digits", "limit": 300},
    "partition": {"name": "classes", "clients": 10, "per_client": 1},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"rounds": 2, "clients_per_round": 10, "local_epochs": 1},
}
COMPOSITION = Path(__file__).parents[2] / "examples" / "specs" / "rebafl.toml"


@pytest.mark.parametrize("method", ["bsm-fedavg", "fedlc", {"name": "rebafl", "epsilon": 0, "mu": 0}])
def test_clients_of_one_class_are_seen_to_learn_nothing(method, start):
    started = start(fs.Experiment.from_table({**ONE_CLASS, "method": method}))
    before = started.state.weights.params
    for _ in range(2):
        assert started.step()["idle_clients"] == 10
    assert all(torch.equal(w, before[name]) for name, w in started.state.weights.params.items())


@pytest.mark.parametrize("method", ["bsm-fedavg", "fedlc", {"name": "rebafl", "epsilon": 0}])
def test_clients_of_two_classes_learn(method):
    history = fs.run({**ONE_CLASS, "partition": {"name": "classes", "clients": 10, "per_client": 2}, "method": method})
    assert [record["idle_clients"] for record in history] == [0, 0]


@pytest.mark.parametrize("method", ["rebafl", "fedrs", {"name": "fedlc", "missing": "one"}])
def test_the_others_learn_from_one_class_too(method, start):
    started = start(fs.Experiment.from_table({**ONE_CLASS, "method": method}))
    before = started.state.weights.params
    started.step()
    assert not torch.equal(started.state.weights.params["head.weight"], before["head.weight"])


SERVER = {"name": "size", "server": {"optimizer": "adam", "lr": 0.1, "weight_decay": 0.1}}


@pytest.mark.parametrize("aggregator", ["size", SERVER])
def test_the_head_of_fedbabu_never_moves(aggregator, start):
    method = {"name": "fedbabu", "aggregator": aggregator}
    training = {**ONE_CLASS["training"], "weight_decay": 0.01, "momentum": 0.5}
    started = start(fs.Experiment.from_table({**ONE_CLASS, "method": method, "training": training}))
    before = started.state.weights.params
    for _ in range(2):
        started.step()
    after = started.state.weights.params
    for name in after:
        in_head = name in started.config.model.head_names
        assert (after[name].numpy().tobytes() == before[name].numpy().tobytes()) == in_head


# FedAvg-FT.

LEFT_OVER = {
    **ONE_CLASS,
    "partition": {"name": "classes", "clients": 10, "per_client": 2, "size": 10},
    "method": {"name": "fedavg-ft", "per_class": 5, "steps": 3, "lr": 0.2, "momentum": 0.5, "weight_decay": 0.01},
}


def test_the_servers_samples_are_balanced_and_nobody_elses():
    prepared = prepare(fs.Experiment.from_table(LEFT_OVER))
    server_data, held = prepared.config.server_data, set(prepared.assignment.indices.tolist())
    assert not held & set(server_data.indices().tolist())
    assert len(held) + len(server_data.indices()) == prepared.data.train_size
    x, y = server_data.balanced(5, np.random.default_rng(0))
    assert torch.bincount(y).tolist() == [5] * 10
    mine = {tuple(row) for row in prepared.data.inputs(server_data.indices()).flatten(1).tolist()}
    assert all(tuple(row) in mine for row in x.flatten(1).tolist())


def test_the_servers_samples_do_not_travel():
    config = prepare(fs.Experiment.from_table(LEFT_OVER)).config
    assert pickle.loads(pickle.dumps(config.server_data)) is None


def test_the_head_is_trained_at_the_server_and_the_body_is_not(start):
    started = start(fs.Experiment.from_table(LEFT_OVER))
    weights, method = started.state.weights, started.method
    after, loss = method.tuned(started.config, weights)
    x, y = started.config.server_data.balanced(5, rng(started.config.seed, "server-samples"))
    model = started.config.model.clone().module
    head = model.get_submodule("head")
    optimizer = torch.optim.SGD(head.parameters(), lr=0.2, momentum=0.5, weight_decay=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        last = nn.functional.cross_entropy(model(x), y)
        last.backward()
        optimizer.step()
    assert loss == pytest.approx(last.item(), rel=1e-5)
    for name, w in model.named_parameters():
        torch.testing.assert_close(after.params[name], w.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(after.params[name], weights.params[name]) == (not name.startswith("head"))
    assert started.step()["server_loss"] > 0


def test_the_reference_is_better_than_fedavg_where_labels_are_skewed():
    plain, tuned = fs.run({**LEFT_OVER, "method": "fedavg"}), fs.run({**LEFT_OVER, "method": FedAvgFT(per_class=5)})
    assert tuned.best_accuracy > plain.best_accuracy + 0.1
    assert not any(tensor.requires_grad for tensor in tuned.params.values())


def test_without_samples_left_over_it_is_refused():
    with pytest.raises(SpecError, match="the partition leaves the server 0 samples of some class that no client holds"):
        fs.run({**LEFT_OVER, "partition": {"name": "classes", "clients": 10}})
    with pytest.raises(SpecError, match=r"^method\.per_class = 100: .* samples of some class"):
        fs.run({**LEFT_OVER, "method": {"name": "fedavg-ft", "per_class": 100}})


def test_a_round_in_which_nobody_returns_leaves_the_head_alone(start, trace):
    table = {**LEFT_OVER, "availability": trace({0: [2]})}
    started = start(fs.Experiment.from_table(table))
    before = started.state.weights.params
    metrics = started.step()
    assert "server_loss" not in metrics
    assert all(torch.equal(w, before[name]) for name, w in started.state.weights.params.items())
    assert "server_loss" in started.step()


# Compositions.


@pytest.mark.parametrize("optimizer", [{"optimizer": "sgd", "momentum": 0.9}, "adam", "adagrad", "yogi"])
@pytest.mark.parametrize(
    "method",
    ["fedprox", "scaffold", "feddyn", "moon", "fedrs", "fedlc", "bsm-fedavg", "fedbabu", "rebafl", "fedavg-ft"],
)
def test_every_method_takes_a_server_optimiser(method, optimizer):
    own = fs.Experiment.from_table({"method": method}).method.choices()[3]
    server = {"optimizer": optimizer} if isinstance(optimizer, str) else optimizer
    aggregator = {"name": own.name, "server": {"lr": 0.01, **server}}
    assert own.name in AGGREGATORS
    more = {"per_class": 5} if method == "fedavg-ft" else {}
    history = fs.run({**LEFT_OVER, "method": {"name": method, "aggregator": aggregator, **more}})
    assert all(torch.isfinite(w).all() for w in history.params.values())
    assert all(record["clients_returned"] == 10 for record in history)


def test_the_composition_that_no_paper_has():
    """FedSTS chooses the clients, ReBaFL is what they minimise: from the file alone."""
    experiments = variants(tomllib.loads(COMPOSITION.read_text()))
    spec = experiments["fedsts-rebafl"]
    assert [choice.name for choice in spec.method.choices()] == ["fedsts", "all", "rebafl", "stratum"]
    history = fs.run({**spec.to_spec(), "training": {**spec.to_spec()["training"], "rounds": 2, "local_epochs": 1}})
    assert len(history) == 2
    assert history[-1]["clients_returned"] > 0
    assert 0 < history[-1]["train_loss"] < 3


def test_the_clustered_setting_of_the_paper():
    """Section 5.3: five groups of four clients with N = 2, 2, 3, 3, 5 classes and p = .5, .5, .3, .3, .2."""
    N, p = (2, 2, 3, 3, 5), (0.5, 0.5, 0.3, 0.3, 0.2)
    spec = fs.Experiment.from_table(
        {
            "partition": {"name": "groups", "size": 40},
            "availability": {"name": "groups", "groups": [{"clients": 4, "p": q} for q in p]},
            "method": "rebafl",
            "training": {"rounds": 1, "clients_per_round": 20},
        }
    )
    prepared = prepare(spec)
    held = (prepared.assignment.counts(prepared.data.y_train.numpy(), 10) > 0).sum(axis=1)
    assert held.tolist() == np.repeat(N, 4).tolist()
    assert prepared.assignment.sizes.tolist() == [40] * 20
    there = np.mean([spec.availability.online(np.arange(20), t, 0) for t in range(1, 2001)], axis=0)
    assert np.abs(there - np.repeat(p, 4)).max() < 4 * np.sqrt(0.25 / 2000)
    assert len(fs.run(spec)) == 1


def test_moon_keeps_the_model_that_it_trained(start, seven):
    spec = fs.Experiment(
        partition={"name": "given", "indices": ((0, 1, 2, 3), (4, 5, 6))},
        availability={"name": "always"},
        method="moon",
        training={"clients_per_round": 1, "local_epochs": 2, "lr": 0.2},
    )
    started = start(spec, seven)
    before = started.config.model.params()
    started.step()
    (client,) = started.store
    kept = started.store.get(client)["objective"]
    # One client alone: what it trained is the new global model.
    for name, w in started.state.weights.params.items():
        torch.testing.assert_close(kept[name], w)
        assert not torch.equal(kept[name], before[name])


def test_the_servers_features_are_those_that_are_evaluated():
    normalised = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10))
    table = {**LEFT_OVER, "training": {**LEFT_OVER["training"], "batch_norm": "local"}}
    with pytest.raises(SpecError, match=r"^training\.batch_norm = 'local': .*use average"):
        fs.run(table, model=normalised)


def test_without_samples_known_to_the_server_the_partition_is_not_to_blame():
    spec = fs.Experiment.from_table(LEFT_OVER)
    data = spec.data.load(0)
    with pytest.raises(SpecError, match=r"method\.per_class = 5: .*where sites hold their own data"):
        assemble(spec, data, spec.partition.split(data, 0), sizes_known=False)


def test_fedbabus_head_is_tuned_for_evaluation_alone(tmp_path):
    """The runs' bodies are the same, and the plain one's model with its head tuned is what the other one leaves."""
    tuning = {"per_class": 5, "steps": 20}
    plain = fs.run({**LEFT_OVER, "method": "fedbabu"}, out=tmp_path / "plain")
    table = {**LEFT_OVER, "method": {"name": "fedbabu", "fine_tune": tuning}}
    tuned = fs.run(table, out=tmp_path / "tuned")
    config = prepare(fs.Experiment.from_table(table)).config
    kept = [checkpoint.load(tmp_path / name / "checkpoint").state.weights for name in ("plain", "tuned")]
    assert all(torch.equal(w, kept[1].params[name]) for name, w in kept[0].params.items())
    expected, _ = HeadTuning(**tuning).tuned(config, kept[0])
    for name, w in expected.params.items():
        assert torch.equal(tuned.params[name], w)
        assert torch.equal(plain.params[name], w) == (name not in config.model.head_names)
    assert tuned.best_accuracy > plain.best_accuracy


def test_fedbabu_needs_a_body_and_samples_to_tune_with():
    with pytest.raises(SpecError, match=r"^model = .*nothing but a head"):
        fs.run({**LEFT_OVER, "method": "fedbabu", "model": {"name": "mlp", "hidden": []}})
    with pytest.raises(SpecError, match=r"^method\.fine_tune\.per_class = 100: .* samples of some class"):
        fs.run({**LEFT_OVER, "method": {"name": "fedbabu", "fine_tune": {"per_class": 100}}})
