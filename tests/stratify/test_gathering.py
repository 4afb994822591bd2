"""Parts of batches with too few samples are merged: nothing smaller leaves a client, and no sample is lost."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from batches import PARTITIONS, Spoilt, assert_same, centralised, order_of, spec_of
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedstrata as fs
from fedstrata.base.errors import ReplyRefusedError, SpecError
from fedstrata.base.rng import torch_seeded
from fedstrata.clients.client import StateStore
from fedstrata.engines.local import LocalEngine
from fedstrata.federation.messages import Weights
from fedstrata.models.batchnorm import federate_batchnorm
from fedstrata.runs.preparation import prepare
from fedstrata.runs.simulation import make_context
from fedstrata.stratify.batch import BatchPlan
from fedstrata.stratify.client_batch import gathered
from fedstrata.stratify.messages import GatheredReply, Gradient, Reserve
from fedstrata.stratify.roster import Roster
from fedstrata.stratify.schedule import Holders

NONE = torch.empty(0, dtype=torch.int64)


@pytest.fixture(scope="module")
def balanced() -> fs.Dataset:
    """400 samples of five classes, 80 each."""
    generator = np.random.default_rng(0)
    y = np.arange(400) % 5
    x = generator.normal(size=(400, 8)) + 1.2 * np.eye(5, 8)[y]
    return fs.from_arrays(x, y, x[:50], y[:50])


def private(partition="dirichlet", clients=10, *, least=3, below="hold-back", **rest) -> fs.Experiment:
    spec = spec_of(partition, clients=clients, **rest)
    return spec.model_copy(update={"privacy": fs.Privacy(min_samples=least, below=below)})


def sizes_of_parts(started) -> list[int]:
    """Samples of every part that is set aside."""
    kept = [started.store.get(client).get("stratify") for client in started.store.clients]
    return [int(n) for state in kept if state is not None for n in np.unique(state.batches, return_counts=True)[1]]


@pytest.mark.slow
@given(st.lists(st.integers(0, 30), max_size=40), st.lists(st.integers(0, 30), max_size=8), st.integers(1, 6))
def test_parts_are_large_enough_and_nothing_goes_into_a_batch_that_is_over(new, old, least):
    batches = np.sort(np.array(new, dtype=np.int64))
    before = np.sort(np.repeat(np.array(sorted(set(old)), dtype=np.int64), least))
    result = gathered(batches, before, least)
    if (result < 0).any():
        # All or nothing: only where they are too few in all, and no earlier part takes them.
        assert (result < 0).all()
        assert len(batches) < least
        assert not (before >= batches[0]).any()
        return
    assert (result >= batches[:1].min(initial=99)).all()
    assert (np.diff(result) >= 0).all()
    together = np.concatenate([result, before])
    assert all(n >= least for n in np.unique(together, return_counts=True)[1])
    # Into a later batch, but for the last of them, which join the last part that there is.
    back = result < batches
    assert (result[back] == together.max(initial=-1)).all()
    assert back.sum() < least
    if least == 1:
        assert (result == batches).all()


def linear() -> nn.Module:
    with torch_seeded(0, "module"):
        return nn.Linear(2, 3)


def engine_of(spec, data) -> LocalEngine:
    """Clients before they enrolled: placeholders are the labels."""
    return LocalEngine(make_context(prepare(spec, data=data, model=linear())), StateStore())


def test_by_hand(seven):
    """Client 0 holds samples 0, 1, 3 and 4 of labels 0, 1, 0, 1; asked for batches 0, 1, 1 and 3, it sends one part."""
    split = {"name": "given", "indices": [[0, 1, 3, 4], [2, 5, 6]]}
    engine = engine_of(private(split, clients=2, least=2), seven)
    weights = Weights(engine.context.config.model.params(), {})
    ask = Reserve(1, torch.tensor([0, 1, 1, 3]), torch.tensor([0, 1, 0, 1]), NONE, True)
    reply = engine.ask({0: ask}, together=False)[0]
    engine.commit([0])
    assert isinstance(reply, GatheredReply)
    assert not reply.missing.any()
    assert not reply.held.any()
    assert reply.batches.tolist() == [1, 1, 1, 1]
    part = engine.ask({0: Gradient(1, 1, weights)}, together=False)[0]
    module = linear()
    F.cross_entropy(module(seven.inputs([0, 1, 3, 4])), seven.targets([0, 1, 3, 4]), reduction="sum").backward()
    assert part.samples == 4
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(part.gradient[name], parameter.grad)
    # Of the batches that it left nothing is there, and nothing is told of that.
    nothing = engine.ask({0: Gradient(1, 0, weights)}, together=False)[0]
    assert nothing.refused
    assert "fewer than privacy.min_samples = 2" in nothing.reason


def test_what_no_part_can_take_stays_in_its_pool(seven):
    split = {"name": "given", "indices": [[0, 1, 3, 4], [2, 5, 6]]}
    engine = engine_of(private(split, clients=2, least=2), seven)
    first = Reserve(1, torch.tensor([0]), torch.tensor([0]), NONE, True)
    reply = engine.ask({0: first}, together=False)[0]
    engine.commit([0])
    assert reply.held.tolist() == reply.missing.tolist() == [True]
    assert reply.exhausted.tolist() == []
    # Asked for more it has it still; and later a single one joins the part that is there.
    two = Reserve(1, torch.tensor([2, 5]), torch.tensor([1, 0]), NONE, False)
    assert engine.ask({0: two}, together=False)[0].batches.tolist() == [5, 5]
    engine.commit([0])
    one = Reserve(1, torch.tensor([3]), torch.tensor([0]), NONE, False)
    last = engine.ask({0: one}, together=False)[0]
    assert (last.batches.tolist(), last.exhausted.tolist()) == ([5], [0])


def test_a_label_of_too_few_samples_is_not_drawn_from_though_others_would_go_with_it(seven):
    """Client 1 holds one sample of label 0 and two of label 2. It names only label 2: no request draws from label 0."""
    split = {"name": "given", "indices": [[0, 1, 3, 4], [2, 5, 6]]}
    engine = engine_of(private(split, clients=2, least=2), seven)
    asked = Reserve(1, torch.tensor([0, 0, 0]), torch.tensor([0, 2, 2]), NONE, True)
    reply = engine.ask({1: asked}, together=False)[1]
    assert reply.missing.tolist() == [True, False, False]
    assert reply.held.tolist() == [False, False, False]


@pytest.mark.parametrize("seed", range(8))
def test_who_held_back_is_asked_again_before_anything_is_given_up(start, seed):
    """Two clients hold two samples each of one label.

    If one client is asked for one sample, it holds it back, and the other is asked for three and has two. The first
    client is then asked for both of its samples.
    """
    y = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    data = fs.from_arrays(np.arange(16.0).reshape(8, 2), y, np.zeros((2, 2)), [0, 1])
    split = {"name": "given", "indices": [[0, 1], [2, 3], [4, 5, 6, 7]]}
    spec = private(split, clients=3, least=2, schedule="uncapped", batch_size=2).model_copy(update={"seed": seed})
    metrics = start(spec, data).step()
    assert (metrics["samples"], metrics["held_back"]) == (8, 0)


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["fused", "per-client"])
@pytest.mark.parametrize("least", [2, 5])
def test_an_epoch_is_that_of_centralised_sgd_on_the_batches_that_were_made(start, balanced, least, execution):
    spec = private(least=least, training={"execution": execution, "momentum": 0.5, "weight_decay": 0.01})
    started = start(spec, balanced)
    module = start(spec, balanced).config.model.module
    metrics = started.step()
    batches = order_of(started, spec, balanced)
    used = np.concatenate(batches)
    assert len(set(used.tolist())) == len(used) == metrics["samples"]
    assert metrics["samples"] + metrics["held_back"] == metrics["scheduled"]
    assert min(sizes_of_parts(started)) >= least
    sgd = centralised(module, balanced, batches, lambda p: torch.optim.SGD(p, 0.1, 0.5, weight_decay=0.01))
    assert_same(started, sgd, 1e-5)


@pytest.mark.slow
def test_with_batchnorm_too(start, balanced):
    def module():
        with torch_seeded(0, "module"):
            return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))

    spec = private("iid", clients=5, training={"execution": "per-client"})
    started = start(spec, balanced, module())
    started.step()
    sgd = centralised(
        federate_batchnorm(module()), balanced, order_of(started, spec, balanced), lambda p: torch.optim.SGD(p, 0.1)
    )
    assert_same(started, sgd, 1e-4)
    assert min(sizes_of_parts(started)) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("rule", ["uncapped", "uniform"])
def test_every_sample_trains_once_or_is_counted_as_held_back(start, balanced, partition, rule):
    spec = private(partition, clients=12, least=4, schedule=rule)
    started = start(spec, balanced)
    labels = balanced.y_train.numpy()
    assignment = started.prepared.assignment
    # Labels that a client has fewer of are not even named.
    counts = np.stack([np.bincount(labels[assignment[k]], minlength=5) for k in range(12)])
    named = int(counts[counts >= 4].sum())
    for _ in range(2):
        metrics = started.step()
        used = np.concatenate(order_of(started, spec, balanced))
        assert metrics["samples"] + metrics["held_back"] == metrics["scheduled"]
        if rule == "uncapped":
            assert metrics["scheduled"] == named
            assert len(set(used.tolist())) == len(used) == named - metrics["held_back"]
        assert min(sizes_of_parts(started)) >= 4
        assert metrics["held_back"] < 4 * 12


@pytest.mark.slow
def test_after_a_client_was_lost_the_others_parts_are_large_enough_too(start, balanced):
    spec = private("iid", clients=6, batch_size=40, training={"execution": "per-client"})
    started = start(spec, Spoilt(balanced))
    metrics = started.step()
    assert metrics["clients_failed"] == 1
    assert metrics["samples"] > 300
    sent = []
    engine = started.federation.engine

    class Tapped(LocalEngine):
        def ask(self, requests, *, together, group=None):
            outcomes = super().ask(requests, together=together, group=group)
            sent.extend(reply.samples for reply in outcomes.values() if hasattr(reply, "gradient"))
            return outcomes

    started.federation.engine = Tapped(engine.context, engine.store)
    started.step()
    assert sent
    assert min(sent) >= 3


@pytest.mark.slow
def test_with_a_minimum_of_one_nothing_changes(start, balanced):
    found = []
    for privacy in (fs.Privacy(), fs.Privacy(below="refuse")):
        spec = spec_of("dirichlet", clients=8).model_copy(update={"privacy": privacy})
        started = start(spec, balanced)
        found.append((started.step(), started.state.weights.params))
    assert found[0][0] == found[1][0]
    assert "held_back" not in found[0][0]
    assert all(torch.equal(w, found[1][1][name]) for name, w in found[0][1].items())


def test_a_part_that_is_refused_ends_its_clients_epoch(start, balanced):
    started = start(private("iid", clients=4, least=3, below="refuse", batch_size=16), balanced)
    metrics = started.step()
    events = [event for event in started.events if event["kind"] == "refused"]
    assert metrics["clients_failed"] == len(events) > 0
    assert all("fewer than privacy.min_samples = 3" in event["reason"] for event in events)
    assert metrics["samples"] > 0


@pytest.mark.parametrize("mode", ["single", "hybrid"])
def test_models_that_travel_sample_by_sample_are_refused_before_the_first_round(start, balanced, mode):
    with pytest.raises(SpecError, match=r"privacy.min_samples = 3: with method.mode = '\w+', each update") as error:
        start(private("iid", mode=mode), balanced)
    assert error.value.key == "privacy.min_samples"


@pytest.mark.parametrize(
    ("lie", "problem"),
    [
        ({"batches": -1}, "a batch that is finished"),
        ({"batches": 400}, "a batch that is finished or does not exist"),
        ({"held": 1}, "both as held back and as used"),
        ({"batches": None}, "GatheredReply.batches: input should be an instance of tensor"),
    ],
    ids=str,
)
def test_a_client_that_lies_about_where_its_positions_went_is_done_without(start, balanced, lie, problem):
    class Lying(LocalEngine):
        def ask(self, requests, *, together, group=None):
            outcomes = dict(super().ask(requests, together=together, group=group))
            if isinstance(requests.get(1), Reserve):
                told = {
                    key: None if value is None else torch.full_like(getattr(outcomes[1], key), value)
                    for key, value in lie.items()
                }
                outcomes[1] = dataclasses.replace(outcomes[1], **told)
            return outcomes

    started = start(private("iid", clients=4), balanced)
    started.federation.engine = Lying(started.engine.context, started.store)
    metrics = started.step()
    assert metrics["clients_failed"] == 1
    assert any(problem in event.get("reason", "") for event in started.federation.events)
    assert all(bool(torch.isfinite(w).all()) for w in started.state.weights.params.values())


def test_the_first_batch_that_there_is_not_is_refused(start, balanced):
    started = start(private("iid", clients=4), balanced)
    holders = Holders(np.array([0]), np.array([0, 1]), np.array([1]), np.array([9]))
    plan = BatchPlan(Roster(started.federation, holders), np.zeros(9, dtype=np.int64), 4)
    assert plan.batches == 3
    none, batches = torch.zeros(2, dtype=torch.bool), torch.tensor([0, 3])
    plan._check(GatheredReply(none, NONE, batches - 1, none))
    plan._check(GatheredReply(torch.tensor([False, True]), NONE, batches, none))
    with pytest.raises(ReplyRefusedError, match="a batch that is finished or does not exist"):
        plan._check(GatheredReply(none, NONE, batches, none))


def test_a_reservation_that_is_none_is_refused(start, balanced):
    engine = start(private("iid", clients=4), balanced).engine
    weights = Weights(engine.context.config.model.params(), {})
    backwards = Reserve(1, torch.tensor([3, 1]), torch.tensor([0, 0]), NONE, True)
    assert "ascending" in engine.ask({0: backwards}, together=False)[0].reason
    # A number of batches that would fill the memory of whoever made a list of them.
    far = Reserve(1, torch.full((5,), 2**60), torch.zeros(5, dtype=torch.int64), NONE, True)
    engine.ask({0: far}, together=False)
    engine.commit([0])
    assert engine.ask({0: Gradient(1, 2**60, weights)}, together=False)[0].samples == 5
