"""ReBaFL over rounds: where prototypes go, what they cost, and what its switches leave of it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from quick import others_long
from torch import nn

import fedstrata as fs
from fedstrata.base.errors import ClientsFailedError, ReplyRefusedError, SpecError
from fedstrata.base.rng import rng
from fedstrata.clients.client import StateStore
from fedstrata.federation.messages import FitReply, check_message
from fedstrata.objectives.rebafl import Rebalanced
from fedstrata.runs import checkpoint
from fedstrata.runs.preparation import prepare

SKEWED = {
    "data": {"name": "digits", "limit": 400},
    "partition": {"name": "classes", "clients": 10, "per_client": 2},
    "availability": {"name": "bernoulli", "p": 0.5},
    "model": {"name": "cnn", "channels": [4], "hidden": 16},
    "training": {"rounds": 3, "clients_per_round": 10, "local_epochs": 1, "batch_size": 16},
}


def run(method, **sections) -> fs.History:
    return fs.run({**SKEWED, "method": method, **sections})


def same(one: fs.History, two: fs.History) -> bool:
    return all(torch.equal(one.params[name], two.params[name]) for name in one.params)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))


def given(clients, availability="always", **method) -> fs.Experiment:
    return fs.Experiment(
        partition={"name": "given", "indices": clients},
        availability=availability,
        method={"name": "rebafl", **method},
        training={"clients_per_round": len(clients), "local_epochs": 2, "batch_size": 2, "lr": 0.2},
    )


def test_prototypes_by_round_with_dropout(start, seven, trace):
    """Labels are 0 1 2 0 1 2 0: class 0 is at both clients, 1 and 2 at one each."""
    clients, there = ((0, 1, 3), (2, 5, 6)), {0: [1], 1: [2]}
    started = start(given(clients, trace(there)), seven, net())
    model = started.config.model

    def means(weights: dict, of: tuple[int, ...]) -> dict[int, torch.Tensor]:
        features, _ = model.with_features(weights, seven.x_train[list(of)])
        labels = seven.y_train[list(of)]
        return {c: features[labels == c].mean(dim=0).detach() for c in labels.unique().tolist()}

    assert started.state.objective["samples"].tolist() == [0, 0, 0]
    started.step()  # client 0 alone: its model is the global one
    first = means(started.state.weights.params, clients[0])
    assert started.state.objective["samples"].tolist() == [2, 1, 0]
    torch.testing.assert_close(started.state.objective["means"], torch.stack([first[0], first[1], torch.zeros(4)]))
    kept = started.store.get(0)["objective"]
    assert torch.equal(kept["means"], started.state.objective["means"])
    started.step()  # client 1 alone; nobody reports class 1, whose prototype stays
    second = means(started.state.weights.params, clients[1])
    assert started.state.objective["samples"].tolist() == [1, 1, 2]
    torch.testing.assert_close(started.state.objective["means"], torch.stack([second[0], first[1], second[2]]))
    before = copy.deepcopy(started.state)
    started.step()  # nobody: everything stays
    assert torch.equal(started.state.objective["means"], before.objective["means"])
    assert all(torch.equal(w, before.weights.params[n]) for n, w in started.state.weights.params.items())


def test_two_clients_are_averaged_by_class_counts(start, seven):
    started = start(given(((0, 1, 3), (2, 5, 6)), keep_prototypes=True), seven, net())
    started.step()
    one, two = (started.store.get(k)["objective"]["means"] for k in (0, 1))
    found = started.state.objective
    assert found["samples"].tolist() == [3, 1, 2]
    torch.testing.assert_close(found["means"], torch.stack([(2 * one[0] + two[0]) / 3, one[1], two[2]]))


def test_a_moving_average_of_prototypes_over_rounds_with_dropout(start, seven, trace):
    """Class 0 is at both clients. Class 1 is only at client 0, which is absent in round 2."""
    spec = given(((0, 1, 3), (2, 5, 6)), trace({0: [1, 3], 1: [2, 3]}), prototype_momentum=0.75)
    started = start(spec, seven, net())
    stored = torch.zeros(3, 4)
    for there in ((0,), (1,), (0, 1)):
        known = started.state.objective["samples"] > 0
        started.step()
        tables = [started.store.get(client)["objective"] for client in there]
        samples = sum(table["samples"] for table in tables)
        mean = sum(table["samples"][:, None] * table["means"] for table in tables) / samples.clamp(min=1)[:, None]
        for c in samples.nonzero().flatten().tolist():
            stored[c] = 0.75 * stored[c] + 0.25 * mean[c] if known[c] else mean[c]
        torch.testing.assert_close(started.state.objective["means"], stored)


@pytest.mark.slow
def test_a_resumed_run_continues_the_moving_average(tmp_path):
    method = {"name": "rebafl", "prototype_momentum": 0.9}
    spec = fs.Experiment(**{**SKEWED, "method": method, "evaluation": {"checkpoint_every": 1}})
    fs.run(spec, out=tmp_path / "whole")

    class KilledError(Exception):
        pass

    def kill(record):
        if record["round"] == 2:
            raise KilledError

    with pytest.raises(KilledError):
        fs.run(spec, out=tmp_path / "killed", callbacks=[kill])
    assert checkpoint.load(tmp_path / "killed" / "checkpoint").round == 2
    fs.run(spec, out=tmp_path / "killed", resume=True)
    whole, killed = (checkpoint.load(tmp_path / name / "checkpoint").state for name in ("whole", "killed"))
    assert torch.equal(whole.objective["means"], killed.objective["means"])
    assert (tmp_path / "whole/model.safetensors").read_bytes() == (tmp_path / "killed/model.safetensors").read_bytes()


def test_specs_without_a_moving_average_stay_as_they_were():
    for method in ("rebafl", {"name": "fedavg", "objective": "rebafl"}):
        assert "prototype_momentum" not in str(fs.Experiment(method=method).to_spec())
    spec = fs.Experiment(method={"name": "fedavg", "objective": {"name": "rebafl", "prototype_momentum": 0.5}})
    assert fs.Experiment.from_table(spec.to_spec()).method.objective.prototype_momentum == 0.5
    with pytest.raises(SpecError, match=r"^method\.prototype_momentum = 1"):
        fs.Experiment(method={"name": "rebafl", "prototype_momentum": 1})


@pytest.mark.slow
def test_the_bytes_of_prototypes_are_counted():
    plain, rebafl = run("fedavg"), run("rebafl")
    for a, b in zip(plain, rebafl, strict=True):
        means = 10 * 16 * 4 + 10 * 4
        for way, clients in (("bytes_up", b["clients_returned"]), ("bytes_down", b["clients_returned"])):
            extra = (b[way] - a[way]) / max(clients, 1)
            assert means <= extra < means + 300, way
    assert run({"name": "rebafl", "mu": 0})[0]["bytes_up"] == plain[0]["bytes_up"]


@pytest.mark.slow
def test_its_switches():
    plain, both = run("fedavg"), run("rebafl")
    # FedAvg's steps are made by hand, which add up in another order.
    nothing = {"name": "rebafl", "relaxed": False, "mu": 0}
    torch.testing.assert_close(plain.params, run(nothing).params)
    rough = {"training": {**SKEWED["training"], "precision": "bf16"}}  # where both go through autograd
    assert same(run("fedavg", **rough), run(nothing, **rough))
    r_bsm, f_aug = run({"name": "rebafl", "mu": 0}), run({"name": "rebafl", "relaxed": False})
    runs = [plain, both, r_bsm, f_aug]
    assert not any(same(one, two) for i, one in enumerate(runs) for two in runs[i + 1 :])
    assert same(run("bsm-fedavg"), run({"name": "rebafl", "mu": 0, "epsilon": 0}))
    assert same(both, run({"name": "fedavg", "objective": {"name": "rebafl", "keep_prototypes": False}}))
    own = fs.ReBaFL(mu=0.5, epsilon=0.1, transfer=0.9).choices()[2]
    assert own == Rebalanced(mu=0.5, epsilon=0.1, transfer=0.9)


@pytest.mark.slow
@pytest.mark.parametrize("method", others_long(["rebafl", "feddyn", "moon", "fedlc", "fedbabu"], ["rebafl", "moon"]))
def test_the_same_spec_gives_the_same_bytes_twice(method):
    assert same(run(method), run(method))


@pytest.mark.slow
def test_what_an_audit_reads_is_in_the_checkpoint(tmp_path):
    fs.run({**SKEWED, "method": "rebafl"}, out=tmp_path / "kept")
    found = checkpoint.load(tmp_path / "kept" / "checkpoint")
    assert found.state.objective["means"].shape == (10, 16)
    store = StateStore()
    found.restore(store)
    tables = [store.get(k)["objective"] for k in store.clients]
    assert tables
    assert all(int((table["samples"] > 0).sum()) == 2 for table in tables)
    fs.run({**SKEWED, "method": {"name": "rebafl", "keep_prototypes": False}}, out=tmp_path / "not")
    assert not checkpoint.load(tmp_path / "not" / "checkpoint").clients


def test_a_client_that_sends_other_shapes_is_refused(start, seven):
    started = start(given(((0, 1, 3), (2, 5, 6))), seven, net())
    weights, objective = started.state.weights, started.method.choices()[2]
    expected = objective.expected(weights, started.config)
    good = {"means": torch.zeros(3, 4), "samples": torch.zeros(3)}
    check_message(FitReply(weights, 3, 1, 3, 0.5, {"prototypes": good}), expected)
    for bad in ({**good, "means": torch.zeros(3, 5)}, {**good, "samples": torch.zeros(2)}, {"means": good["means"]}):
        with pytest.raises(ReplyRefusedError, match="prototypes"):
            check_message(FitReply(weights, 3, 1, 3, 0.5, {"prototypes": bad}), expected)


@pytest.mark.slow
def test_sizes_that_clients_keep_private_are_not_told_by_prototypes():
    private = {"name": "fedstas", "epsilon": 3.0, "objective": "rebafl", "strata": 2}
    with pytest.raises(
        SpecError,
        match=r"^method\.objective = 'rebafl': discloses the clients' numbers of samples, which method.data_sampler",
    ):
        run(private, training={"rounds": 1})
    silent = run({**private, "objective": {"name": "rebafl", "mu": 0}}, training={"rounds": 1})
    assert len(silent) == 1


def test_a_model_whose_features_have_no_length_is_refused_before_anything_is_written(tmp_path, seven):
    class FedSamplingData(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(2, 3), nn.Identity()

        def forward(self, x):
            return self.head(self.body(x))

    with pytest.raises(SpecError, match=r"^model\.head: the head 'head' does not have an nn\.Linear"):
        fs.run(given(((0,), (1,))), data=seven, model=FedSamplingData(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_client_trains_with_the_prototypes_that_came_and_its_own(start, seven, trace):
    """One full-batch step by the equations (10, 15 to 20), after a round in which somebody else taught class 1."""
    mine = [2, 5, 6]  # labels 2, 2 and 0
    spec = fs.Experiment(
        partition={"name": "given", "indices": ((0, 1, 3), tuple(mine))},
        availability=trace({0: [1], 1: [2]}),
        method={"name": "rebafl", "mu": 5.0, "epsilon": 0.1},
        training={"clients_per_round": 2, "local_epochs": 1, "batch_size": 3, "lr": 0.2},
    )
    started = start(spec, seven, net())
    model = started.config.model
    started.step()
    w = {name: tensor.clone().requires_grad_() for name, tensor in started.state.weights.params.items()}
    order = np.array(mine)[rng(spec.seed, "batches", 2, 1).permutation(3)]
    x, y = seven.inputs(order), seven.targets(torch.from_numpy(order))
    features, logits = model.with_features(w, x)
    # Classes 0 and 2 are its own under the model that came; class 1 is the federation's.
    prototypes = started.state.objective["means"].clone()
    for c in (0, 2):
        prototypes[c] = features.detach()[y == c].mean(dim=0)
    augmented = prototypes + features.detach() - prototypes[y]
    prior = (0.9 * torch.tensor([1.0, 0.0, 2.0]) / 3 + 0.1 / 3).log()
    loss = F.cross_entropy(logits + prior, y) + 5 * F.cross_entropy(model.head(w, augmented), torch.arange(3))
    gradient = torch.autograd.grad(loss, list(w.values()))
    started.step()
    for (name, before), g in zip(w.items(), gradient, strict=True):
        torch.testing.assert_close(started.state.weights.params[name], before.detach() - 0.2 * g, rtol=1e-4, atol=1e-6)


class Headed(nn.Module):
    """A model with a given head."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


@pytest.mark.slow
def test_a_head_that_augmented_samples_would_change_is_refused():
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU())
    model = Headed(body, nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 10)))
    with pytest.raises(SpecError, match=r"^model\.head = 'head': .*0\.running_mean.* Use mu = 0"):
        fs.run({**SKEWED, "method": "rebafl"}, model=model)
    history = fs.run({**SKEWED, "method": {"name": "rebafl", "mu": 0}}, model=model)
    assert history[-1]["clients_failed"] == 0


def test_a_head_that_pools_first_is_named():
    body = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU())
    model = Headed(body, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 10)))
    with pytest.raises(
        ClientsFailedError, match=r"model\.head = 'head': the head's input has 216 features, but .* takes 6"
    ):
        fs.run({**SKEWED, "availability": "always", "method": "rebafl"}, model=model)


@pytest.mark.slow
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
