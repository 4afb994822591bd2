"""Batch Stratify is centralised SGD on the same samples in the same order, whoever holds them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from batches import PARTITIONS, Spoilt, assert_same, centralised, order_of, spec_of
from limits import within
from quick import others_long
from torch import nn

import fedstrata as fs
from fedstrata.base.rng import torch_seeded
from fedstrata.clients.client import Client, StateStore
from fedstrata.engines.local import LocalEngine
from fedstrata.federation.messages import Request, Weights
from fedstrata.models.batchnorm import federate_batchnorm
from fedstrata.runs.preparation import prepare
from fedstrata.runs.simulation import make_context
from fedstrata.stratify.batch import BatchPlan
from fedstrata.stratify.client_batch import opened
from fedstrata.stratify.messages import Gradient, Reserve
from fedstrata.stratify.roster import Roster


@pytest.fixture(scope="module")
def balanced() -> fs.Dataset:
    """1,000 samples of five classes, 200 each, which a linear model cannot tell apart for certain."""
    generator = np.random.default_rng(0)
    y = np.arange(1000) % 5
    x = generator.normal(size=(1000, 8)) + 1.2 * np.eye(5, 8)[y]
    return fs.from_arrays(x, y, x[:50], y[:50])


@pytest.fixture(scope="module")
def skewed() -> fs.Dataset:
    """Three classes of 150, 60 and 15 samples."""
    generator = np.random.default_rng(1)
    y = generator.permutation(np.repeat([0, 1, 2], [150, 60, 15]))
    x = generator.normal(size=(225, 6)) + np.eye(3, 6)[y]
    return fs.from_arrays(x, y, x[:30], y[:30])


def with_batchnorm() -> nn.Module:
    with torch_seeded(0, "module"):
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))


FUSED_AND_ONCE_ALONE = others_long(
    itertools.product(PARTITIONS, ["fused", "per-client"]),
    [*((partition, "fused") for partition in PARTITIONS), (next(iter(PARTITIONS)), "per-client")],
)


@pytest.mark.slow
@pytest.mark.parametrize(("partition", "execution"), FUSED_AND_ONCE_ALONE)
def test_fifty_steps_are_those_of_centralised_sgd(start, balanced, partition, execution):
    spec = spec_of(partition, training={"execution": execution, "momentum": 0.5, "weight_decay": 0.01})
    started = start(spec, balanced)
    module = start(spec, balanced).config.model.module
    metrics = started.step()
    batches = order_of(started, spec, balanced)
    # One exchange a batch, and a few for the reservation.
    assert len(batches) == 50 <= metrics["exchanges"] - 1 <= 55
    sgd = centralised(module, balanced, batches, lambda p: torch.optim.SGD(p, 0.1, 0.5, weight_decay=0.01))
    assert_same(started, sgd, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("partition", "execution"), FUSED_AND_ONCE_ALONE)
def test_with_batchnorm_too(start, balanced, partition, execution):
    spec = spec_of(partition, clients=5, training={"execution": execution})
    started = start(spec, balanced, with_batchnorm())
    started.step()
    module = federate_batchnorm(with_batchnorm())
    sgd = centralised(module, balanced, order_of(started, spec, balanced), lambda p: torch.optim.SGD(p, 0.1))
    assert_same(started, sgd, 1e-4)


@pytest.mark.slow
def test_three_executions_of_batchnorm_have_the_same_gradients_in_float64(start, balanced, monkeypatch):
    import dataclasses

    # Runs refuse trainable float64; here it shows that the gradients are equal but for rounding.
    monkeypatch.setattr("fedstrata.models.model.require_trainable", lambda module: None)

    exact = dataclasses.replace(balanced, shift=None, scale=None)
    found = {}
    for execution in ("fused", "per-client"):
        spec = spec_of("#C=1", clients=5, training={"execution": execution, "lr": 1.0}, batch_size=1000)
        started = start(spec, Double(exact), with_batchnorm().double())
        before = started.config.model.params()
        started.step()
        found[execution] = {name: before[name] - w for name, w in started.state.weights.params.items()}
    module = with_batchnorm().double()
    F.cross_entropy(module(exact.inputs(slice(None)).double()), exact.y_train).backward()
    for execution in found:
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(found[execution][name], parameter.grad, rtol=1e-5, atol=1e-9)


class Double(fs.Dataset):
    """The same data in float64."""

    def __init__(self, data: fs.Dataset) -> None:
        super().__init__(*(getattr(data, key) for key in data.__dataclass_fields__))

    def inputs(self, indices, split="train"):
        return super().inputs(indices, split).double()


class ReddiAdam(torch.optim.Optimizer):
    """Adam without bias correction, v from τ² on."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            memory = self.state[p]
            memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * p.grad
            memory["v"] = 0.99 * memory.get("v", 1e-6) + 0.01 * p.grad**2
            p.sub_(self.defaults["lr"] * memory["m"] / (memory["v"].sqrt() + 1e-3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "make"),
    [
        ("adam", lambda p: ReddiAdam(p, 0.01)),
        ({"optimizer": "sgd", "momentum": 0.9}, lambda p: torch.optim.SGD(p, 0.01, momentum=0.9)),
        ("adagrad", lambda p: torch.optim.Adagrad(p, 0.01, eps=1e-3, initial_accumulator_value=1e-6)),
    ],
)
def test_any_optimiser_at_the_server(start, balanced, server, make):
    spec = spec_of("#C=1", server=server, training={"lr": 0.01})
    started, module = start(spec, balanced), start(spec, balanced).config.model.module
    started.step()
    batches = order_of(started, spec, balanced)
    started.step()  # the optimiser remembers
    batches += order_of(started, spec, balanced)
    assert_same(started, centralised(module, balanced, batches, make), 1e-4)


def test_gradients_are_clipped_at_the_server(start, balanced):
    spec = spec_of("#C=1", training={"clip": 1e-3, "lr": 1.0})
    started = start(spec, balanced)
    before = started.config.model.params()
    started.step()
    moved = torch.sqrt(sum((w - before[name]).square().sum() for name, w in started.state.weights.params.items()))
    assert 1e-3 < moved <= 50 * 1e-3 * 1.0001


class TwoBiases(nn.Module):
    """Autograd gives both biases the very same gradient tensor."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(2, 3)
        self.a, self.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.fc(x) + (self.a + self.b)


@pytest.mark.parametrize("mode", ["batch", "single"])
@pytest.mark.parametrize("clip", [1e9, 0.1])
def test_a_gradient_that_two_parameters_share_is_clipped_once(start, seven, mode, clip):
    spec = fs.Experiment(
        partition={"name": "given", "indices": ((0, 1, 3), (2, 5))},
        method={"name": "stratify", "mode": mode, "batch_size": 5}
        if mode == "batch"
        else {"name": "stratify", "mode": mode},
        training={"lr": 0.5, "clip": clip},
    )
    started = start(spec, seven, TwoBiases())
    module = TwoBiases()
    before = module.a.detach().clone()
    started.step()
    after = started.state.weights.params
    # What moves one bias moves the other, by as much as plain SGD with PyTorch's own clipping does.
    torch.testing.assert_close(after["a"] - before, after["b"] - 1)
    if mode == "batch":
        used = np.concatenate(order_of(started, spec, seven))
        F.cross_entropy(module(seven.inputs(used)), seven.targets(torch.from_numpy(used))).backward()
        nn.utils.clip_grad_norm_(list(module.parameters()), clip)
        for name, p in module.named_parameters():
            torch.testing.assert_close(after[name], p.detach() - 0.5 * p.grad, rtol=1e-4, atol=1e-6)
    else:
        kept = torch.cat([(after[name] - w).flatten() for name, w in TwoBiases().named_parameters()]).norm()
        assert kept > 0.01
        assert clip > 1 or kept <= 5 * 0.5 * clip * 1.0001


@pytest.mark.slow
@pytest.mark.parametrize("partition", PARTITIONS)
def test_every_sample_of_a_balanced_set_trains_once(start, balanced, partition):
    spec = spec_of(partition)
    started = start(spec, balanced)
    for _ in range(2):
        started.step()
        used = np.concatenate(order_of(started, spec, balanced))
        assert sorted(used.tolist()) == list(range(1000))


@pytest.mark.parametrize("selection", ["uniform", "weighted"])
@pytest.mark.parametrize(
    ("rule", "frequencies"), [("capped", [60, 60, 15]), ("uncapped", [150, 60, 15]), ("uniform", [75, 75, 75])]
)
def test_labels_train_as_often_as_the_schedule_says(start, skewed, rule, frequencies, selection):
    spec = spec_of({"name": "dirichlet", "alpha": 0.5}, clients=6, schedule=rule, selection=selection)
    started = start(spec, skewed)
    metrics = started.step()
    used = np.concatenate(order_of(started, spec, skewed))
    assert np.bincount(skewed.y_train.numpy()[used]).tolist() == frequencies
    assert metrics["samples"] == metrics["scheduled"] == sum(frequencies)
    often = np.bincount(used, minlength=225)
    # Without replacement: a sample comes again only when its client's pool was used up.
    wanted = np.array(frequencies)[skewed.y_train.numpy()]
    if rule != "uniform":
        assert often.max() == 1
    else:
        assert often[wanted == 75].max() >= 1
        assert often.max() <= 75


@pytest.mark.slow
def test_weighted_selection_takes_more_from_larger_holders(start):
    """One label that matters, two holders of 90 and 9 samples, batches of one: ten in eleven go to the larger."""
    generator = np.random.default_rng(0)
    data = fs.from_arrays(generator.normal(size=(100, 2)), [0] * 99 + [1], [[0.0, 0.0]], [0])
    owners = {"name": "given", "indices": [list(range(90)), list(range(90, 100))]}
    shares = {}
    for selection in ("uniform", "weighted"):
        spec = spec_of(owners, clients=2, selection=selection, batch_size=1, cap=10)
        started = start(spec, data)
        taken = 0
        for _ in range(40):
            started.step()
            kept = started.store.get(0)["stratify"]
            taken += len(kept.places)
        shares[selection] = taken / (40 * 10)
    assert abs(shares["uniform"] - 0.5) < 4 * 0.5 / 20
    assert abs(shares["weighted"] - 90 / 99) < 4 * 0.3 / 20


def test_a_client_that_fails_in_the_middle_loses_its_part_and_others_take_over(start, balanced):
    data = Spoilt(balanced)
    spec = spec_of("iid", clients=5, batch_size=50)
    started = start(spec, data)
    metrics = started.step()
    assert metrics["clients_failed"] == 1
    assert all(bool(torch.isfinite(w).all()) for w in started.state.weights.params.values())
    # At most its part of one batch of 50 is lost.
    assert 950 <= metrics["samples"] < 1000
    assert [event["kind"] for event in started.federation.events] == ["refused"]


def test_of_the_batch_in_hand_nothing_is_given_away_again(start, balanced, monkeypatch):
    """What a lost client had in it is lost; its positions of later batches, and no others, go to others."""
    lost, given = [], []
    lose, reserve = BatchPlan.lose, BatchPlan.reserve

    def noted_lose(plan, clients, batch):
        lost.append((batch, plan.batch_of[np.isin(plan.owner, list(clients))]))
        lose(plan, clients, batch)

    def noted_reserve(plan, positions):
        given.append(plan.batch_of[positions])
        reserve(plan, positions)

    monkeypatch.setattr(BatchPlan, "lose", noted_lose)
    monkeypatch.setattr(BatchPlan, "reserve", noted_reserve)
    start(spec_of("iid", clients=5, batch_size=50), Spoilt(balanced)).step()
    ((batch, theirs),) = lost
    everything, again = given
    assert len(everything) == 1000
    assert {batch, batch + 1} <= set(theirs.tolist())
    assert again.tolist() == theirs[theirs > batch].tolist()


class Lying(LocalEngine):
    """Client 1 answers one kind of request with something else."""

    def __init__(self, engine: LocalEngine, kind: type[Request], lie: dict[str, Any]) -> None:
        super().__init__(engine.context, engine.store)
        self.kind, self.lie, self.asked = kind, lie, 0

    def ask(self, requests, *, together, group=None):
        outcomes = dict(super().ask(requests, together=together, group=group))
        if isinstance(requests.get(1), self.kind):
            self.asked += 1
            outcomes[1] = dataclasses.replace(outcomes[1], **self.lie)
        return outcomes


def test_a_holder_that_has_nothing_right_after_a_refill_is_asked_no_more(start, balanced):
    """The reservation would go on for ever."""

    class Empty(LocalEngine):
        def ask(self, requests, *, together, group=None):
            outcomes = dict(super().ask(requests, together=together, group=group))
            if isinstance(requests.get(1), Reserve):
                outcomes[1] = dataclasses.replace(outcomes[1], missing=torch.ones_like(outcomes[1].missing))
            return outcomes

    started = start(spec_of("#C=1", clients=5, schedule="uncapped", batch_size=50), balanced)
    started.federation.engine = Empty(started.federation.engine.context, started.store)
    metrics = within(300, started.step)
    assert metrics["samples"] == 800
    (skipped,) = started.federation.events
    assert skipped["kind"] == "label skipped"


def test_a_pool_that_begins_anew_comes_in_another_order(start, balanced):
    context = start(spec_of("#C=1", clients=5), balanced).federation.engine.context
    client = Client(0, context, {})
    label = int(client.labels[0])
    wanted = torch.tensor([label])
    request = Reserve(1, torch.zeros(1, dtype=torch.int64), wanted, refill=wanted, fresh=True)
    pools = opened(client, {}, request, [label])
    first, again = pools[label].order, opened(client, pools, request, [label])[label].order
    assert sorted(first) == sorted(again) == list(range(200))
    assert first.tolist() != again.tolist()


@pytest.mark.parametrize(
    ("lie", "problem"),
    [
        (
            {"missing": torch.zeros(3, dtype=torch.bool)},
            "missing has shape (3,) and type torch.bool, but must have shape (200,) and type torch.bool",
        ),
        ({"missing": torch.zeros(200)}, "missing has shape (200,) and type torch.float32, but must have shape (200,)"),
        ({"missing": torch.zeros(200, 1, dtype=torch.bool)}, "missing has shape (200, 1) and type torch.bool"),
        ({"exhausted": torch.zeros(2)}, "exhausted has shape (2,) and type torch.float32, but must have shape (-1,)"),
        ({"missing": None}, "ReserveReply.missing: input should be an instance of tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_client_that_answers_a_reservation_with_garbage_is_done_without(start, balanced, lie, problem):
    started = start(spec_of("#C=1", clients=5, schedule="uncapped", batch_size=50), balanced)
    engine = started.federation.engine = Lying(started.federation.engine, Reserve, lie)
    metrics = started.step()
    # Nobody else holds its label.
    assert (metrics["samples"], metrics["clients_failed"], metrics["clients_returned"]) == (800, 1, 4)
    refused, skipped = started.federation.events
    assert (refused["kind"], refused["clients"], skipped["kind"]) == ("refused", [1], "label skipped")
    assert problem in refused["reason"]
    assert engine.asked == 1
    assert "stratify" not in started.store.get(1)
    assert all(bool(torch.isfinite(w).all()) for w in started.state.weights.params.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lie", "problem"),
    [
        ({"buffers": {}}, "buffers lacks the tensor '1.running_mean'"),
        ({"buffers": {"1.running_mean": torch.zeros(3)}}, "buffers lacks the tensor '1.running_var'"),
        (
            {"buffers": "double"},
            "buffers['1.running_mean'] has shape (16,) and type torch.float64, but must have shape (16,)",
        ),
        ({"gradient": {}}, "gradient lacks the tensor '0.weight'"),
        ({"samples": 0}, "the reply covers 0 samples"),
        ({"loss": float("nan")}, "NaN or infinity"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_client_that_sends_a_gradient_of_garbage_is_done_without(start, balanced, lie, problem):
    spec = spec_of("iid", clients=4, schedule="uncapped", batch_size=50, training={"execution": "per-client"})
    started = start(spec, balanced, with_batchnorm())
    if lie.get("buffers") == "double":
        buffers = started.config.model.buffers()
        lie = {"buffers": {n: b.double() if b.is_floating_point() else b for n, b in buffers.items()}}
    engine = started.federation.engine = Lying(started.federation.engine, Gradient, lie)
    metrics = started.step()
    (event,) = started.federation.events
    assert (event["kind"], event["clients"]) == ("refused", [1])
    assert problem in event["reason"]
    # Its part of that batch is lost, and others take over the rest.
    assert (metrics["clients_failed"], metrics["clients_returned"], engine.asked) == (1, 4, 1)
    assert 950 <= metrics["samples"] < 1000
    assert all(bool(torch.isfinite(w).all()) for w in started.state.weights.params.values())


@pytest.mark.slow
def test_a_client_that_is_away_is_done_without(start, balanced, trace):
    spec = spec_of("iid", clients=4, availability=trace({0: [1], 1: [1], 3: [1]}))
    metrics = start(spec, balanced).step()
    assert metrics["clients_dropped"] == 1
    # The schedule is full all the same: the others' pools are refilled.
    assert metrics["samples"] == 1000


def test_a_label_whose_last_holder_is_away_is_skipped_and_noted(start, balanced, trace):
    spec = spec_of("#C=1", clients=5, availability=trace({0: [1], 1: [1], 2: [1], 4: [1]}))
    started = start(spec, balanced)
    assert started.step()["samples"] == 800
    (event,) = [event for event in started.federation.events if event["kind"] == "label skipped"]
    assert event["reason"].startswith("200 positions of placeholder")


def test_nobody_there_leaves_the_model_as_it_was(start, balanced, trace):
    for mode in ("batch", "single"):
        started = start(spec_of("iid", clients=3, mode=mode, availability=trace({0: [9]})), balanced)
        before = started.state.weights.params
        metrics = started.step()
        assert metrics["samples"] == metrics["transfers"] == 0
        assert metrics["train_loss"] is None
        assert all(torch.equal(before[name], w) for name, w in started.state.weights.params.items())


def test_communication_as_the_paper_counts_it(start, balanced):
    started = start(spec_of("#C=1", clients=5, batch_size=100), balanced)
    started.step()
    metrics = started.step()
    params = (8 * 16 + 16 + 16 * 5 + 5) * 4
    assert metrics["update_bytes"] == params
    # Ten batches, and every one needs all five labels, so all five clients.
    assert metrics["transfers"] == 50
    assert metrics["client_bytes"] == 2 * params * 10


@pytest.mark.slow
def test_an_own_seed_gives_another_epoch_and_the_same_seed_the_same(start, balanced):
    spec = spec_of("iid")
    runs = [start(s, balanced) for s in (spec, spec, spec.model_copy(update={"seed": 1}))]
    for run in runs:
        run.step()
    first, again, other = (run.state.weights.params["body.1.weight"] for run in runs)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_layer_that_draws_is_seeded_from_the_first_batch_on(balanced):
    with torch_seeded(0, "module"):
        module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 5))
    prepared = prepare(spec_of("iid", clients=3), data=balanced, model=module)
    context = make_context(prepared)
    engine = LocalEngine(context, StateStore())
    ask = {
        k: Reserve(1, torch.zeros(4, dtype=torch.int64), torch.arange(4), torch.empty(0).long(), True) for k in (0, 2)
    }
    engine.ask(ask, together=False)
    engine.commit(ask)
    weights = Weights(prepared.config.model.params(), prepared.config.model.buffers())
    generator = torch.get_rng_state()
    # That the model draws was found when the run was prepared.
    replies = [engine.ask_sum(dict.fromkeys(ask, Gradient(1, 0, weights))) for _ in range(3)]
    assert context.config.random
    assert torch.equal(torch.get_rng_state(), generator)
    for reply in replies:
        assert reply.samples == 8
        assert reply.loss == replies[0].loss
        assert int(reply.buffers["1.num_batches_tracked"]) == 1
        for name, tensor in reply.gradient.items():
            assert torch.equal(tensor, replies[0].gradient[name])
    other = engine.ask_sum(dict.fromkeys(ask, Gradient(2, 0, weights)))
    assert other.loss != replies[0].loss


@pytest.mark.parametrize("batch_size", [4, 8])
def test_a_batch_that_dropout_leaves_one_sample_of_is_nobodys_failure(start, balanced, trace, batch_size):
    """The second client is never there with its three classes: batches are left with a few samples of the first."""
    mine, theirs = list(range(0, 100, 5)), [i for i in range(100) if i % 5 in (1, 2, 3)]
    table = {
        "partition": {"name": "given", "indices": [mine, theirs]},
        "availability": trace({0: [1, 2, 3]}),
        "method": {"name": "stratify", "schedule": "uncapped", "batch_size": batch_size},
        "training": {"rounds": 3, "lr": 0.1},
    }
    started = start(fs.Experiment.from_table(table), balanced, with_batchnorm())
    for _ in range(3):
        metrics = started.step()
        skipped = [event for event in started.federation.events if event["kind"] == "batch skipped"]
        assert metrics["clients_failed"] == 0
        assert metrics["samples"] == 20 - len(skipped)
        assert metrics["samples"] > 5


@pytest.mark.slow
def test_a_last_batch_of_one_joins_the_batch_before_it(start, balanced):
    """1,000 positions in batches of 27: 37 batches and one sample."""
    table = {"partition": {"name": "iid", "clients": 5}, "method": {"name": "stratify", "batch_size": 27}}
    exchanges = []
    for module in (with_batchnorm(), nn.Linear(8, 5)):
        started = start(fs.Experiment.from_table(table), balanced, module)
        metrics = started.step()
        assert metrics["samples"] == 1000
        assert metrics["clients_failed"] == 0
        exchanges.append(metrics["exchanges"])
    assert exchanges[0] < exchanges[1]


def test_gradients_of_several_batches_at_one_model_are_one_larger_batch(start, balanced):
    """So that a larger ``batch_size`` is all that collecting batches before an exchange could give."""
    sums = []
    for batches in (5, 1):
        started = start(spec_of("iid", clients=1), balanced)  # a single holder: the same samples in the same order
        federation, weights = started.federation, started.state.weights
        federation.begin(1)
        wanted = np.tile(np.arange(5), 20)
        plan = BatchPlan(Roster(federation, started.state.holders), wanted, len(wanted) // batches)
        plan.reserve(np.arange(len(wanted)))
        total: dict[str, torch.Tensor] = {}
        for batch in range(batches):
            reply = federation.ask_sum(plan.work(batch), Gradient(1, batch, weights)).reply
            total = {name: total.get(name, 0) + tensor for name, tensor in reply.gradient.items()}
        sums.append(total)
    assert max(float(tensor.abs().max()) for tensor in sums[0].values()) > 1
    torch.testing.assert_close(sums[0], sums[1], atol=1e-4, rtol=1e-5)


def test_two_local_steps_by_hand(start, balanced):
    """The server's step along the sum leads to the mean of what each client's own two steps led to."""
    spec = spec_of("dirichlet", clients=3, batch_size=60, local_steps=2, cap=12)
    started = start(spec, balanced)
    module = start(spec, balanced).config.model.module
    names = [name for name, _ in module.named_parameters()]
    before = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
    started.step()
    mean = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    samples = 0
    for client in range(3):
        kept = started.store.get(client)["stratify"]
        own = prepare(spec, data=balanced).assignment[client][kept.places]
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(before[name])
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(module(balanced.inputs(own)), balanced.targets(torch.from_numpy(own))).backward()
            optimizer.step()
        samples += len(own)
        mean = {name: mean[name] + len(own) * dict(module.named_parameters())[name].detach() for name in names}
    assert samples == 60
    for name in names:
        torch.testing.assert_close(started.state.weights.params[name], mean[name] / samples, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("sqrt", 2.0), ("linear", 4.0)])
def test_the_learning_rate_follows_the_size_of_a_batch(start, balanced, rule, factor):
    moved = []
    for more in ({"lr_rule": rule}, {}):
        started = start(spec_of("iid", clients=2, batch_size=80, cap=16, **more), balanced)
        before = started.state.weights.params
        started.step()
        moved.append({name: tensor - before[name] for name, tensor in started.state.weights.params.items()})
    for name, tensor in moved[0].items():
        torch.testing.assert_close(tensor, factor * moved[1][name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr_rule": "linear"}, "lr_rule = 'linear': has no effect, because method.batch_size is not set"),
        (
            {"mode": "single", "local_steps": 2},
            "local_steps = 2: has no effect, because method.mode = 'single' does not use batches",
        ),
    ],
)
def test_settings_of_batches_are_refused_where_there_are_none(balanced, settings, message):
    with pytest.raises(fs.SpecError, match=message):
        prepare(spec_of("iid", **settings), data=balanced)


@pytest.mark.long
@pytest.mark.slow
def test_local_steps_with_batchnorm_are_the_same_however_sums_are_computed(balanced):
    """Statistics are those of the union batch in every step."""
    found = []
    for execution in ("fused", "per-client"):
        short = {"execution": execution, "rounds": 6}
        spec = spec_of("dirichlet", clients=3, batch_size=60, local_steps=3, training=short)
        found.append(fs.run(spec, data=balanced, model=with_batchnorm()).params)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_clients_step_with_the_rate_of_the_server(start, balanced):
    """So that one client that holds all of a batch is where its own steps led."""
    rates = []
    for lr, more in ((0.1, {"lr_rule": "linear"}), (0.4, {})):
        spec = spec_of("iid", clients=1, batch_size=80, local_steps=2, cap=16, training={"lr": lr}, **more)
        started = start(spec, balanced)
        started.step()
        rates.append(started.state.weights.params)
    for name, tensor in rates[0].items():
        torch.testing.assert_close(tensor, rates[1][name], atol=1e-6, rtol=1e-5)


def test_samples_arrive_once_whatever_the_round(start, balanced):
    """The two halves of each label's samples are disjoint and complete, also if they arrive in different rounds."""
    started = start(spec_of("iid", clients=5), balanced)
    none = torch.empty(0, dtype=torch.int64)

    def arrived(round, window):
        client = Client(2, started.engine.context, {})
        request = Reserve(round, none, none, none, True, window)
        return {label: pool.order.tolist() for label, pool in opened(client, {}, request, range(5)).items()}

    first, second, both = arrived(1, (0.0, 0.5)), arrived(2, (0.5, 1.0)), arrived(3, (0.0, 1.0))
    for label in range(5):
        assert len(first[label]) > 0 < len(second[label])
        assert sorted(first[label] + second[label]) == sorted(both[label])
