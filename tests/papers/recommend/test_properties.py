"""Properties that are measured without training: by hand, as laws, and in comparison with real runs."""

from __future__ import annotations

from dataclasses import astuple, replace

import numpy as np
import pytest

import fedstrata as fs
from fedstrata.papers.recommend.properties import (
    SHOWN,
    Properties,
    apart,
    longest,
    mean,
    measure,
    properties,
)
from fedstrata.papers.recommend.rounds import Simulated, sampler_of, simulate
from fedstrata.runs.preparation import prepare
from fedstrata.sampling.base import Uniform

COUNTS = np.array([[2, 0, 0], [2, 2, 0], [0, 0, 4]])
SIZES = COUNTS.sum(axis=1)
ONLINE = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 1, 1]], dtype=bool)
INVITED = np.array([[0, 1, 1], [1, 0, 1], [1, 1, 0], [0, 1, 1]], dtype=bool)
STEPS = np.array([1.0, 2.0, 3.0])
SPEC = {
    "partition": {"name": "classes", "clients": 12, "per_client": 2},
    "availability": {"name": "label-correlated", "mean": 0.4},
    "training": {"rounds": 12, "clients_per_round": 4, "local_steps": 1},
}


def test_three_clients_by_hand():
    measured = properties(SIZES, STEPS, COUNTS, Simulated(ONLINE, INVITED))
    expected = Properties(
        clients=3,
        invited=8 / 12,
        size_imbalance=4 / 30,
        step_imbalance=4 / 18,
        online=8 / 12,
        offline_rounds=4 / 3,  # clients are offline for 1, 1 and 2 rounds
        size_correlation=-0.5,
        classes=3,
        classes_per_client=4 / 9,
        label_skew=(0.6 + 0.4 + 0.6) / 3,
        class_imbalance=2 / 15,
        online_skew=6 / 65,  # shares of 3 : 1.5 : 2 instead of 4 : 2 : 4
        absent_online=3 / 12,
        absent_uninvited=1 / 12,
        absent_replies=4 / 12,
        longest_absence=3,  # the third class is absent in rounds 1 to 3
    )
    assert astuple(measured) == pytest.approx(astuple(expected))


def test_the_mean_over_seeds():
    always = Simulated(np.ones_like(ONLINE), np.ones_like(ONLINE))
    one, other = (properties(SIZES, STEPS, COUNTS, run) for run in (Simulated(ONLINE, INVITED), always))
    assert astuple(mean([one, other])) == pytest.approx((np.array(astuple(one)) + astuple(other)) / 2)
    without = replace(one, longest_absence=None)
    assert mean([without, without]) == without


def test_the_order_of_clients_does_not_matter():
    draws = np.random.default_rng(0)
    counts, steps = draws.integers(0, 4, (30, 5)), draws.random(30)
    run = Simulated(draws.random((20, 30)) < 0.5, draws.random((20, 30)) < 0.2)
    order = draws.permutation(30)
    shuffled = Simulated(run.online[:, order], run.invited[:, order])
    before = properties(counts.sum(axis=1), steps, counts, run)
    after = properties(counts[order].sum(axis=1), steps[order], counts[order], shuffled)
    assert astuple(after) == pytest.approx(astuple(before))


@pytest.mark.parametrize("invited", [4, 12])
def test_without_dropouts_classes_are_absent_only_because_of_sampling(invited):
    training = {**SPEC["training"], "clients_per_round": invited}
    measured = measure(prepare(fs.Experiment(**{**SPEC, "availability": "always", "training": training})))
    assert (measured.online, measured.offline_rounds, measured.online_skew, measured.absent_online) == (1, 0, 0, 0)
    assert measured.absent_replies == measured.absent_uninvited
    assert (measured.absent_replies == 0) == (invited == 12)
    assert measured.invited == invited / 12


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    ["fedavg", {"name": "fedavg", "client_sampler": "weighted"}, "fedgs"],
    ids=["uniform", "weighted", "fedgs"],
)
@pytest.mark.parametrize("announced", [False, True])
def test_a_run_has_the_simulated_absences(method, announced):
    availability = {**SPEC["availability"], "announced": announced}
    prepared = prepare(fs.Experiment(**{**SPEC, "availability": availability, "method": method}))
    simulated = simulate(prepared, prepared.spec.seed)
    counts = prepared.assignment.counts(*prepared.data.strata_or_one)
    with fs.Simulation(prepared) as simulation:
        records = list(simulation)
    for record, online, invited in zip(records, simulated.online, simulated.invited, strict=True):
        assert record["clients_invited"] == invited.sum()
        assert record["clients_returned"] == (invited & online).sum()
        assert record["classes_absent"] == np.flatnonzero(counts[invited & online].sum(axis=0) == 0).tolist()
    assert any(record["classes_absent"] for record in records)


def test_a_seed_decides_who_is_invited_and_online():
    spec = fs.Experiment(**{**SPEC, "partition": {"name": "iid", "clients": 12}, "availability": "bernoulli"})
    prepared = prepare(spec)
    for seed in (0, 1):
        mine, run = simulate(prepared, seed), simulate(prepare(spec.replace(seed=seed)), seed)
        assert (mine.online == run.online).all()
        assert (mine.invited == run.invited).all()
    assert (simulate(prepared, 0).invited != mine.invited).any()


def test_the_longest_absence_is_of_successive_rounds():
    absent = np.array([[True, False], [True, False], [False, True], [True, False], [True, False]])
    assert longest(absent) == 2


@pytest.mark.parametrize("method", ["fedssar", "clustered", "power-of-choice", "stratify"])
def test_clients_are_invited_at_random_if_the_method_needs_replies(method):
    partition = {"name": "iid", "clients": 12}
    assert sampler_of(prepare(fs.Experiment(**{**SPEC, "partition": partition, "method": method}))) == Uniform()


@pytest.mark.slow
def test_a_task_without_classes_has_no_properties_of_classes():
    partition = {"name": "iid", "clients": 12}
    spec = {**SPEC, "partition": partition, "availability": {"name": "bernoulli"}, "task": "regression"}
    measured = measure(prepare(fs.Experiment(**spec)))
    assert (measured.classes, measured.label_skew, measured.absent_replies) == (None, None, None)
    assert 0.3 < measured.online < 0.7


def test_how_far_apart():
    mine = properties(SIZES, STEPS, COUNTS, Simulated(ONLINE, INVITED))
    other = replace(mine, clients=3999, online=1.0, size_correlation=0.5, label_skew=None)
    assert [apart(key, mine, mine) for key in SHOWN] == [0] * len(SHOWN)
    assert apart("clients", mine, other) == pytest.approx(1)  # (1 + 3999) / (1 + 3) is 1,000
    assert apart("online", mine, other) == pytest.approx(4 / 12)
    assert apart("size_correlation", mine, other) == pytest.approx(0.5)
    assert apart("label_skew", mine, other) == 1  # only one of the two has classes
    assert apart("label_skew", other, other) is None
