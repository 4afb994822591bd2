"""Availability by the labels or the number of a client's samples."""

from __future__ import annotations

import math

import numpy as np
import pytest

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.base.rng import rng
from fedstrata.data.partitions.base import Assignment
from fedstrata.federation.availability import Population


def population(*labels: list[int], classes: int = 2, seed: int = 0) -> Population:
    """Clients with these labels of their samples."""
    y = np.array([label for client in labels for label in client], dtype=np.int64)
    ends = np.cumsum([len(client) for client in labels])
    parts = [np.arange(end - len(client), end) for client, end in zip(labels, ends, strict=True)]
    return Population(len(labels), classes, Assignment.from_lists(parts), y, seed)


def checked(model, people):
    model.check(people)
    return model


def probabilities(model, people):
    return checked(model, people)._p


def test_labels_by_hand(monkeypatch):
    class Weights:
        def dirichlet(self, concentrations):
            assert concentrations.tolist() == [0.1, 0.1]
            return np.array([0.9, 0.1])

    monkeypatch.setattr("fedstrata.federation.availability_correlated.rng", lambda seed, purpose: Weights())
    people = population([0, 0], [0, 1], [1, 1, 1], [])
    # Relative: 2 · 0.9, 2 · 0.5 and 2 · 0.1; the client without samples has the least.
    found = probabilities(fs.LabelCorrelated(mean=0.1, least=0.025), people)
    assert found == pytest.approx([0.18, 0.1, 0.025, 0.025])
    assert probabilities(fs.LabelCorrelated(mean=0.8, least=0), people) == pytest.approx([1.0, 0.8, 0.16, 0.0])


def test_sizes_by_hand():
    people = population([0], [0, 0, 1], [1] * 8)
    assert probabilities(fs.SizeCorrelated(mean=0.2), people) == pytest.approx([0.05, 0.15, 0.4])
    assert probabilities(fs.SizeCorrelated(mean=0.2, least=0.1), people) == pytest.approx([0.1, 0.15, 0.4])
    falling = probabilities(fs.SizeCorrelated(mean=0.5, exponent=-1), people)
    assert falling == pytest.approx([1.0, 0.5 / 3 / (35 / 72), 0.5 / 8 / (35 / 72)])
    assert probabilities(fs.SizeCorrelated(mean=0.3, exponent=0), people) == pytest.approx([0.3] * 3)


def test_balanced_labels_keep_the_mean():
    people = population(*([[c] * 3 for c in range(5)] * 4), classes=5)
    found = probabilities(fs.LabelCorrelated(mean=0.15, least=0), people)
    assert found.mean() == pytest.approx(0.15)
    assert found.max() > 2 * found.mean()  # few labels have most of the weight
    even = probabilities(fs.LabelCorrelated(mean=0.15, concentration=1e9), people)
    assert even == pytest.approx([0.15] * 20, rel=1e-3)


def test_weights_depend_on_the_seed_and_not_on_the_other_clients():
    few, more = ([0, 1], [2, 2]), ([0, 1], [2, 2], [1, 1, 1])
    model = fs.LabelCorrelated(least=0)
    found = [probabilities(model, population(*people, classes=3)).copy() for people in (few, more)]
    assert (found[0] == found[1][:2]).all()
    expected = rng(7, "label weights").dirichlet([0.1] * 3)
    other = probabilities(model, population(*few, classes=3, seed=7))
    assert other == pytest.approx(np.minimum(1, 0.3 * np.array([(expected[0] + expected[1]) / 2, expected[2]])))


@pytest.mark.parametrize("concentration", [1e-9, 0.001, 1e9])
def test_extreme_concentrations(concentration):
    found = probabilities(fs.LabelCorrelated(concentration=concentration), population([0, 1], [1]))
    assert ((found >= 0.02) & (found <= 1)).all()


@pytest.mark.parametrize("pattern", ["independent", "markov", "cyclic"])
@pytest.mark.parametrize("kind", [fs.LabelCorrelated, fs.SizeCorrelated])
def test_each_client_has_the_frequency_of_its_probability(kind, pattern):
    # 200 clients of each of three groups with equal samples.
    people = population(*([[0, 0, 0, 1]] * 200 + [[1]] * 200 + [[1, 0]] * 200))
    model = checked(kind(mean=0.3, pattern=pattern, period=20, offline_rounds=5), people)
    there = np.array([model.online(np.arange(600), round, 0) for round in range(1, 101)])
    for group in range(3):
        part = slice(200 * group, 200 * (group + 1))
        (p,) = set(model._p[part].tolist())
        if pattern == "cyclic":
            assert (there[:, part].sum(axis=0) == 5 * max(1, round(20 * p))).all()
            continue
        # The states of a Markov chain are correlated over rounds.
        memory = 1 - min(0.2, p / (1 - p)) / p if pattern == "markov" and p < 1 else 0.0
        deviation = math.sqrt(p * (1 - p) * (1 + memory) / (1 - memory) / there[:, part].size)
        assert abs(there[:, part].mean() - p) <= 4 * deviation


def test_what_real_sites_do_not_tell():
    unknown = Population(3)
    with pytest.raises(SpecError, match="name = 'label-correlated': needs the labels of all clients' samples"):
        fs.LabelCorrelated().check(unknown)
    with pytest.raises(SpecError, match="name = 'size-correlated': needs every client's number of samples"):
        fs.SizeCorrelated().check(unknown)


@pytest.mark.slow
def test_digits_are_online_by_their_labels():
    """On real data: clients that hold the digit of the largest weight answer most often."""
    spec = fs.Experiment(
        partition=fs.Classes(clients=20, per_client=1),
        availability=fs.LabelCorrelated(mean=0.3, least=0.0),
        training=fs.Training(rounds=30, clients_per_round=20),
        evaluation=fs.Evaluation(every=0),
    )
    prepared = fs.prepare(spec)
    weights = rng(0, "label weights").dirichlet([0.1] * 10)
    counts = prepared.assignment.counts(prepared.data.y_train.numpy(), 10)
    p = np.minimum(1, 3 * (counts / counts.sum(axis=1, keepdims=True)) @ weights)
    assert prepared.spec.availability._p == pytest.approx(p)
    returned = sum(record["clients_returned"] for record in fs.run(spec))
    assert abs(returned - 30 * p.sum()) <= 4 * math.sqrt(30 * (p * (1 - p)).sum())
