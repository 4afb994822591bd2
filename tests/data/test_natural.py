"""Clients as the data have them, and partitions of one client."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.base.errors import DataError, SpecError
from fedstrata.data.partitions.picture import draw_partition, render_table
from fedstrata.data.partitions.server_data import ServerData
from fedstrata.data.sources import Data
from fedstrata.runs.identity import fingerprint_of_data

OWNERS = ["zoe", "ann", "ann", "bob", "zoe", "ann", "ann", "zoe", "eve"]


def data(owners=OWNERS, **more):
    n = len(owners)
    x = np.arange(float(n))[:, None]
    return fs.from_arrays(x, np.arange(n) % 2, x[:2], [0, 1], clients=owners, **more)


def test_a_client_an_id_in_their_order():
    dataset = data()
    assert dataset.client_names == ("ann", "bob", "eve", "zoe")
    assert repr(dataset).endswith("classes=2, clients=4)")
    assignment = fs.Natural().split(dataset, 0)
    assert [part.tolist() for part in assignment] == [[1, 2, 5, 6], [3], [8], [0, 4, 7]]
    assert assignment.names(dataset) == ["ann", "bob", "eve", "zoe"]


def test_small_clients_are_left_out_and_that_is_said():
    with pytest.warns(
        UserWarning, match=r"2 of 4 clients have fewer than partition.min_size = 2 samples\. The run leaves out"
    ):
        assignment = fs.Natural(min_size=2).split(data(), 0)
    assert assignment.names(data()) == ["ann", "zoe"]
    assert [part.tolist() for part in assignment] == [[1, 2, 5, 6], [0, 4, 7]]


def test_nobody_looks_at_samples_of_clients_that_are_left_out():
    with warnings.catch_warnings(action="ignore"):
        assignment = fs.Natural(min_size=2).split(data(), 0)
    assert len(ServerData(data(), assignment).indices()) == 0
    plain = fs.Assignment(assignment.indices, assignment.offsets)
    assert ServerData(data(), plain).indices().tolist() == [3, 8]


@pytest.mark.slow
def test_some_of_them_at_random():
    dataset = data([f"c{number:02}" for number in range(20)] * 2)
    chosen = [tuple(fs.Natural(clients=5).split(dataset, seed).names(dataset)) for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert list(chosen[0]) == sorted(set(chosen[0]))
    often = [fs.Natural(clients=5).split(dataset, seed).codes for seed in range(400)]
    share = np.bincount(np.concatenate(often), minlength=20) / 400
    assert share == pytest.approx(np.full(20, 0.25), abs=5 * np.sqrt(0.25 * 0.75 / 400))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"clients": 5},
            "partition.clients = 5: only 4 of 4 clients have at least 1 training samples, and the largest client has 4",
        ),
        ({"clients": 3, "min_size": 2}, "partition.clients = 3: only 2 of 4 clients have at least 2 training samples"),
        (
            {"min_size": 5},
            "partition.min_size = 5: only 0 of 4 clients have at least 5 training samples, and the largest client",
        ),
    ],
)
def test_more_than_there_are(settings, message):
    with pytest.raises(SpecError, match=message):
        fs.Natural(**settings).split(data(), 0)


def test_data_that_do_not_say_whose_they_are():
    digits = Data("digits").load()
    with pytest.raises(
        SpecError, match=r"partition.name = 'natural': digits does not identify the client of each sample. Give"
    ):
        fs.Natural().split(digits, 0)


def test_ids_of_test_samples_may_be_of_clients_that_never_train():
    dataset = data(clients_test=["ann", "new"])
    assert dataset.client_names == ("ann", "bob", "eve", "new", "zoe")
    assert dataset.client_test.tolist() == [0, 3]
    assert fs.Natural().split(dataset, 0).names(dataset) == ["ann", "bob", "eve", "zoe"]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ({"clients": ["a"] * 8}, "client_train has 8 values for 9 samples in x_train. Give one value per sample"),
        ({"clients": np.linspace(0, 1, 9)}, "client_train contains fractions"),
        (
            {"clients": None, "clients_test": ["a", "b"]},
            r"client_test is set, but client_train is not\. Give both, or only client_train\.",
        ),
        (
            {"clients": OWNERS, "clients_test": [1, 2]},
            r"client_train has the type <U3, but client_test has the type int64\. Use the same",
        ),
        ({"clients": OWNERS, "clients_test": ["a"]}, "client_test has 1 values for 2 samples in x_test"),
    ],
)
def test_ids_that_do_not_fit(ids, message):
    x = np.arange(9.0)[:, None]
    with pytest.raises(DataError, match=message):
        fs.from_arrays(x, np.arange(9) % 2, x[:2], [0, 1], **ids)


@pytest.mark.parametrize("key", ["client", "client_train"])
def test_ids_in_an_npz_file(tmp_path, key):
    x = np.arange(9.0)[:, None]
    arrays = {
        "x_train": x,
        "y_train": np.arange(9) % 2,
        "x_test": x[:2],
        "y_test": [0, 1],
        "client_test": ["eve", "eve"],
    }
    np.savez(tmp_path / "a.npz", **arrays, **{key: OWNERS})
    dataset = Data(str(tmp_path / "a.npz")).load()
    assert fs.Natural().split(dataset, 0).sizes.tolist() == [4, 1, 1, 3]
    assert dataset.client_test.tolist() == [2, 2]


def test_ids_decide_what_a_run_is_and_only_where_there_are_any():
    found = [
        fingerprint_of_data(data(ids)) for ids in (OWNERS, OWNERS, OWNERS[::-1], [name.upper() for name in OWNERS])
    ]
    assert len(set(found)) == 3
    assert found[0] == found[1]
    without = fs.from_arrays([[0.0], [2.0]], [0, 1], [[4.0]], [0])
    assert fingerprint_of_data(without) == "77671aa7469f35bf85ecc21c726643ac1cb7ac109ff4fb82ebeb525757cc40fe"


@pytest.mark.slow
def test_a_run_on_them_and_their_names_in_the_pictures(tmp_path):
    dataset = data()
    assignment = fs.Natural().split(dataset, 0)
    draw_partition(assignment, dataset, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
    table = render_table(assignment, dataset)
    assert [row[0] for row in table.rows[:4]] == ["ann", "bob", "eve", "zoe"]
    history = fs.run(
        fs.Experiment(partition=fs.Natural(), training={"rounds": 1, "clients_per_round": 4}), data=dataset
    )
    assert history[0]["clients_returned"] == 4


def test_one_client_holds_what_all_hold_or_one_of_them():
    dataset = data()
    whole = fs.SingleClient(of=fs.Natural()).split(dataset, 0)
    assert [part.tolist() for part in whole] == [list(range(9))]
    alone = fs.SingleClient(of="natural", only=3).split(dataset, 0)
    assert [part.tolist() for part in alone] == [[0, 4, 7]]
    assert alone.names(dataset) == ["zoe"]
    fixed = fs.Given(indices=[[1, 2], [5]])
    assert fs.SingleClient(of=fixed).split(dataset, 0)[0].tolist() == [1, 2, 5]
    assert fs.SingleClient(of=fixed, only=1).split(dataset, 0)[0].tolist() == [5]
    drawn = fs.Dirichlet(clients=3, alpha=1.0)
    for seed in (0, 1):
        assert (
            fs.SingleClient(of=drawn, only=2).split(dataset, seed)[0].tolist() == drawn.split(dataset, seed)[2].tolist()
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"of": "natural", "only": 4},
            r"partition.only = 4: the partition in partition\.of does not contain this client\. Use a number from 0",
        ),
        (
            {"of": {"name": "iid", "clients": 10}},
            "partition.of.clients = 10: arrays has only 9 training samples. Use at most 9",
        ),
    ],
)
def test_a_client_that_is_not_there(settings, message):
    with pytest.raises(SpecError, match=message):
        fs.SingleClient(**settings).split(data(), 0)


def test_what_a_single_clients_samples_are_of():
    with pytest.raises(SpecError, match="of: is required, but not set"):
        fs.SingleClient()
    assert (
        fs.Experiment.from_table({"partition": fs.SingleClient(of=fs.Natural(), only=1).to_spec()}).partition.only == 1
    )


@pytest.mark.slow
def test_every_client_is_measured_on_its_own_test_samples():
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(90, 4)), draw.integers(0, 2, 90)
    owners, owners_test = draw.choice(["a", "b", "c"], 60), np.array(["a"] * 7 + ["c"] * 12 + ["new"] * 11)
    dataset = fs.from_arrays(x[:60], y[:60], x[60:], y[60:], clients=owners, clients_test=owners_test)
    spec = fs.Experiment(partition=fs.Natural(), training=fs.Training(rounds=1), model="tabular")
    with fs.Simulation(fs.prepare(spec, data=dataset)) as simulation:
        record = simulation.step()
        weights, model = simulation.evaluated(), simulation.prepared.config.model
        with torch.no_grad(), model.loaded(weights.params, weights.buffers) as params:
            right = (model(params, dataset.inputs(slice(None), "test")).argmax(1) == dataset.y_test).double().numpy()
    by_hand = [right[owners_test == name].mean() for name in "ac"]  # b has no test sample, and "new" no model
    found = record["clients"]["accuracy"]
    assert found["clients"] == 2
    assert found["mean"] == pytest.approx(np.mean(by_hand))
    assert found["worst"] == pytest.approx(min(by_hand))
    assert found["weighted_mean"] == pytest.approx(right[owners_test != "new"].mean())
    assert record["accuracy"] == pytest.approx(right.mean())
    alone = fs.prepare(spec.model_copy(update={"partition": fs.SingleClient(of="natural", only=2)}), data=dataset)
    assert alone.held.own_test[0].tolist() == np.flatnonzero(owners_test == "c").tolist()
