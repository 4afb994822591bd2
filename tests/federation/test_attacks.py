"""Simulated attacks: by hand, the results of byzfl 0.0.11, who attacks, what is refused, and which aggregators help."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import matrix
import numpy as np
import pytest
import torch
from quick import others_long

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.base.rng import rng
from fedstrata.federation.attacks import (
    ATTACKS,
    Attack,
    Gaussian,
    InnerProduct,
    LabelFlip,
    LittleIsEnough,
    SignFlip,
)
from fedstrata.federation.messages import Fit, FitReply, Reply, Weights
from fedstrata.runs.preparation import assemble, prepare

BYZFL = json.loads((Path(__file__).parents[1] / "aggregation" / "byzfl.json").read_text())["cases"]
OWN, HONEST = torch.tensor([1.0, -2.0]), torch.tensor([[0.0, 1.0], [2.0, 1.0], [4.0, 4.0]])
NONE = HONEST[:0]


def chance() -> np.random.Generator:
    return rng(0, "attack", 1, 0)


@pytest.mark.parametrize(
    ("attack", "honest", "expected"),
    [
        (SignFlip(), HONEST, [-1.0, 2.0]),
        (SignFlip(scale=3), NONE, [-3.0, 6.0]),
        (InnerProduct(scale=0.5), HONEST, [-1.0, -1.0]),
        (InnerProduct(scale=0.5), NONE, [-0.5, 1.0]),
        # The means are 2 and 2; the deviations are 2 and √3.
        (LittleIsEnough(deviations=2), HONEST, [6.0, 2 + 2 * 3**0.5]),
        (LittleIsEnough(), HONEST[:1], [0.0, 1.0]),
        (LittleIsEnough(), NONE, [1.0, -2.0]),
        (LabelFlip(), HONEST, [1.0, -2.0]),
    ],
)
def test_false_updates_by_hand(attack, honest, expected):
    torch.testing.assert_close(attack.false_update(OWN, honest, chance()), torch.tensor(expected))


@pytest.mark.parametrize("case", BYZFL, ids=lambda case: f"n={len(case['updates'])}")
def test_false_updates_are_those_of_byzfl(case):
    """byzfl's sign flip is the opposite of the mean honest update: IPM with the factor 1."""
    honest = torch.tensor(case["updates"], dtype=torch.float64)
    ours = {"sign-flip": InnerProduct(scale=1), "ipm": InnerProduct(scale=0.7), "alie": LittleIsEnough()}
    for name, attack in ours.items():
        found = attack.false_update(honest[0], honest, chance()).numpy()
        np.testing.assert_allclose(found, case["results"][name], rtol=0, atol=1e-6, err_msg=name)


def test_gaussian_updates_have_the_deviation_and_depend_on_round_and_client():
    update = torch.zeros(20_000)
    one, other = (Gaussian(deviation=3).false_update(update, NONE, rng(0, "attack", 1, k)) for k in (0, 1))
    assert one.dtype == torch.float32
    assert (one.mean().item(), one.std().item()) == pytest.approx((0, 3), abs=0.1)
    assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1]) < 0.05


def reply(w: float) -> FitReply:
    weights = Weights({"w": torch.tensor([w]), "v": torch.tensor(0.0).double()}, {"mean": torch.tensor([w])})
    return FitReply(weights, 7, 2, 14, 0.5, {})


def test_only_attackers_change_their_model_and_nothing_else():
    sent = Fit(1, Weights({"w": torch.tensor([10.0]), "v": torch.tensor(0.0).double()}, {}), {}, 1.0)
    replies = {k: reply(10.0 + k) for k in range(4)} | {4: Reply()}
    requests = dict.fromkeys(replies, sent)
    false = InnerProduct(scale=1).altered(1, 0, frozenset({1, 3, 4, 9}), requests, replies)
    assert sorted(false) == [1, 3]
    for client, it in false.items():
        assert it.weights.params["w"].tolist() == [10.0 - 1.0]  # the honest updates are 0 and 2
        assert it.weights.params["v"].dtype == torch.float64
        assert it.weights.buffers["mean"].tolist() == [10.0 + client]
        assert (it.samples, it.steps, it.seen, it.loss) == (7, 2, 14, 0.5)
    assert replies[1].weights.params["w"].tolist() == [11.0]
    assert LabelFlip().altered(1, 0, frozenset({1}), requests, replies) == {}


def test_the_seed_draws_the_share_of_attackers():
    drawn = {SignFlip(share=0.3).attackers(20, seed) for seed in range(20)}
    assert {len(attackers) for attackers in drawn} == {6}
    assert len(drawn) > 15
    assert {client for attackers in drawn for client in attackers} == set(range(20))
    assert len(SignFlip().attackers(20, 0)) == 4
    assert SignFlip(share=0.3).attackers(20, 3) == Gaussian(share=0.3).attackers(20, 3)


@pytest.mark.parametrize(
    ("attack", "words"),
    [
        (
            {"name": "sign-flip", "clients": [1, 10]},
            r"attack\.clients = 10: is not the id of a client",
        ),
        ({"name": "sign-flip", "share": 0.01}, r"attack\.share = 0\.01: is rounded to 0 of 10 clients"),
        (
            {"name": "sign-flip", "share": 0.2, "clients": [1]},
            r"attack\.share = 0\.2: cannot be set together with 'clients'",
        ),
        ({"name": "sign-flip", "clients": []}, r"attack\.clients"),
        ({"name": "sign-flip", "clients": [-1]}, r"attack\.clients\.0"),
        ({"name": "sign-flip", "share": 1.0}, r"attack\.share"),
        ({"name": "alie", "deviations": 0}, r"attack\.deviations"),
        ("sing-flip", r"did you mean 'sign-flip'"),
    ],
)
def test_attackers_that_do_not_exist_are_refused(attack, words):
    with pytest.raises(SpecError, match=words):
        prepare(digits("size", attack))


def digits(aggregator, attack=None, **sections) -> fs.Experiment:
    table = {
        "partition": {"name": "iid", "clients": 10},
        "method": {"name": "fedavg", "aggregator": aggregator},
        "training": {"rounds": 5, "local_epochs": 2, "workers": 1},
        "evaluation": {"every": 0},
        **sections,
    }
    return fs.Experiment.from_table(table if attack is None else {**table, "attack": attack})


@pytest.mark.parametrize("name", list(ATTACKS))
def test_every_attack_round_trips(name):
    spec = digits("size", {"name": name, "clients": [3, 1]})
    assert fs.Experiment.from_table(tomllib.loads(spec.to_toml())) == spec
    assert spec.replace(attack="ipm").attack == InnerProduct()
    assert spec.replace(attack=None).attack is None


def test_a_spec_without_an_attack_has_no_key():
    assert "attack" not in digits("size").to_spec()
    assert "attack" not in fs.Experiment().to_toml()


def test_labels_are_flipped_at_the_attackers_only_and_not_in_tests():
    sections = {"evaluation": {"client_test": 0.3, "validation": 0.1}}
    honest = prepare(digits("size", **sections))
    flipped = prepare(digits("size", {"name": "label-flip", "clients": [2, 5]}, **sections))
    rows = np.concatenate([honest.assignment[client] for client in (2, 5)])
    changed = torch.from_numpy(np.isin(np.arange(honest.data.train_size), rows))
    assert torch.equal(flipped.data.y_train[changed], 9 - honest.data.y_train[changed])
    assert torch.equal(flipped.data.y_train[~changed], honest.data.y_train[~changed])
    assert torch.equal(flipped.data.y_test, honest.data.y_test)
    assert np.array_equal(flipped.assignment.indices, honest.assignment.indices)


def test_methods_and_tasks_that_an_attack_does_not_fit_are_refused():
    for method in ("stratify", "sfl"):
        with pytest.raises(SpecError, match="attack = 'alie': needs updates from local training"):
            prepare(digits("size", "alie", method=method))
        prepare(digits("size", "label-flip", method=method))
    with pytest.raises(SpecError, match="attack = 'label-flip': needs classes, but the task is 'regression'"):
        prepare(digits("size", "label-flip", task="regression"), data=(x := np.eye(20), y := np.arange(20) / 3, x, y))


def test_real_sites_refuse_attacks():
    honest = prepare(digits("size"))
    for attack in ATTACKS:
        with pytest.raises(SpecError, match="attacks are possible only in simulations, not in deployments"):
            assemble(digits("size", attack), honest.data, honest.assignment, sizes_known=False)


@pytest.mark.slow
def test_an_event_names_the_attackers_and_honest_replies_stay():
    spec = digits("size", {"name": "sign-flip", "clients": [7, 2], "scale": 2})
    seen = []
    for each in (spec, digits("size")):
        replies = {}
        with fs.Simulation(prepare(each), listener=lambda round, them, keep=replies: keep.update(them)) as simulation:
            events, start = simulation.events, simulation.state.weights.params
            simulation.step()
        seen.append((events, replies, start))
    (events, false, start), (none, true, _) = seen
    assert [(event["kind"], event["clients"], event["reason"]) for event in events] == [
        ("attackers", [2, 7], "sign-flip")
    ]
    assert none == []
    for client, each in true.items():
        sign = -2 if client in (2, 7) else 1
        for name, w in each.weights.params.items():
            torch.testing.assert_close(false[client].weights.params[name], start[name] + sign * (w - start[name]))


class Infinite(Attack):
    """Attackers send infinity."""

    def false_update(self, update, honest, generator):
        return update / 0


@pytest.mark.slow
def test_false_replies_that_are_not_finite_are_refused():
    spec = digits("size").model_copy(update={"attack": Infinite(clients=[4])})
    with fs.Simulation(prepare(spec)) as simulation:
        record = simulation.step()
        assert [(event["kind"], event["clients"]) for event in simulation.events] == [("refused", [4])]
        assert all(torch.isfinite(w).all() for w in simulation.state.weights.params.values())
    assert (record["clients_returned"], record["clients_failed"], record["clients_trained"]) == (9, 1, 9)


@pytest.mark.slow
@pytest.mark.parametrize("attack", ["gaussian", "alie", "label-flip"])
def test_a_resumed_run_ends_in_the_same_bytes(tmp_path, attack):
    spec = digits("median", attack, training={"rounds": 3, "local_epochs": 1, "workers": 1})
    whole = fs.run(spec)
    fs.run(spec.replace(training={"rounds": 1}), out=tmp_path)
    resumed = fs.run(spec, out=tmp_path, resume=True)
    assert matrix.final_bytes(resumed) == matrix.final_bytes(whole)
    assert (tmp_path / "events.jsonl").read_text().count('"attackers"') == 1


@pytest.mark.slow
def test_a_codec_does_not_change_what_the_attackers_send():
    """The attack comes after decoding: the attackers are not limited by a codec."""
    sections = {"communication": {"up": {"name": "top-k", "fraction": 0.01}}}
    with fs.Simulation(prepare(digits("size", {"name": "gaussian", "share": 0.1}, **sections))) as simulation:
        start = simulation.state.weights.params
        simulation.step()
        moved = [(w != start[name]).float().mean() for name, w in simulation.state.weights.params.items()]
    assert min(moved) > 0.99


@pytest.fixture(scope="module")
def accuracy():
    known = {}

    def measured(aggregator, attack=None):
        key = repr((aggregator, attack))
        if key not in known:
            known[key] = fs.run(digits(aggregator, attack))[-1]["accuracy"]
        return known[key]

    return measured


FLIP = {"name": "sign-flip", "scale": 5.0}
ROBUST = [
    "median",
    {"name": "trimmed-mean", "attackers": 2},
    {"name": "krum", "attackers": 2},
    {"name": "multi-krum", "attackers": 2},
    "geometric-median",
    {"name": "centred-clipping", "radius": 1.0},
]


@pytest.mark.slow
@pytest.mark.parametrize("aggregator", others_long(ROBUST, [ROBUST[0], ROBUST[3]]), ids=str)
def test_robust_aggregators_learn_digits_although_two_of_ten_flip_the_sign(accuracy, aggregator):
    assert accuracy(aggregator) > 0.8
    assert accuracy("size", FLIP) < 0.3 < accuracy("size") - 0.5
    assert accuracy(aggregator, FLIP) > accuracy("size", FLIP) + 0.3


@pytest.mark.slow
def test_the_median_learns_digits_under_every_attack(accuracy):
    large = {"gaussian": {"deviation": 3.0}, "ipm": {"scale": 6.0}, "sign-flip": {"scale": 5.0}}
    for name in ATTACKS:
        assert accuracy("median", {"name": name, **large.get(name, {})}) > 0.85
    for name in large:
        assert accuracy("size", {"name": name, **large[name]}) < 0.5
