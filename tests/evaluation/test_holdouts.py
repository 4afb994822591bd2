from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.data.partitions.server_data import ServerData
from fedstrata.evaluation.holdouts import held_by_label

DIGITS = fs.Data().load()
LABELS = DIGITS.y_train.numpy()


def prepared(evaluation, partition=None, **more):
    partition = fs.Dirichlet(alpha=0.5, clients=12, min_size=10) if partition is None else partition
    return fs.prepare(fs.Experiment(partition=partition, evaluation=evaluation, **more))


def parts(found):
    """All sets of samples, each by its numbers."""
    held = found.held
    named = {"train": found.assignment.indices, "validation": held.validation}
    named["own"] = None if held.own_test is None else held.own_test.indices
    named["away"] = None if held.test_clients is None else held.test_clients.indices
    return {name: indices for name, indices in named.items() if indices is not None}


@pytest.mark.slow
@given(st.integers(0, 1000), st.integers(1, 12), st.floats(0.01, 0.99))
def test_a_cut_takes_so_many_of_each_client_and_its_share_of_each_label(seed, clients, share):
    generator = np.random.default_rng(seed)
    owners = np.sort(generator.integers(clients, size=150))
    labels = generator.integers(4, size=150)
    sizes = np.bincount(owners, minlength=clients)
    wanted = np.floor(share * sizes).astype(int)
    mask = held_by_label(owners, labels, wanted, seed, "test")
    assert np.bincount(owners[mask], minlength=clients).tolist() == wanted.tolist()
    for client in np.flatnonzero(sizes):
        mine = labels[owners == client]
        taken = np.bincount(labels[mask & (owners == client)], minlength=4)
        exact = np.bincount(mine, minlength=4) * wanted[client] / sizes[client]
        assert (np.abs(taken - exact) < 1).all()


@pytest.mark.slow
def test_every_sample_is_as_likely_to_be_held_out():
    """Mean over 2,000 seeds within 4 standard errors."""
    owners, labels = np.zeros(10, dtype=int), np.array([0] * 7 + [1] * 3)
    counts = sum(held_by_label(owners, labels, np.array([4]), seed, "test").astype(int) for seed in range(2000))
    assert (np.abs(counts / 2000 - 0.4) < 4 * np.sqrt(0.24 / 2000)).all()


def test_nothing_asked_for_nothing_held_out():
    found = prepared({})
    assert not found.held
    assert found.held.samples.tolist() == []


def test_nobody_trains_on_what_is_held_out_and_nothing_is_lost():
    found = prepared({"validation": 0.1, "client_test": 0.2, "test_clients": 0.25})
    named = parts(found)
    assert sorted(named) == ["away", "own", "train", "validation"]
    assert np.concatenate(list(named.values())).size == DIGITS.train_size
    assert np.unique(np.concatenate(list(named.values()))).tolist() == list(range(DIGITS.train_size))
    assert np.isin(found.held.samples, found.assignment.indices).sum() == 0
    assert found.config.clients == len(found.assignment) == 9
    assert found.config.sizes.tolist() == found.assignment.sizes.tolist()
    assert sorted(found.held.numbers.tolist()) == list(range(12))
    assert found.config.server_data.indices().tolist() == []


def test_validation_has_the_classes_in_proportion():
    found = prepared({"validation": 0.1})
    held, all_of_them = np.bincount(LABELS[found.held.validation]), np.bincount(LABELS)
    assert (np.abs(held - all_of_them / 10) < 1).all()
    assert held.sum() == round(0.1 * DIGITS.train_size)


def test_the_partition_is_of_what_validation_leaves():
    """As the scheme divides a data set that never had these samples."""
    found = prepared({"validation": 0.1}, fs.IID(clients=5))
    assert abs(found.assignment.sizes - len(found.assignment.indices) / 5).max() < 1
    left = np.setdiff1d(np.arange(DIGITS.train_size), found.held.validation)
    assert np.sort(found.assignment.indices).tolist() == left.tolist()


def test_each_clients_own_part():
    whole, found = prepared({}), prepared({"client_test": 0.2})
    own = found.held.own_test
    for client in range(12):
        before = whole.assignment[client]
        assert sorted([*found.assignment[client], *own[client]]) == sorted(before)
        assert len(own[client]) == max(1, round(0.2 * len(before)))
        mine, held = (np.bincount(LABELS[part], minlength=10) for part in (before, own[client]))
        assert (np.abs(held - mine * len(own[client]) / len(before)) < 1).all()


def test_a_client_with_two_samples_has_one_to_test_on():
    lists = [[0, 1], [2, 3, 4], list(range(5, 30))]
    found = prepared({"client_test": 0.01}, fs.Given(indices=lists))
    assert found.held.own_test.sizes.tolist() == [1, 1, 1]
    assert found.assignment.sizes.tolist() == [1, 2, 24]


def test_every_client_keeps_a_sample_to_train_on():
    """A share of 0.9 of 3 samples rounds to all of them. At least one stays for training, also of a single sample."""
    lists = [[0, 1, 2], [3], list(range(4, 24))]
    found = prepared({"validation": 0.9}, fs.Given(indices=lists))
    assert found.held.own_validation.sizes.tolist() == [2, 0, 18]
    assert found.assignment.sizes.tolist() == [1, 1, 2]


def test_the_start_of_the_systematic_sample_is_the_seeds():
    """With ten labels of one sample each there is nothing to shuffle, so only the random start decides."""
    owners, labels = np.zeros(10, dtype=int), np.arange(10)
    taken = {tuple(np.flatnonzero(held_by_label(owners, labels, np.array([1]), seed, "t"))) for seed in range(40)}
    assert len(taken) > 5


def test_where_clients_come_with_the_data_validation_is_a_part_of_each():
    lists = [list(range(0, 100)), list(range(100, 400))]
    found = prepared({"validation": 0.1, "client_test": 0.2}, fs.Given(indices=lists))
    assert found.held.own_test.sizes.tolist() == [20, 60]
    assert found.held.own_validation.sizes.tolist() == [8, 24]
    assert found.assignment.sizes.tolist() == [72, 216]
    for client, mine in enumerate(lists):
        assert set(found.assignment[client]) <= set(mine)
        assert set(found.held.own_validation[client]) <= set(mine)


def test_a_server_never_looks_at_what_is_held_out():
    partition = fs.Classes(per_client=4, size=40, clients=6)
    found = prepared({"validation": 0.1, "client_test": 0.2, "test_clients": 0.2}, partition)
    server = found.config.server_data.indices()
    assert len(server) > 0
    assert np.isin(server, np.concatenate(list(parts(found).values()))).sum() == 0
    plain = prepared({}, partition)
    assert plain.config.server_data.indices().tolist() == ServerData(plain.data, plain.assignment).indices().tolist()


@pytest.mark.slow
def test_clients_that_never_train_are_a_random_choice():
    numbers = [prepared({"test_clients": 0.5}, seed=seed).held.numbers[6:].tolist() for seed in range(5)]
    assert all(len(away) == 6 for away in numbers)
    assert len({tuple(away) for away in numbers}) > 1


def test_the_same_seed_holds_out_the_same():
    settings = {"validation": 0.1, "client_test": 0.2, "test_clients": 0.25}
    first, second, third = prepared(settings), prepared(settings), prepared(settings, seed=1)
    assert first.held.samples.tolist() == second.held.samples.tolist() != third.held.samples.tolist()


@pytest.mark.parametrize(
    ("evaluation", "partition", "problem"),
    [
        (
            {"validation": 0.001},
            None,
            r"evaluation.validation = 0.001: none of the \d+ training samples of class .\w+. would",
        ),
        (
            {"validation": 0.999},
            None,
            r"evaluation.validation = 0.999: none of the .* would remain for training. Use a smaller fraction",
        ),
        (
            {"client_test": 0.2},
            fs.Given(indices=[[0, 1], [2]]),
            "evaluation.client_test = 0.2: client 1 has one sample, but needs at least two, because one",
        ),
        (
            {"client_test": 0.2},
            fs.Given(indices=[[0, 1], []], min_size=0),
            "evaluation.client_test = 0.2: client 1 has no sample",
        ),
        (
            {"test_clients": 0.9},
            fs.IID(clients=2),
            r"evaluation.test_clients = 0.9: none of the 2 clients would be left for training\. Use a smaller",
        ),
        (
            {"validation": 0.1},
            fs.Given(indices=[[0, 1], [2, 3]]),
            "evaluation.validation = 0.1: no client has enough samples to hold out",
        ),
    ],
)
def test_what_cannot_be_held_out(evaluation, partition, problem):
    with pytest.raises(SpecError, match=problem):
        prepared(evaluation, partition)
