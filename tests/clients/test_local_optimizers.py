"""The optimisers of local training: AdamW by hand, kept states, warm-up, accumulation, and what is refused."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.base.records import decode, encode
from fedstrata.clients.training.steps import OPTIMIZER, steps_of
from fedstrata.engines import local
from fedstrata.federation.messages import Fit
from fedstrata.federation.settings import Training
from fedstrata.objectives.fedprox import Proximal

DIGITS = {
    "data": {"name": "digits", "limit": 200},
    "partition": {"name": "iid", "clients": 4},
    "model": {"name": "mlp", "hidden": [8]},
    "evaluation": {"every": 0},
}


class Unstorable(torch.optim.SGD):
    """An optimiser with a state that cannot be sent."""

    def step(self, closure=None):
        super().step(closure)
        self.state[self.param_groups[0]["params"][0]]["how"] = object()


def spec_of(**sections) -> fs.Experiment:
    training = {"rounds": 2, "local_epochs": 1, **sections.pop("training", {})}
    return fs.Experiment.from_table({**DIGITS, **sections, "training": training})


def answer(federation, round, weights, client=0):
    """One client's answer in a round that starts at these weights."""
    federation.begin(round)
    return federation.ask([client], Fit(round, weights, {}, 1.0))[client]


def rounds_by_hand(federation, rounds, make, *, keep, steps=2, mu=0.0, clip=None):
    """Full-batch rounds of client 0 alone with an optimiser of PyTorch; after each round, the parameters."""
    module = copy.deepcopy(federation.config.model.module).train()
    context = federation.engine.context
    where = torch.from_numpy(context.assignment[0])
    x, y = context.data.inputs(where), context.data.y_train[where]
    optimizer, after = make(module.parameters()), []
    for _ in range(rounds):
        start = [p.detach().clone() for p in module.parameters()]
        if not keep:
            optimizer = make(module.parameters())
        for _ in range(steps):
            optimizer.zero_grad()
            proximal = sum((p - w).square().sum() for p, w in zip(module.parameters(), start, strict=True))
            (F.cross_entropy(module(x), y) + mu / 2 * proximal).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
        after.append({name: w.detach().clone() for name, w in module.named_parameters()})
    return after


def rounds_of_client(federation, rounds):
    weights, after = federation.weights, []
    for round in range(1, rounds + 1):
        weights = answer(federation, round, weights).weights
        after.append(weights.params)
    return after


def assert_equal_rounds(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        for name, w in theirs.items():
            torch.testing.assert_close(ours[name], w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("state", ["reset", "keep"])
@pytest.mark.parametrize("more", [{}, {"weight_decay": 0.3}, {"clip": 0.05}], ids=str)
def test_two_rounds_of_adamw_are_those_of_pytorch(tiny, state, more):
    adamw = {"name": "adamw", "betas": [0.8, 0.9], "eps": 1e-4}
    settings = {"local_steps": 2, "lr": 0.05, "optimizer": adamw, "optimizer_state": state, **more}
    federation = tiny(batch_size=8, **settings)

    def make(params):
        decay = more.get("weight_decay", 0.0)
        return torch.optim.AdamW(params, lr=0.05, betas=(0.8, 0.9), eps=1e-4, weight_decay=decay)

    expected = rounds_by_hand(federation, 2, make, keep=state == "keep", clip=more.get("clip"))
    assert_equal_rounds(rounds_of_client(federation, 2), expected)
    assert (OPTIMIZER in federation.store.get(0)) == (state == "keep")


def test_kept_and_reset_states_give_other_second_rounds(tiny):
    rounds = [
        rounds_of_client(tiny(batch_size=8, local_steps=2, lr=0.05, optimizer="adamw", optimizer_state=state), 2)
        for state in ("reset", "keep")
    ]
    (first, second), (same, other) = rounds
    assert all(torch.equal(w, same[name]) for name, w in first.items())
    assert any(not torch.allclose(w, other[name], atol=1e-3) for name, w in second.items())


@pytest.mark.parametrize("state", ["reset", "keep"])
def test_momentum_of_sgd_is_kept_too(tiny, state):
    settings = {"local_steps": 2, "lr": 0.3, "momentum": 0.9, "optimizer_state": state}

    def make(params):
        return torch.optim.SGD(params, lr=0.3, momentum=0.9)

    federation = tiny(batch_size=8, **settings)
    expected = rounds_by_hand(federation, 2, make, keep=state == "keep")
    assert_equal_rounds(rounds_of_client(federation, 2), expected)


def test_the_gradient_of_the_proximal_term_is_part_of_adamws_gradient(tiny):
    federation = tiny(batch_size=8, local_steps=3, lr=0.05, optimizer="adamw", objective=Proximal(mu=2.0))

    def make(params):
        return torch.optim.AdamW(params, lr=0.05, weight_decay=0.0)

    expected = rounds_by_hand(federation, 2, make, keep=False, steps=3, mu=2.0)
    assert_equal_rounds(rounds_of_client(federation, 2), expected)


@pytest.mark.parametrize("cls", ["RMSprop", "NAdam", "Adagrad"])
def test_any_optimiser_of_pytorch_can_be_named(tiny, cls):
    optimizer = {"name": f"torch.optim:{cls}", "eps": 1e-3}
    federation = tiny(batch_size=8, local_steps=2, lr=0.05, optimizer=optimizer, optimizer_state="keep")

    def make(params):
        return getattr(torch.optim, cls)(params, lr=0.05, eps=1e-3)

    assert_equal_rounds(rounds_of_client(federation, 2), rounds_by_hand(federation, 2, make, keep=True))


def test_the_learning_rate_of_a_kept_state_is_that_of_the_round(tiny):
    """A state remembers the rate of its last round."""
    settings = {"optimizer": "adamw", "optimizer_state": "keep", "lr": 0.4, "schedule": "inverse", "rounds": 9}
    training = Training(**settings)
    w = [torch.tensor([0.0])]
    first = steps_of(training, training.lr_at(1), w)
    first.step(w, [torch.tensor([1.0])])
    kept = decode(encode(first.state()))
    before = encode(kept)
    second = steps_of(training, training.lr_at(2), w, kept)
    second.step(w, [torch.tensor([1.0])])
    assert encode(kept) == before  # a refused answer must leave the old state as it was
    assert w[0].item() == pytest.approx(-0.4 - 0.2, rel=1e-6)  # a step of Adam on a constant gradient is as long as lr


def test_warm_up_by_hand():
    """Thirds of the rate of each round, then the rate itself."""
    assert [Training(lr=0.9, warmup=2).lr_at(round) for round in (1, 2, 3, 4)] == pytest.approx([0.3, 0.6, 0.9, 0.9])
    inverse = Training(lr=0.9, warmup=2, schedule="inverse")
    assert [inverse.lr_at(round) for round in (1, 2, 3)] == pytest.approx([0.3, 0.3, 0.3])
    assert Training(lr=0.9).lr_at(1) == 0.9


def test_clients_train_with_the_rate_of_the_warm_up(tiny):
    slow, half = tiny(batch_size=8, lr=0.2, warmup=1), tiny(batch_size=8, lr=0.1)
    ours, theirs = answer(slow, 1, slow.weights), answer(half, 1, half.weights)
    assert all(torch.equal(w, theirs.weights.params[name]) for name, w in ours.weights.params.items())


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("amount", [{"local_steps": 3}, {"local_epochs": 2}], ids=str)
@pytest.mark.parametrize("size", [12, 13, 29])
def test_accumulation_equals_steps_on_joined_batches(tiny, optimizer, amount, size):
    """Also where the last part is smaller than the others, and where a client has fewer samples than a step sees."""
    settings = {"sizes": [size, 4], "optimizer": optimizer, "lr": 0.01, **amount}
    joined, parts = tiny(2, batch_size=15, **settings), tiny(2, batch_size=5, accumulate=3, **settings)
    ours, theirs = (answer(federation, 1, federation.weights) for federation in (parts, joined))
    for name, w in theirs.weights.params.items():
        torch.testing.assert_close(ours.weights.params[name], w, rtol=0, atol=1e-6)
    assert (ours.steps, ours.seen, ours.samples) == (theirs.steps, theirs.seen, theirs.samples)
    assert ours.loss == pytest.approx(theirs.loss, abs=1e-6)


def test_accumulation_on_a_chain_of_linear_layers(tiny):
    """With joined batches, its gradients are handwritten."""
    module = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    settings = {"sizes": [23], "module": module, "lr": 0.1, "weight_decay": 0.1}
    joined, parts = tiny(1, batch_size=8, **settings), tiny(1, batch_size=2, accumulate=4, **settings)
    ours, theirs = (answer(federation, 1, federation.weights) for federation in (parts, joined))
    for name, w in theirs.weights.params.items():
        torch.testing.assert_close(ours.weights.params[name], w, rtol=0, atol=1e-6)


def test_no_part_of_a_batch_is_a_single_sample_where_batchnorm_normalises(tiny):
    """Of seven samples in parts of at most three, one would be left over; of three in parts of two, too."""
    seen = []

    class Counting(nn.Identity):
        def forward(self, x):
            seen.append(len(x))
            return x

    module = nn.Sequential(Counting(), nn.BatchNorm1d(5), nn.Linear(5, 3))
    for size, batch, parts in ((7, 3, [3, 2, 2]), (3, 2, [3])):
        seen.clear()
        federation = tiny(1, sizes=[size], module=copy.deepcopy(module), batch_size=batch, accumulate=3)
        federation.fit()
        assert seen == parts


def test_samples_of_accumulated_steps_are_counted():
    training = Training(local_steps=3, batch_size=10, accumulate=4)
    assert (training.samples_per_step, training.sample_gradients(500), training.sample_gradients(25)) == (40, 120, 75)


def last_bytes(spec, **how):
    history = fs.run(spec, **how)
    return {name: w.numpy().tobytes() for name, w in history.params.items()}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_a_kept_state_survives_a_resumed_run(tmp_path, model):
    """Convolutions have another memory format in memory than in a checkpoint."""

    def spec(rounds):
        training = {"rounds": rounds, "local_steps": 2, "batch_size": 8, "optimizer": "adamw", "lr": 0.01}
        return spec_of(
            model=model,
            training={**training, "local_epochs": None, "optimizer_state": "keep", "clients_per_round": 3},
            evaluation={"every": 0, "checkpoint_every": 1},
        )

    whole = last_bytes(spec(4))
    fs.run(spec(2), out=tmp_path / "run")
    assert last_bytes(spec(4), out=tmp_path / "run", resume=True) == whole


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedprox", "sfl"])
def test_a_kept_state_gives_the_same_bytes_with_workers(monkeypatch, method):
    monkeypatch.setattr(local, "STARTING_PAYS", -1.0)
    monkeypatch.setattr(local, "ASKING_PAYS", -1.0)
    training = {"rounds": 3, "clients_per_round": 3, "optimizer": "adamw", "optimizer_state": "keep", "lr": 0.01}
    alone, two = (last_bytes(spec_of(method=method, training={**training, "workers": n})) for n in (1, 2))
    assert alone == two
    assert last_bytes(spec_of(method=method, training={**training, "optimizer_state": "reset"})) != alone


@pytest.mark.slow
def test_fine_tuning_begins_without_a_state_and_leaves_the_kept_one(start):
    training = {"optimizer": "adamw", "optimizer_state": "keep", "lr": 0.01}
    models = []
    for more in ({}, {"client_test": 0.3, "fine_tune": 2, "every": 1}):
        held = {"client_test": 0.3} | more
        simulation = start(spec_of(training=training, evaluation={"every": 0, **held}))
        with simulation:
            simulation.step()
            simulation.step()
            models.append(simulation.state.weights.params)
    assert all(torch.equal(w, models[1][name]) for name, w in models[0].items())


@pytest.mark.slow
def test_only_the_trained_part_of_a_model_moves(start):
    """The weight decay of FedBABU's clients does not reach the head."""
    training = {"optimizer": "adamw", "optimizer_state": "keep", "weight_decay": 0.5}
    simulation = start(spec_of(method="fedbabu", training=training))
    with simulation:
        before = simulation.state.weights.params
        simulation.step()
        after = simulation.step() and simulation.state.weights.params
    head = simulation.config.model.head_names
    assert all(torch.equal(w, before[name]) == (name in head) for name, w in after.items())


@pytest.mark.long
@pytest.mark.parametrize("method", ["fedavg", "fedprox", "moon", "rebafl", "fedrs"])
def test_methods_learn_the_digits_with_adamw(method):
    spec = fs.Experiment.from_table(
        {
            "data": "digits",
            "partition": {"name": "dirichlet", "alpha": 0.5, "clients": 10},
            "method": method,
            "training": {
                "rounds": 10, "local_epochs": 2, "optimizer": "adamw", "weight_decay": 0.01, "lr": 0.003,
                "optimizer_state": "keep", "warmup": 2, "batch_size": 8, "accumulate": 2,
            },
            "evaluation": {"every": 10},
        }
    )  # fmt: skip
    assert fs.run(spec)[-1]["accuracy"] > 0.85


WRONG = [
    (
        {"optimizer": "adam"},
        r"^training\.optimizer\.name = 'adam': is not a known local optimiser; did you mean 'adamw'",
    ),
    ({"optimizer": "torch.optim:Nothing"}, r"^training\.optimizer\.name = .* .*'Nothing'"),
    ({"optimizer": "torch.nn:Linear"}, r"^training\.optimizer\.name = .* is not a subclass of torch"),
    ({"optimizer": {"name": "adamw", "beta": 1}}, r"^training\.optimizer\.beta = 1: is not a known key"),
    ({"optimizer": {"name": "adamw", "betas": [0.9, 1.0]}}, r"^training\.optimizer\.betas"),
    ({"optimizer": {"name": "torch.optim:Adam", "lr": 1}}, r"^training\.optimizer\.lr = 1: .* training\.lr"),
    ({"optimizer": {"name": "torch.optim:Adam", "beta": 1}}, r"^training\.optimizer = 'torch.optim:Adam'"),
    ({"optimizer": "adamw", "momentum": 0.9}, r"^training\.momentum = 0\.9: is not an argument of adamw"),
    ({"optimizer": "torch.optim:Rprop", "weight_decay": 0.1}, r"^training\.weight_decay = 0\.1: is not an argument"),
    ({"optimizer": "torch.optim:LBFGS"}, r"^training\.optimizer = .*: the optimiser's first step fails with TypeError"),
    ({"optimizer": "torch.optim:Muon"}, r"^training\.optimizer = 'torch.optim:Muon': does not accept"),
    ({"optimizer_state": "keep"}, r"^training\.optimizer_state = 'keep': sgd without momentum does not"),
    ({"accumulate": 0}, r"^training\.accumulate = 0"),
    ({"warmup": -1}, r"^training\.warmup = -1"),
]


@pytest.mark.parametrize(("training", "message"), WRONG, ids=str)
def test_what_is_refused_before_the_first_round(training, message):
    with pytest.raises(SpecError, match=message) as caught:
        fs.prepare(spec_of(training=training))
    assert "\n" not in str(caught.value)


def test_a_state_that_cannot_be_stored_is_refused(monkeypatch):
    unstorable = f"{__name__}:Unstorable"
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(Unstorable=Unstorable))
    fs.prepare(spec_of(training={"optimizer": unstorable}))
    with pytest.raises(SpecError, match=r"^training\.optimizer_state = 'keep': the state of .* cannot be stored"):
        fs.prepare(spec_of(training={"optimizer": unstorable, "optimizer_state": "keep"}))


BATCHNORM = {"model": "resnet20"}
NEEDS = {
    "scaffold": ({"method": "scaffold"}, "SCAFFOLD's control variates"),
    "feddyn": ({"method": "feddyn"}, "FedDyn treats the update"),
    "an objective": ({"method": {"name": "fedsts", "strata": 2, "objective": "feddyn"}}, "FedDyn treats the update"),
    "fedtan": ({"method": "fedtan", **BATCHNORM}, "FedTAN's clients"),
    "stratify": ({"method": "stratify"}, "Stratify's clients take plain SGD steps"),
    "single samples": ({"method": {"name": "stratify", "mode": "single"}}, "Stratify's clients take plain SGD steps"),
    "updates": (
        {"method": {"name": "fedsts", "strata": 2, "refresh": "participants", "gradients": "updates"}},
        "gradients can be computed from updates only if",
    ),
}


@pytest.mark.parametrize("case", NEEDS)
def test_methods_whose_formulas_need_sgd_refuse_others(case):
    sections, reason = NEEDS[case]
    with pytest.raises(SpecError, match=rf"^training\.optimizer = 'adamw': {reason}.*'sgd'"):
        fs.prepare(spec_of(**sections, training={"optimizer": "adamw"}))
    fs.prepare(spec_of(**sections))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fedtan", "stratify"])
def test_methods_with_their_own_steps_refuse_accumulation_and_kept_states(case):
    sections, reason = NEEDS[case]
    with pytest.raises(SpecError, match=rf"^training\.accumulate = 2: {reason}.* Use accumulate = 1"):
        fs.prepare(spec_of(**sections, training={"accumulate": 2}))
    with pytest.raises(SpecError, match=rf"^training\.optimizer_state = 'keep': {reason}.* Use .* = 'reset'"):
        fs.prepare(spec_of(**sections, training={"momentum": 0.9, "optimizer_state": "keep"}))


@pytest.mark.slow
def test_scaffold_divides_by_its_steps_of_accumulated_batches(tiny):
    """c_k⁺ = c_k − c + (w_t − w) / (K η), and in one step (w_t − w) / η is the mean gradient."""
    spec = spec_of(
        method="scaffold",
        partition={"name": "iid", "clients": 2},
        training={"local_epochs": None, "local_steps": 1, "batch_size": 7, "accumulate": 40},
    )
    joined = spec.replace(training={"batch_size": 280, "accumulate": 1})
    ours, theirs = (fs.run(each).params for each in (spec, joined))
    for name, w in theirs.items():
        np.testing.assert_allclose(ours[name], w, rtol=0, atol=1e-6)


def test_specs_without_the_new_settings_say_nothing_of_them():
    new = {"accumulate", "optimizer", "optimizer_state", "warmup"}
    assert not new & Training(optimizer="sgd", warmup=0).to_spec().keys()
    optimizer = {"name": "adamw", "betas": [0.9, 0.98], "eps": 1e-8}
    spec = spec_of(training={"optimizer": optimizer, "optimizer_state": "keep", "warmup": 3, "accumulate": 2})
    assert {key: spec.to_spec()["training"][key] for key in new} == {
        "accumulate": 2, "optimizer": optimizer, "optimizer_state": "keep", "warmup": 3,
    }  # fmt: skip
    own = spec_of(training={"optimizer": {"name": "torch.optim:RMSprop", "alpha": 0.9}})
    assert own.to_spec()["training"]["optimizer"] == {"name": "torch.optim:RMSprop", "alpha": 0.9}
    for each in (spec, own):
        assert fs.Experiment.from_table(each.to_spec()) == each
