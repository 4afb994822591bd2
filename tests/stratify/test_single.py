"""Single-sample Stratify is centralised SGD with batches of one in the order of the schedule, and survives faults."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from quick import others_long
from torch import nn

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.federation.engine import HopByHop
from fedstrata.models.zoo import MLP
from fedstrata.runs.preparation import prepare
from fedstrata.stratify.messages import StepsReply
from fedstrata.stratify.roster import Roster
from fedstrata.stratify.schedule import Holders
from fedstrata.stratify.single import Route

PARTITIONS = {
    "#C=1": {"name": "classes", "per_client": 1},
    "dirichlet": {"name": "dirichlet", "alpha": 0.3},
    "iid": {"name": "iid"},
}


@pytest.fixture(scope="module")
def balanced() -> fs.Dataset:
    """200 samples of five classes, 40 each."""
    generator = np.random.default_rng(0)
    y = np.arange(200) % 5
    x = generator.normal(size=(200, 8)) + np.eye(5, 8)[y]
    return fs.from_arrays(x, y, x[:50], y[:50])


@pytest.fixture(scope="module")
def skewed() -> fs.Dataset:
    """Three classes of 120, 50 and 10 samples."""
    generator = np.random.default_rng(1)
    y = generator.permutation(np.repeat([0, 1, 2], [120, 50, 10]))
    x = generator.normal(size=(180, 6)) + np.eye(3, 6)[y]
    return fs.from_arrays(x, y, x[:30], y[:30])


class Spoilt(fs.Dataset):
    """The same data, of which one sample turns out to be no number when it is read."""

    def __init__(self, data: fs.Dataset) -> None:
        super().__init__(*(getattr(data, key) for key in data.__dataclass_fields__))

    def inputs(self, indices, split="train"):
        found = super().inputs(indices, split)
        if split == "train" and torch.is_tensor(indices):
            found[indices == 3] = float("nan")
        return found


class Listening:
    """An engine that notes every task and its reply on the way."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.heard = engine, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def hop(self, client, task, weights):
        outcome = self.engine.hop(client, task, weights)
        self.heard.append((client, task, outcome))
        return outcome

    def relay(self, kind, weights):
        return HopByHop(self, weights)


def spec_of(partition: str | dict, clients: int = 5, availability: object = "always", **rest: Any) -> fs.Experiment:
    split = PARTITIONS[partition] if isinstance(partition, str) else partition
    training = {"lr": 0.05, **rest.pop("training", {})}
    table = {"partition": {"clients": clients, **split}, "training": training, "model": {"name": "mlp", "hidden": [16]}}
    method = {"name": "stratify", "mode": "single", **rest}
    return fs.Experiment.from_table(table | {"method": method, "availability": availability})


def listened(start, spec, data, model=None):
    """A started run in which clients work one by one, and what they do is noted."""
    training = spec.training.model_copy(update={"execution": "per-client"})
    started = start(spec.model_copy(update={"training": training}), data, model)
    started.federation.engine = Listening(started.federation.engine)
    return started


def order_of(started, spec, data) -> list[int]:
    """The samples of an epoch in the order in which they trained, from the tasks and the clients' pools."""
    assignment = prepare(spec, data=data).assignment
    used: dict[tuple[int, int], int] = {}
    order = []
    for client, task, outcome in started.federation.engine.heard:
        pools = started.store.get(client)["stratify"].pools
        for label, missing in zip(task.labels.tolist(), outcome[1].missing.tolist(), strict=True):
            if not missing:
                place = used.get((client, label), 0)
                assert pools[label].refills == 0
                order.append(int(assignment[client][pools[label].order[place]]))
                used[client, label] = place + 1
    return order


def trained_labels(started) -> np.ndarray:
    """How often each label trained in the epoch."""
    labels: list[int] = []
    for client, task, outcome in started.federation.engine.heard:
        known = started.store.get(client).get("placeholders")
        trained = task.labels[~outcome[1].missing].tolist()
        labels += trained if known is None else [known[p] for p in trained]
    return np.bincount(labels)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("partition", "chunk_size"),
    others_long(
        [("#C=1", 5), ("dirichlet", 1), ("dirichlet", 5), ("dirichlet", 50), ("iid", 5)],
        [("#C=1", 5), ("dirichlet", 1), ("iid", 5)],
    ),
)
def test_an_epoch_is_centralised_sgd_sample_by_sample(start, balanced, partition, chunk_size):
    spec = spec_of(partition, chunk_size=chunk_size, training={"weight_decay": 0.01})
    started = listened(start, spec, balanced)
    module = start(spec, balanced).config.model.module
    metrics = started.step()
    order = order_of(started, spec, balanced)
    assert sorted(order) == list(range(200))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, weight_decay=0.01)
    losses = []
    for i in order:
        optimizer.zero_grad()
        loss = F.cross_entropy(module(balanced.inputs(np.array([i]))), balanced.y_train[i : i + 1])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    for name, tensor in module.named_parameters():
        got = started.state.weights.params[name]
        assert (got - tensor).norm() / tensor.norm() < 1e-5
    assert metrics["train_loss"] == pytest.approx(np.mean(losses), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("model", [None, "dropout", "clip"])
def test_one_pass_gives_the_same_bits_and_the_same_books(start, balanced, model):
    def module() -> nn.Module | None:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 12), nn.Dropout(0.5), nn.Linear(12, 5)) if model == "dropout" else None

    found = []
    for execution in ("fused", "per-client"):
        training = {"execution": execution} | ({"clip": 0.5} if model == "clip" else {})
        started = start(spec_of("dirichlet", training=training), balanced, module())
        books = [started.step() for _ in range(2)]
        found.append((started.state.weights.params, books))
    (fused, fused_books), (single, single_books) = found
    assert all(torch.equal(fused[name], single[name]) for name in fused)
    for one, other in zip(fused_books, single_books, strict=True):
        assert one.pop("train_loss") == pytest.approx(other.pop("train_loss"), rel=1e-6)
        assert one == other


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "frequencies", "selection"),
    [
        ("capped", [50, 50, 10], "uniform"),
        ("uncapped", [120, 50, 10], "weighted"),
        ("uniform", [60, 60, 60], "uniform"),
        pytest.param("capped", [50, 50, 10], "weighted", marks=pytest.mark.long),
        pytest.param("uncapped", [120, 50, 10], "uniform", marks=pytest.mark.long),
        pytest.param("uniform", [60, 60, 60], "weighted", marks=pytest.mark.long),
    ],
)
def test_labels_train_as_often_as_the_schedule_says(start, skewed, rule, frequencies, selection):
    spec = spec_of({"name": "dirichlet", "alpha": 0.5}, schedule=rule, selection=selection, retain=1.0)
    started = listened(start, spec, skewed)
    metrics = started.step()
    assert trained_labels(started).tolist() == frequencies
    assert metrics["samples"] == metrics["scheduled"] == sum(frequencies)
    missing = sum(int(outcome[1].missing.sum()) for _, _, outcome in started.federation.engine.heard)
    refills = [pool.refills for k in started.store.clients for pool in started.store.get(k)["stratify"].pools.values()]
    # Pools did run empty, so that the laws above were put to the test.
    assert missing > 0 or rule == "capped"
    assert max(refills) >= (5 if rule == "uniform" else 0)


@pytest.mark.slow
def test_a_longer_chunk_saves_hops_and_a_task_never_leaves_its_chunk(start, balanced):
    hops = {}
    for chunk_size in (1, 5, 50):
        started = listened(start, spec_of("dirichlet", chunk_size=chunk_size, retain=1.0), balanced)
        metrics = started.step()
        hops[chunk_size] = metrics["hops"]
        assert metrics["hops"] == metrics["transfers"] == len(started.federation.engine.heard)
        assert metrics["transfers_per_client"] == metrics["hops"] / 5
        assert max(len(task.labels) for _, task, _ in started.federation.engine.heard) <= chunk_size
    # At most a hop a client and label in vain, to one that ran out meanwhile.
    assert 200 <= hops[1] <= 225
    assert hops[1] > hops[5] > hops[50]


def test_what_was_missed_comes_back_at_random_places_of_what_is_left(start, balanced):
    """Algorithm 3, line 17, with forty positions of one placeholder and a thousand of another."""
    federation = start(spec_of("iid"), balanced).federation
    holders = Holders(np.array([0, 1]), np.array([0, 1, 2]), np.array([0, 0]), np.array([9, 9]))
    route = Route(Roster(federation, holders), np.zeros(1000, dtype=np.int64), chunk_size=10, retain=1.0)
    for _ in range(40):
        route._put_back(np.array([1]))
    back = np.flatnonzero(route._left == 1)
    assert (len(back), len(route._left)) == (40, 1040)
    assert back.mean() == pytest.approx(520, abs=150)
    assert back.std() == pytest.approx(300, abs=60)


def test_a_pool_is_refilled_by_the_first_task_that_needs_it_only(start, balanced):
    federation = start(spec_of("iid"), balanced).federation
    holders = Holders(np.array([0, 1]), np.array([0, 1, 2]), np.array([0, 0]), np.array([9, 9]))
    roster = Roster(federation, holders)
    route = Route(roster, np.array([0, 1, 1, 0, 1]), chunk_size=1, retain=1.0)
    roster.refill(1, 3)
    assert route.open()
    refills = []
    for position, (_, task) in enumerate(route.tasks()):
        refills.append(task.refill.tolist())
        served = torch.zeros(len(task.labels), dtype=torch.bool)
        route.on_reply(position, StepsReply(served, torch.empty(0, dtype=torch.int64), torch.zeros(())))
    assert refills == [[], [1], [], [], []]


@pytest.mark.parametrize("served", [0, 1])
def test_a_pool_that_is_empty_right_after_a_refill_is_not_refilled_again(start, balanced, served):
    """The client serves none of two positions, or one. Only in the second case can its pool be refilled again."""
    federation = start(spec_of("iid"), balanced).federation
    holders = Holders(np.array([0, 1]), np.array([0, 1, 2]), np.array([0, 0]), np.array([9, 9]))
    roster = Roster(federation, holders)
    route = Route(roster, np.array([1, 1]), chunk_size=2, retain=1.0)
    roster.refill(1, 2)
    assert route.open()
    ((client, task),) = list(route.tasks())
    assert (client, task.refill.tolist()) == (0, [1])
    missing = torch.tensor([served == 0, True])
    route.on_reply(0, StepsReply(missing, torch.tensor([1]), torch.zeros(())))
    assert roster.available.tolist() == [True, False]
    assert roster.present.tolist() == [True, served == 1]
    assert route._left.tolist() == [1] * (2 - served)


def test_the_next_client_is_known_before_the_reply(start, balanced):
    """Algorithm 3, line 14: what a client reports cannot change the task after the next any more, only later ones."""
    started = start(spec_of("iid", clients=2, chunk_size=1), balanced)
    federation = started.federation
    federation.begin(1)
    wanted = np.zeros(6, dtype=np.int64)
    route = Route(Roster(federation, started.state.holders), wanted, chunk_size=1, retain=1.0)
    tasks = route.tasks()
    from fedstrata.stratify.messages import StepsReply

    first, _ = next(tasks)
    nothing = torch.tensor([True]), torch.tensor([0]), torch.zeros(())
    ahead = route._queue[0].client
    route.on_reply(0, StepsReply(*nothing))
    assert len(route._left) == 6 - 2 + 1  # two were given out, one came back
    second, _ = next(tasks)
    assert second == ahead
    route.on_reply(1, StepsReply(torch.tensor([second == first]), torch.empty(0).long(), torch.zeros(())))
    rest = []
    for client, _ in tasks:
        rest.append(client)
        route.on_reply(1 + len(rest), StepsReply(torch.tensor([False]), torch.empty(0).long(), torch.zeros(())))
    # From the third task on the first client is not asked for that label again.
    assert first not in rest[1:]
    assert len(rest) == 5 + (second == first)


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["fused", "per-client"])
def test_a_failed_hop_costs_one_task_and_not_the_epoch(start, balanced, execution):
    """The client with the bad sample is left out from then on; others train what it would have."""
    spec = spec_of("iid", clients=4, training={"execution": execution}, schedule="uncapped")
    started = start(spec, Spoilt(balanced))
    metrics = started.step()
    assert metrics["clients_failed"] == 1
    assert metrics["samples"] == 200
    assert all(bool(torch.isfinite(w).all()) for w in started.state.weights.params.values())
    assert len(started.federation.events) == 1
    assert np.isfinite(metrics["train_loss"])


@pytest.mark.slow
def test_whoever_is_away_is_done_without(start, balanced, trace):
    spec = spec_of("iid", clients=4, availability=trace({0: [1], 1: [1], 3: [1]}))
    started = start(spec, balanced)
    metrics = started.step()
    assert metrics["clients_dropped"] == 1
    assert metrics["samples"] == 200


@pytest.mark.slow
def test_a_label_whose_last_holder_is_away_is_skipped_and_noted(start, balanced, trace):
    spec = spec_of("#C=1", availability=trace({0: [1], 1: [1], 2: [1], 4: [1]}))
    started = listened(start, spec, balanced)
    assert started.step()["samples"] == 160
    kinds = [event["kind"] for event in started.federation.events]
    assert kinds.count("label skipped") == 1
    assert sorted(trained_labels(started).tolist()) == [0, 40, 40, 40, 40]


@pytest.mark.slow
def test_hops_take_their_time_one_after_another(start, balanced):
    timed = {"name": "always", "deadline": 1.0, "seconds_per_sample": 0.01}
    metrics = start(spec_of("iid", availability=timed, chunk_size=1), balanced).step()
    assert metrics["simulated_seconds"] == pytest.approx(0.01 * metrics["hops"])


class Raises(nn.Module):
    """A model with a bug."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            raise ZeroDivisionError("on purpose")
        logits: torch.Tensor = self.head(x)
        return logits


def test_a_bug_in_the_model_is_told_before_the_first_round(start, balanced):
    with pytest.raises(SpecError, match=r"model = 'Raises': fails in training mode .* ZeroDivisionError: on purpose"):
        start(spec_of("iid"), balanced, Raises())


@pytest.mark.slow
def test_hybrid_trains_batches_first_and_then_every_part_of_the_stream(start, balanced):
    # Every client holds ten samples of each label.
    quarters = {"name": "given", "indices": np.arange(200).reshape(4, 50).tolist()}
    table = spec_of(quarters, clients=4, training={"rounds": 6, "batch_size": 10}).to_spec()
    table["method"] |= {"mode": "hybrid", "pretraining": 2, "stream": 0.4}
    spec = fs.Experiment.from_table(table)
    started = listened(start, spec, balanced)
    assignment = prepare(spec, data=balanced).assignment
    early, late = set(), []
    for round in range(1, 7):
        started.federation.engine.heard.clear()
        metrics = started.step()
        if round <= 2:
            kept = {k: started.store.get(k)["stratify"] for k in range(4)}
            used = np.concatenate([assignment[k][kept[k].places] for k in range(4)])
            early |= set(used.tolist())
            assert metrics["hops"] == 0
            assert metrics["samples"] == 120  # 60 %
        else:
            late.append(set(order_of(started, spec, balanced)))
            assert metrics["exchanges"] == 0
            assert metrics["samples"] == 20
    # Six of ten samples were there, and one arrived in each of the four rounds.
    assert len(early) == 120
    assert all(len(part) == 20 for part in late)
    assert len(set.union(early, *late)) == 200


@pytest.mark.slow
def test_hybrid_keeps_on_learning(balanced):
    spec = spec_of("#C=1", training={"rounds": 8, "batch_size": 10}).to_spec()
    spec["method"] |= {"mode": "hybrid"}
    history = fs.run(fs.Experiment.from_table(spec), data=balanced)
    assert [record["hops"] > 0 for record in history] == [False] * 4 + [True] * 4
    assert history[-1]["loss"] < history[3]["loss"]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"training": {"momentum": 0.9}}, "training.momentum"),
        ({"method": {"server": "adam"}}, "method.server"),
        ({"method": {"mode": "hybrid", "pretraining": 20}}, "method.pretraining"),
        ({"method": {"retain": 0.0}}, "method.retain"),
        ({"method": {"chunk_size": 0}}, "method.chunk_size"),
        ({"method": {"mode": "double"}}, "method.mode"),
    ],
)
def test_what_does_not_fit_is_refused(balanced, change, key):
    table = spec_of("iid").to_spec()
    for section, entries in change.items():
        table[section] |= entries
    with pytest.raises(SpecError) as caught:
        prepare(fs.Experiment.from_table(table), data=balanced)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("rounds", "remedy"),
    [
        (1, "mode 'single'. Set training.rounds to at least 2."),
        (3, "mode 'single'. Set method.pretraining to at most 2, or set training.rounds to at least 4."),
    ],
)
def test_the_remedy_for_too_few_rounds_is_possible(balanced, rounds, remedy):
    table = spec_of("iid").to_spec()
    table["training"]["rounds"] = rounds
    table["method"] |= {"mode": "hybrid", "pretraining": rounds}
    with pytest.raises(SpecError, match=remedy.replace(".", r"\.") + "$"):
        prepare(fs.Experiment.from_table(table), data=balanced)


def test_batchnorm_is_refused(balanced):
    module = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))
    with pytest.raises(SpecError, match="BatchNorm cannot normalise"):
        prepare(spec_of("iid"), data=balanced, model=module)


class Lying(Listening):
    """Client 1 answers for what it was not asked."""

    def __init__(self, engine: Any, lie: dict[str, torch.Tensor]) -> None:
        super().__init__(engine)
        self.lie = lie

    def hop(self, client, task, weights):
        moved, reply = super().hop(client, task, weights)
        return moved, (dataclasses.replace(reply, **self.lie) if client == 1 else reply)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lie", "problem"),
    [
        ({"missing": torch.zeros(7, dtype=torch.bool)}, "missing has shape (7,) and type torch.bool, but must"),
        (
            {"missing": torch.zeros(1, dtype=torch.uint8)},
            "missing has shape (1,) and type torch.uint8, but must have shape (1,) and type torch.bool",
        ),
        (
            {"exhausted": torch.zeros(1)},
            "exhausted has shape (1,) and type torch.float32, but must have shape (-1,) and type torch.int64",
        ),
        ({"loss": torch.zeros(1)}, "the loss must be a scalar"),
        ({"loss": torch.tensor(torch.nan)}, "NaN or infinity"),
    ],
)
def test_an_absurd_answer_is_not_believed(start, balanced, lie, problem):
    """Who sends one trains no more in this epoch: its step does not count, and others train what it would have."""
    spec = spec_of("iid", clients=4, chunk_size=1, schedule="uncapped", training={"execution": "per-client"})
    started = start(spec, balanced)
    started.federation.engine = Lying(started.federation.engine, lie)
    metrics = started.step()
    assert (metrics["samples"], metrics["clients_failed"], metrics["clients_returned"]) == (200, 1, 3)
    (event,) = started.federation.events
    assert (event["kind"], event["clients"]) == ("refused", [1])
    assert problem in event["reason"]
    assert [client for client, *_ in started.federation.engine.heard].count(1) == 1
    assert "stratify" not in started.store.get(1)


@pytest.mark.slow
def test_an_epoch_of_mnist_is_planned_to_the_end(start):
    generator = np.random.default_rng(0)
    counts = generator.multinomial(600, np.ones(10) / 10, size=(10,))
    offsets = np.arange(11) * 10
    holders = Holders(np.arange(10), offsets, np.tile(np.arange(10), 10), counts.T.reshape(-1) * 10)
    data = fs.from_arrays(generator.normal(size=(20, 2)), np.arange(20) % 10, [[0.0, 0.0]], [0])
    federation = start(spec_of("iid", clients=10), data).federation
    route = Route(Roster(federation, holders), generator.integers(0, 10, 60_000), chunk_size=5, retain=0.5)
    while len(route._left):
        route._enqueue_chunk()
    assert sum(len(task.places) for task in route._queue) == 60_000


@pytest.mark.slow
def test_an_mlp_learns_digits_from_one_class_a_client():
    spec = fs.Experiment.from_table(
        {
            "partition": {"name": "classes", "per_client": 1, "clients": 10},
            "method": {"name": "stratify", "mode": "single"},
            "model": MLP(hidden=(32,)),
            "training": {"rounds": 2, "lr": 0.03},
        }
    )
    assert fs.run(spec)[-1]["accuracy"] > 0.9


def test_a_chunk_is_no_larger_than_memory():
    spec = spec_of("iid", clients=30_000, chunk_size=100_000)
    data = fs.from_arrays(np.zeros((30_000, 1)), np.arange(30_000) % 2, [[0.0]], [0])
    with pytest.raises(
        SpecError, match=r"chunk_size = 100000: needs too much memory with 30,000 clients\. Set .* to at most 71582"
    ):
        fs.prepare(spec, data=data)
