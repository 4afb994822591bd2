from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedstrata as fs
from fedstrata.base.rng import torch_seeded
from fedstrata.clients.client import Client
from fedstrata.clients.training.local import LocalData, manual_sgd_of, train
from fedstrata.federation.messages import Fit, Weights
from fedstrata.objectives.base import CrossEntropy
from fedstrata.sampling.power_of_choice import LossReport
from fedstrata.sampling.sketches import Compress, pack, project, quantize


def one_fit(federation, client=0, **change):
    fit = federation.fits(client)[client]
    fields = {**vars(fit), "round": federation.round, **change}
    return federation.ask([client], Fit(**fields))[client]


def by_hand(federation, *, lr, steps, momentum=0.0, decay=0.0, clip=None):
    """Full-batch steps on client 0's data with PyTorch's own optimiser."""
    module = copy.deepcopy(federation.config.model.module).train()
    context = federation.engine.context
    where = torch.from_numpy(context.assignment[0])
    x, y = context.data.inputs(where), context.data.y_train[where]
    optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=momentum, weight_decay=decay)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    return {name: w.detach() for name, w in module.named_parameters()}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"momentum": 0.9},
        {"weight_decay": 0.3},
        {"clip": 0.05},
        {"clip": 100.0},
        {"momentum": 0.7, "weight_decay": 0.1, "clip": 0.2},
    ],
    ids=str,
)
def test_steps_are_those_of_pytorchs_sgd(tiny, settings):
    federation = tiny(batch_size=8, local_epochs=5, lr=0.3, **settings)
    reply = one_fit(federation)
    settings = {{"weight_decay": "decay"}.get(key, key): value for key, value in settings.items()}
    expected = by_hand(federation, lr=0.3, steps=5, **settings)
    for name, w in expected.items():
        torch.testing.assert_close(reply.weights.params[name], w, rtol=1e-5, atol=1e-6)
    assert (reply.steps, reply.seen, reply.samples) == (5, 40, 8)


def test_momentum_starts_anew_each_round(tiny):
    federation = tiny(batch_size=8, momentum=0.9, lr=0.3)
    first = one_fit(federation)
    federation.begin(2)
    second = one_fit(federation)  # the same samples in another order
    for name, w in second.weights.params.items():
        torch.testing.assert_close(w, first.weights.params[name], rtol=1e-5, atol=1e-6)


class TwoBiases(nn.Module):
    """Autograd gives both biases the very same gradient tensor."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 3)
        self.a, self.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.fc(x) + (self.a + self.b)


@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"weight_decay": 0.5}, {"clip": 0.01}], ids=str)
def test_parameters_whose_gradients_share_memory(tiny, settings):
    torch.manual_seed(0)
    federation = tiny(batch_size=8, local_epochs=3, lr=0.3, module=TwoBiases(), **settings)
    reply = one_fit(federation)
    settings = {{"weight_decay": "decay"}.get(key, key): value for key, value in settings.items()}
    for name, w in by_hand(federation, lr=0.3, steps=3, **settings).items():
        torch.testing.assert_close(reply.weights.params[name], w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("schedule", "rate"), [("constant", 0.4), ("inverse", 0.4 / 3), ("cosine", 0.2)])
def test_the_schedule_sets_the_rate_of_the_round(tiny, schedule, rate):
    federation = tiny(batch_size=8, lr=0.4, schedule=schedule, rounds=4)
    federation.begin(3)
    for name, w in by_hand(federation, lr=rate, steps=1).items():
        torch.testing.assert_close(one_fit(federation).weights.params[name], w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("size", "settings", "steps", "seen"),
    [
        (10, {"batch_size": 4, "local_epochs": 3}, 9, 30),
        (10, {"batch_size": 5, "local_epochs": 2}, 4, 20),
        (3, {"batch_size": 100, "local_epochs": 2}, 2, 6),
        (10, {"batch_size": 4, "local_steps": 7}, 7, 28),
        (10, {"batch_size": 4, "local_steps": 1}, 1, 4),
        (3, {"batch_size": 100, "local_steps": 5}, 5, 15),
        (1, {"batch_size": 4, "local_epochs": 2}, 2, 2),
    ],
)
def test_epochs_and_steps_are_exact(tiny, size, settings, steps, seen):
    reply = one_fit(tiny(sizes=[size, 8], **settings))
    assert (reply.steps, reply.seen, reply.samples) == (steps, seen, size)


def test_an_epoch_sees_every_sample_once_in_a_new_order(tiny):
    federation = tiny(sizes=[10])
    client = Client(0, federation.engine.context)
    data = LocalData(client, np.arange(10))
    batches = list(data.shuffled(fs.Training(batch_size=4, local_epochs=2), client.rng("batches", 1), pairs=False))
    x = torch.cat([batch.x for batch in batches])
    assert [len(batch.y) for batch in batches] == [4, 4, 2, 4, 4, 2]
    own = federation.engine.context.data.inputs(np.arange(10))
    for epoch in (x[:10], x[10:]):
        assert sorted(map(tuple, epoch.tolist())) == sorted(map(tuple, own.tolist()))
    assert not torch.equal(x[:10], x[10:])
    again = list(data.shuffled(fs.Training(batch_size=4, local_epochs=2), client.rng("batches", 1), pairs=False))
    assert torch.equal(torch.cat([batch.x for batch in again]), x)


def test_large_inputs_are_read_batch_by_batch_and_give_the_same(tiny, monkeypatch):
    whole = one_fit(tiny(sizes=[10]))
    monkeypatch.setattr("fedstrata.clients.training.local.GATHER_LIMIT", 0)
    parts = one_fit(tiny(sizes=[10]))
    assert all(torch.equal(w, parts.weights.params[name]) for name, w in whole.weights.params.items())


def test_a_part_of_the_samples_is_kept(tiny):
    federation = tiny(sizes=[400, 8], batch_size=400)
    reply = one_fit(federation, keep=0.3)
    assert abs(reply.samples - 120) < 5 * (400 * 0.3 * 0.7) ** 0.5
    assert reply.seen == reply.samples
    assert one_fit(federation, keep=0.3).samples == reply.samples
    federation.begin(2)
    assert one_fit(federation, keep=0.3).samples != reply.samples


def test_a_client_that_keeps_nothing_sends_back_what_it_got(tiny):
    federation = tiny()
    reply = one_fit(federation, keep=0.0)
    assert (reply.samples, reply.steps, reply.seen, reply.loss) == (0, 0, 0, 0.0)
    assert all(torch.equal(w, federation.weights.params[n]) for n, w in reply.weights.params.items())


def test_dropout_is_seeded_by_client_and_round(tiny):
    def trained(round, client):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(5, 20), nn.Dropout(0.5), nn.Linear(20, 3))
        federation = tiny(batch_size=8, module=module)
        torch.manual_seed(round * 10 + client)  # of no consequence
        federation.begin(round)
        return one_fit(federation, client).weights.params["0.weight"]

    assert torch.equal(trained(1, 0), trained(1, 0))
    assert not torch.equal(trained(1, 0), trained(2, 0))


def test_parameters_that_an_objective_does_not_train_stay(tiny):
    class HeadOnly(fs.Objective):
        def trains(self, name, model):
            return name in model.head_names

    federation = tiny(objective=HeadOnly(), weight_decay=0.1)
    params, before = one_fit(federation).weights.params, federation.weights.params
    moved = {name for name, w in params.items() if not torch.equal(w, before[name])}
    assert moved == set(federation.config.model.head_names) < set(before)


def test_the_correction_is_clipped_with_the_gradient(tiny):
    class Pulled(fs.Objective):
        def correction(self, params, context):
            return {name: torch.ones_like(w) for name, w in params.items()}

    federation = tiny(objective=Pulled(), batch_size=8, lr=0.3, clip=0.05)
    after, before = one_fit(federation).weights.params, federation.weights.params
    assert torch.cat([(after[name] - w).flatten() for name, w in before.items()]).norm() == pytest.approx(0.3 * 0.05)


# BatchNorm's buffers.


def norm():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def a_round(federation, state=None):
    method = fs.FedAvg()
    return method.run_round(federation, state or method.init(federation, federation.weights))[0]


def test_averaged_statistics_are_weighted_and_counters_take_the_largest(tiny):
    sizes = [8, 24]
    settings = {"sizes": sizes, "module": norm(), "clients_per_round": 2}
    alone = tiny(**settings)
    buffers = [one_fit(alone, client).weights.buffers for client in (0, 1)]
    # Two and six batches of four.
    assert [int(b["1.num_batches_tracked"]) for b in buffers] == [2, 6]
    after = a_round(tiny(**{**settings, "module": norm()})).weights.buffers
    for name in ("1.running_mean", "1.running_var"):
        torch.testing.assert_close(after[name], 0.25 * buffers[0][name] + 0.75 * buffers[1][name])
    assert after["1.num_batches_tracked"].dtype == torch.int64
    assert int(after["1.num_batches_tracked"]) == 6


def test_local_statistics_stay_with_their_client(tiny):
    federation = tiny(sizes=[8, 24], module=norm(), clients_per_round=2, batch_norm="local")
    initial = federation.weights.buffers
    state = a_round(federation)
    assert all(torch.equal(b, initial[name]) for name, b in state.weights.buffers.items())
    kept = [federation.store.get(client)["buffers"] for client in (0, 1)]
    assert [int(b["1.num_batches_tracked"]) for b in kept] == [2, 6]
    assert not torch.equal(kept[0]["1.running_mean"], kept[1]["1.running_mean"])
    federation.begin(2)
    a_round(federation, state)
    again = [federation.store.get(client)["buffers"] for client in (0, 1)]
    assert [int(b["1.num_batches_tracked"]) for b in again] == [4, 12]


# The law that ties a federation to one machine.


def test_full_participation_with_one_full_batch_step_is_one_centralised_step(tiny):
    sizes = [8, 24, 3, 40]
    federation = tiny(sizes=sizes, batch_size=1000, lr=0.5, clients_per_round=4)
    after = a_round(federation).weights.params
    module = copy.deepcopy(federation.config.model.module)
    data = federation.engine.context.data
    n = sum(sizes)
    F.cross_entropy(module(data.inputs(slice(0, n))), data.y_train[:n]).backward()
    for name, w in module.named_parameters():
        torch.testing.assert_close(after[name], w.detach() - 0.5 * w.grad, rtol=1e-6, atol=1e-6)


def test_training_does_not_touch_what_it_was_given(tiny):
    federation = tiny(module=norm(), local_epochs=2)
    sent = federation.weights
    copies = Weights({n: w.clone() for n, w in sent.params.items()}, {n: b.clone() for n, b in sent.buffers.items()})
    client = Client(0, federation.engine.context)
    outcome = train(client, sent, LocalData(client, np.arange(8)), round=1, message={})
    assert outcome.steps == 4
    assert all(torch.equal(w, copies.params[n]) for n, w in sent.params.items())
    assert all(torch.equal(b, copies.buffers[n]) for n, b in sent.buffers.items())


@pytest.mark.parametrize("chain", [False, True])
def test_bf16_trains_nearly_the_same_and_leaves_float32(tiny, chain):
    def fitted(precision):
        torch.manual_seed(0)
        more = {"module": nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))} if chain else {}
        return one_fit(tiny(batch_size=8, local_epochs=3, lr=0.3, precision=precision, **more))

    exact, rough = fitted("float32"), fitted("bf16")
    for name, w in rough.weights.params.items():
        assert w.dtype == torch.float32
        torch.testing.assert_close(w, exact.weights.params[name], rtol=0.05, atol=0.02)
    assert any(not torch.equal(w, exact.weights.params[name]) for name, w in rough.weights.params.items())


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        "fedavg",
        "scaffold",
        "fedprox",
        "feddyn",
        "moon",
        "fedrs",
        "fedlc",
        "fedbabu",
        "bsm-fedavg",
        "rebafl",
        "fedntd",
        "feddecorr",
        "fedvls",
        "fedsam",
        "fedlesam",
    ],
)
def test_bf16_is_near_float32_for_every_objective(method):
    small = {"name": "cnn", "channels": [4, 8], "hidden": 16}
    data = {"name": "digits", "limit": 400}
    table = {"method": method, "data": data, "partition": {"clients": 4}, "model": small}

    def model(precision):
        training = {"rounds": 2, "local_epochs": 1, "lr": 0.05, "precision": precision}
        return fs.run({**table, "training": training}).params

    def flat(params):
        return torch.cat([params[name].flatten() for name in sorted(params)])

    exact, rough = model("float32"), model("bf16")
    assert all(w.dtype == torch.float32 for w in rough.values())
    spec = fs.Experiment.from_table(table)
    moved = (flat(exact) - flat(fs.prepare(spec).config.model.params())).norm()
    error = (flat(rough) - flat(exact)).norm()
    # FedDecorr divides features by their standard deviations, and so also the rounding of features that hardly vary.
    assert 0 < error < (0.5 if method == "feddecorr" else 0.1) * moved


@pytest.mark.parametrize(
    "settings",
    [{}, {"momentum": 0.9}, {"weight_decay": 0.3}, {"momentum": 0.7, "weight_decay": 0.1, "clip": 0.2}],
    ids=str,
)
def test_a_chain_of_linear_layers_is_trained_by_hand_as_pytorch_does(tiny, settings):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    federation = tiny(batch_size=8, local_epochs=5, lr=0.3, module=module, **settings)
    reply = one_fit(federation)
    assert federation.engine.context.cached(manual_sgd_of) is not None
    settings = {{"weight_decay": "decay"}.get(key, key): value for key, value in settings.items()}
    for name, w in by_hand(federation, lr=0.3, steps=5, **settings).items():
        torch.testing.assert_close(reply.weights.params[name], w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch_norm", ["average", "local"])
def test_losses_and_gradients_are_those_under_the_statistics_in_use(batch_norm, tiny):
    """By hand on a client that has trained: with statistics of its own where it keeps them, else with those sent."""
    with torch_seeded(0, "model"):
        module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    federation = tiny(3, module=module, batch_norm=batch_norm, lr=0.1)
    federation.fit(0, 1)
    sent = Weights(federation.weights.params, {name: b + 1 for name, b in federation.weights.buffers.items()})
    told = federation.ask(range(3), LossReport(1, sent))
    squeezed = federation.ask(range(3), Compress(1, sent, 8, 0))
    by_hand = federation.config.model.clone()
    for client in range(3):
        kept = federation.store.get(client).get("buffers", {})
        assert bool(kept) == (batch_norm == "local" and client < 2)
        x, y = Client(client, federation.engine.context, {}).samples()
        with by_hand.loaded(sent.params, {**sent.buffers, **kept}, train=False) as params:
            loss = F.cross_entropy(by_hand(params, x), y)
            gradient = torch.autograd.grad(loss, list(params.values()))
        assert told[client].loss == pytest.approx(loss.item(), rel=1e-5)
        flat = project(torch.cat([g.reshape(-1) for g in gradient]), 0, federation.config.seed)
        centres, codes = quantize(flat.numpy(), 8)
        torch.testing.assert_close(squeezed[client].centres, torch.from_numpy(centres), rtol=1e-4, atol=1e-6)
        assert torch.equal(squeezed[client].codes, torch.from_numpy(pack(codes, len(centres))))


def test_a_last_sample_alone_joins_the_batch_before_it_under_batchnorm():
    indices = [list(range(11)), list(range(20, 32))]
    spec = fs.Experiment(
        partition=fs.Given(indices=indices), training={"rounds": 1, "batch_size": 5, "local_epochs": 2}
    )
    norm = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    (record,) = fs.run(spec, model=norm)
    assert record["clients_failed"] == 0
    assert record["samples"] == 2 * (11 + 12)


class FinishesWithBuffers(CrossEntropy):
    """What a user may write: the buffers at the end of training."""

    def client_final(self, trained, context):
        assert trained.model.current_buffers() == {}
        return {}, {name: w.clone() for name, w in trained.params.items()}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_finish_has_a_loaded_model_whatever_trained_it(precision):
    spec = {"method": {"objective": FinishesWithBuffers()}, "partition": {"clients": 3}}
    history = fs.run({**spec, "training": {"rounds": 1, "precision": precision}})
    assert history[-1]["clients_trained"] == 3


class FinishesInEvaluationMode(CrossEntropy):
    """A hook that computes features needs neither dropout nor the statistics of its batches."""

    def client_final(self, trained, context):
        assert not any(part.training for part in trained.model.module.modules())
        return {}, None


def test_the_last_hook_gets_the_model_in_evaluation_mode():
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 10))
    spec = {"method": {"objective": FinishesInEvaluationMode()}, "partition": {"clients": 3}}
    prepared = fs.prepare(fs.Experiment.from_table({**spec, "training": {"rounds": 2}}), model=module)
    with fs.Simulation(prepared) as simulation:
        assert [record["clients_failed"] for record in simulation] == [0, 0]
