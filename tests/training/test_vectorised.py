"""Clients that are trained side by side: what the plain loop gives, for every objective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import fedstrata as fs
from fedstrata import checkpoint, records
from fedstrata.errors import SpecError
from fedstrata.federation.messages import Fit, FitReply
from fedstrata.handlers import fit
from fedstrata.objectives.base import OBJECTIVES, Batch, Context, Objective, PerSample
from fedstrata.objectives.feddyn import Dynamic
from fedstrata.rng import torch_seeded
from fedstrata.training import stacked, vectorised

SIZES = [9, 17, 5, 12, 3, 16, 1]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


class Exact(nn.Module):
    """A module in float64, in which the order of a sum hardly shows."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.double())


def cnn(*norm: nn.Module) -> nn.Module:
    convolution = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)
    return nn.Sequential(
        nn.Unflatten(1, (1, 1, 5)), convolution, *norm, nn.MaxPool2d((1, 2)), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    )


def trained(
    tiny: Callable[..., Any], vectorise: bool, module: Callable[[], nn.Module] = mlp, rounds: int = 3, **settings: Any
) -> tuple[list[dict[int, FitReply]], Any]:
    """Replies of some rounds, in which everybody starts at the same model and keeps a state."""
    with torch_seeded(0, "model"):
        made = module()
    federation = tiny(module=made, vectorise=vectorise, **{"sizes": SIZES, "lr": 0.2, "local_epochs": 2} | settings)
    objective, config = federation.engine.context.objective, federation.config
    message = objective.message(objective.init(federation.weights, config))
    found = []
    for round in range(1, rounds + 1):
        federation.begin(round)
        # The last clients come later, so that some have a state and others do not.
        clients = range(len(config.sizes) - (2 if round == 1 and rounds > 1 else 0))
        request = Fit(round, federation.weights, message, 0.8 if round == 2 else 1.0, 1.0)
        found.append(federation.ask(dict.fromkeys(clients, request)))
    return found, federation


def same(a: Any, b: Any, atol: float = 1e-5) -> None:
    """Trees of one form whose tensors are equal to ``atol``."""
    (left, form), (right, other) = tree_flatten(a), tree_flatten(b)
    assert form == other
    for x, y in zip(left, right, strict=True):
        if isinstance(x, Tensor):
            torch.testing.assert_close(x, y, rtol=0, atol=atol)
            assert x.stride() == y.stride()
        else:
            assert x == y


@pytest.fixture
def compare(tiny, monkeypatch):
    """Compares both ways of training, in which the second must never fall back on the first."""

    def check(*, looped: tuple[int, ...] = (), atol: float = 1e-5, **settings: Any) -> None:
        expected, loop = trained(tiny, False, **settings)
        real = fit.train

        def refuse(client: Any, *args: Any, **kwargs: Any) -> Any:
            assert client.number in looped or not len(client)
            return real(client, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(fit, "train", refuse)
            found, federation = trained(tiny, True, **settings)
        assert not list(federation.engine.notes())
        for ours, theirs in zip(found, expected, strict=True):
            assert list(ours) == list(theirs)
            for client, reply in ours.items():
                other = theirs[client]
                same((reply.weights.params, reply.weights.buffers), (other.weights.params, other.weights.buffers), atol)
                same(reply.message, other.message, atol)
                assert (reply.samples, reply.steps, reply.seen) == (other.samples, other.steps, other.seen)
                assert reply.loss == pytest.approx(other.loss, abs=max(atol, 1e-6))
        for client in range(len(SIZES)):
            same(federation.store.get(client), loop.store.get(client), atol)

    return check


@pytest.mark.parametrize("length", [{"local_epochs": 2}, {"local_epochs": None, "local_steps": 3}], ids=str)
@pytest.mark.parametrize("module", [mlp, cnn])
@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_every_objective_gives_the_loops_result(name, module, length, compare):
    compare(objective=OBJECTIVES.parse(name), module=module, **length)


@pytest.mark.parametrize("name", ["cross-entropy", "fedprox", "scaffold", "feddyn", "moon"])
def test_in_float64_the_difference_is_rounding_alone(name, compare):
    settings = {} if name == "scaffold" else {"momentum": 0.9, "clip": 0.5}
    compare(
        objective=OBJECTIVES.parse(name),
        module=lambda: Exact(cnn(nn.BatchNorm2d(4))),
        weight_decay=0.1,
        atol=1e-11,
        looped=(SIZES.index(1),),
        **settings,
    )


@pytest.mark.parametrize("name", ["cross-entropy", "fedprox", "feddyn", "moon", "rebafl", "fedbabu"])
@pytest.mark.parametrize(
    "settings",
    [{"momentum": 0.9}, {"weight_decay": 0.1}, {"clip": 0.1}, {"momentum": 0.7, "weight_decay": 0.1, "clip": 0.5}],
    ids=str,
)
def test_momentum_decay_and_clip_are_each_clients_own(name, settings, compare):
    compare(objective=OBJECTIVES.parse(name), **settings)


def batch_norm(**settings: Any) -> nn.Module:
    return cnn(nn.BatchNorm2d(4, **settings))


@pytest.mark.parametrize("where", ["average", "local"])
@pytest.mark.parametrize("name", ["cross-entropy", "moon", "rebafl"])
@pytest.mark.parametrize(
    "settings", [{}, {"momentum": None}, {"track_running_stats": False}, {"affine": False}], ids=str
)
def test_batchnorm_sees_no_padding_and_keeps_each_clients_statistics(name, where, settings, compare):
    # A batch of one sample is left to the loop, whose layers decide whether it will do.
    one = (SIZES.index(1),)
    compare(objective=OBJECTIVES.parse(name), module=lambda: batch_norm(**settings), batch_norm=where, looped=one)


def test_groupnorm_is_computed_by_plain_operations(compare):
    compare(module=lambda: cnn(nn.GroupNorm(2, 4)), momentum=0.9)


def test_frozen_parameters_stay(compare):
    def frozen() -> nn.Module:
        module = mlp()
        module[0].weight.requires_grad_(False)
        return module

    compare(module=frozen, weight_decay=0.1)


def test_bfloat16_stays_within_its_precision(compare, tiny):
    compare(precision="bf16", atol=0.02, rounds=1)
    rounded, exact = (trained(tiny, True, rounds=1, precision=precision)[0][0] for precision in ("bf16", "float32"))
    assert any(not torch.equal(rounded[1].weights.params[n], w) for n, w in exact[1].weights.params.items())


def test_the_same_bits_twice(tiny):
    first, second = (trained(tiny, True, objective=OBJECTIVES.parse("moon"))[0] for _ in range(2))
    for ours, theirs in zip(first, second, strict=True):
        for client, reply in ours.items():
            same(reply.weights.params, theirs[client].weights.params, atol=0)


# Masks.


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_padding_changes_nothing_whatever_it_holds(name, tiny):
    """The gradient of a padded batch is that of the batch, to the last bits that a sum leaves open."""
    with torch_seeded(0, "model"):
        federation = tiny(objective=OBJECTIVES.parse(name), module=cnn(nn.BatchNorm2d(4)), sizes=[8], vectorise=True)
    trainer = federation.engine._side_by_side
    objective, model = trainer.context.objective, trainer.model
    start = federation.weights
    message = objective.message(objective.init(start, federation.config))
    plan = trainer._plan(federation.engine._client(0), Fit(1, start, message, 1.0, 1.0))
    samples = stacked.Samples([plan], trainer.bench)
    run = stacked.Run(trainer.bench, [trainer._start(plan, samples.of(0))], vectorise=True)
    x, y = samples.at(torch.arange(4)[None])
    model.train_mode(True)
    expected = run.gradient(1, x, y, None)
    for junk in (0.0, 1e6, -1e6):
        padded = torch.cat([x, torch.full_like(x[:, :3], junk)], 1)
        labels = torch.cat([y, torch.full_like(y[:, :3], 2)], 1)
        real = torch.tensor([[True] * 4 + [False] * 3])
        for ours, theirs in zip(run.gradient(1, padded, labels, real), expected, strict=True):
            same(ours, theirs, atol=1e-6)


def test_a_done_client_is_not_touched_again():
    params = torch.ones(3, 2)
    training = fs.Training(momentum=0.5)
    velocity = torch.zeros(3, 2)
    stacked.descend(training, 0.1, [params], [torch.ones(3, 2)], [velocity])
    before = params.clone()
    stacked.descend(training, 0.1, [params[:1]], [torch.ones(1, 2)], [velocity[:1]])
    assert torch.equal(params[1:], before[1:])
    assert not torch.equal(params[:1], before[:1])


def test_a_sharp_clip_of_one_client_leaves_the_others():
    params, gradient = torch.zeros(2, 2), torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    stacked.descend(fs.Training(clip=1.0), 1.0, [params], [gradient], [])
    torch.testing.assert_close(params, torch.tensor([[-0.6, -0.8], [-0.3, -0.4]]))


# What is left to the loop.


class Centred(nn.Module):
    """Its samples depend on each other in a way that no mask reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x - x.mean(0))


class Last(PerSample):
    """Its loss depends on how many samples a batch has."""

    def losses(self, model: Any, params: Any, batch: Batch, context: Context) -> Tensor:
        losses = nn.functional.cross_entropy(model(params, batch.x), batch.y, reduction="none")
        return losses * len(batch.y)


class Summed(Objective):
    """Its loss knows of no padding."""

    def loss(self, model: Any, params: Any, batch: Batch, context: Context) -> Tensor:
        return nn.functional.cross_entropy(model(params, batch.x), batch.y, reduction="sum")


@pytest.mark.parametrize("settings", [{"module": Centred}, {"objective": Last()}, {"objective": Summed()}], ids=str)
def test_where_padding_would_show_only_equal_batches_go_together(settings, compare, monkeypatch):
    wastes = []
    real = vectorised.grouped
    monkeypatch.setattr(vectorised, "grouped", lambda *a, **k: wastes.append(k["waste"]) or real(*a, **k))
    compare(**{"lr": 0.05} | settings)
    assert set(wastes) == {0.0}


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 3))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x[..., None])[0][:, -1])


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.head = self.layers[2]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (dropout, "draws random numbers"),
        (Recurrent, "performance drop"),
        (Constants, "buffers that do not travel: calls"),
    ],
    ids=["dropout", "lstm", "buffers"],
)
def test_what_cannot_be_vectorised_is_left_to_the_loop_and_told_once(module, reason, tiny):
    expected, _ = trained(tiny, False, module)
    found, federation = trained(tiny, True, module)
    for ours, theirs in zip(found, expected, strict=True):
        for client, reply in ours.items():
            same(reply.weights.params, theirs[client].weights.params, atol=0)
    notes = list(federation.engine.notes())
    assert [note[0] for note in notes] == ["looped"]
    assert reason in notes[0][2]
    assert not list(federation.engine.notes())


def test_a_failing_client_fails_alone(tiny):
    class Picky(Objective):
        def client_init(self, model: Any, context: Context) -> Context:
            if context.counts.sum() == 17:
                raise ValueError("not with 17 samples")
            return context

    found, federation = trained(tiny, True, objective=Picky(), rounds=1)
    assert sorted(found[0]) == [0, 2, 3, 4, 5, 6]
    assert "not with 17 samples" in federation.reasons("failed")[0]


def test_groups_are_halved_until_memory_suffices(tiny, monkeypatch):
    expected, _ = trained(tiny, False)
    counts = []

    class Small(stacked.Run):
        def go(self, *args: Any) -> None:
            counts.append(len(self.starts))
            if len(self.starts) > 2:
                raise torch.OutOfMemoryError("no room")
            super().go(*args)

    monkeypatch.setattr(vectorised, "Run", Small)
    found, federation = trained(tiny, True)
    assert not list(federation.engine.notes())
    for ours, theirs in zip(found, expected, strict=True):
        for client, reply in ours.items():
            same(reply.weights.params, theirs[client].weights.params)
    # What was learnt is remembered: the later rounds begin with groups that fit.
    assert counts[0] > 2
    assert max(counts[-6:]) <= 2


def test_a_client_too_large_for_memory_is_left_to_the_loop(tiny, monkeypatch):
    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(stacked.Run, "go", refuse)
    found, federation = trained(tiny, True)
    assert len(found[-1]) == len(SIZES)
    assert "no room" in next(iter(federation.engine.notes()))[2]


@pytest.mark.parametrize("module", [cnn, batch_norm, dropout])
def test_one_after_another_without_vmap_is_the_loop(module, tiny, monkeypatch):
    """What a GPU does with clients that cannot be trained side by side, here on the processor."""
    expected, _ = trained(tiny, False, module, sizes=SIZES[:-1])
    monkeypatch.setattr(
        "fedstrata.engines.local.side_by_side", lambda context: vectorised.SideBySide(context, vectorise=False)
    )
    with monkeypatch.context() as patch:
        patch.setattr(fit, "train", None)
        found, _ = trained(tiny, False, module, sizes=SIZES[:-1])
    for ours, theirs in zip(found, expected, strict=True):
        for client, reply in ours.items():
            same(reply.weights.params, theirs[client].weights.params)


# Experiments.


def experiment(**training: Any) -> fs.Experiment:
    return fs.Experiment.from_table(
        {
            "data": "digits",
            "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 12},
            "model": {"name": "cnn", "channels": [4, 8], "hidden": 16},
            "method": training.pop("method", {"name": "fedavg"}),
            "training": {"rounds": 2, "local_epochs": 1, "clients_per_round": 6, "lr": 0.05, **training},
        }
    )


@pytest.mark.parametrize("method", [{"name": "fedavg"}, {"name": "rebafl"}, {"name": "fedsts", "strata": 3}], ids=str)
def test_an_experiment_is_the_same(method):
    loop = fs.run(experiment(method=method))
    side_by_side = fs.run(experiment(method=method, vectorise=True))
    for ours, theirs in zip(side_by_side, loop, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
        assert ours["bytes_up"] == theirs["bytes_up"]
    same(side_by_side.params, loop.params, atol=1e-4)


def test_events_tell_of_the_loop(tmp_path):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.1), nn.Linear(8, 10))
    fs.run(experiment(vectorise=True), model=model, out=tmp_path)
    events = [line for line in (tmp_path / "events.jsonl").read_text().splitlines() if '"looped"' in line]
    assert len(events) == 1
    assert "draws random numbers" in events[0]


@pytest.mark.parametrize("setting", ["gpu", "cuda:", "cpu:0", ""])
def test_an_unknown_device_is_refused(setting):
    with pytest.raises(SpecError, match=r"training\.device"):
        experiment(device=setting)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_auto_is_the_processor_and_cuda_is_refused():
    spec = experiment(device="auto", rounds=1)
    same(fs.run(spec).params, fs.run(experiment(rounds=1)).params, atol=0)
    with pytest.raises(SpecError, match=r"training\.device.*0 CUDA devices"):
        fs.run(experiment(device="cuda"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("vectorise", ["auto", False])
@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_a_gpu_gives_the_processors_result(name, vectorise, tiny):
    settings = {"objective": OBJECTIVES.parse(name), "module": lambda: cnn(nn.BatchNorm2d(4))}
    expected, _ = trained(tiny, False, **settings)
    found, federation = trained(tiny, vectorise, device="cuda", **settings)
    assert not list(federation.engine.notes())
    for ours, theirs in zip(found, expected, strict=True):
        for client, reply in ours.items():
            same(reply.weights.params, theirs[client].weights.params, atol=1e-3)
            assert all(tensor.device.type == "cpu" for tensor in tree_flatten(reply.message)[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_whole_experiment_on_a_gpu():
    history = fs.run(experiment(device="cuda"))
    assert history[-1]["loss"] == pytest.approx(fs.run(experiment())[-1]["loss"], abs=1e-2)


def test_prototypes_are_computed_in_the_precision_of_training(tiny):
    """Under the same model, side by side or not; in float32 they are others."""

    def means(vectorise, precision):
        rounds, *_ = trained(
            tiny, vectorise, rounds=1, objective=OBJECTIVES.parse("rebafl"), precision=precision, lr=1e-12
        )
        return [reply.message["prototypes"]["means"] for reply in rounds[0].values()]

    for ours, theirs, exact in zip(means(True, "bf16"), means(False, "bf16"), means(False, "float32"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
        assert (ours - exact).abs().max() > 1e-4


class Frozen(nn.Module):
    """Two convolutions, of which the first is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Flatten()
        ).to(memory_format=torch.channels_last)
        self.body[0].weight.requires_grad_(False)
        self.head = nn.Linear(8 * 6 * 6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@pytest.mark.parametrize("vectorise", [True, False])
@pytest.mark.parametrize("model", ["cnn", "frozen"])
@pytest.mark.parametrize("name", ["fedavg", "feddyn", "moon", "rebafl"])
def test_convolutions_end_in_the_same_bytes_when_a_run_is_resumed(name, model, vectorise, tmp_path):
    """A checkpoint keeps no memory format, and in another one a convolution adds up in another order."""
    pixels = np.random.default_rng(0).integers(0, 256, (60, 16, 16, 3)).astype(np.uint8)
    data = fs.from_arrays(pixels, np.arange(60) % 4, pixels[:8], np.arange(8) % 4)
    spec = {
        "partition": {"name": "iid", "clients": 2},
        "method": name,
        "evaluation": {"checkpoint_every": 1},
        "training": {"rounds": 2, "clients_per_round": 2, "local_epochs": 1, "batch_size": 10, "vectorise": vectorise},
    }
    if model == "cnn":
        spec["model"], module = {"name": "cnn", "channels": [16, 32]}, None
    else:
        with torch_seeded(0, "model"):
            module = Frozen()

    def breaks_off(record):
        if record["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fs.run(spec, data=data, model=module, out=tmp_path, callbacks=[breaks_off])
    resumed = fs.run(spec, data=data, model=module, out=tmp_path, resume=True)
    whole = fs.run(spec, data=data, model=module)
    assert not (tmp_path / "events.jsonl").exists()  # nobody was left to the loop
    for part, tensor in whole.params.items():
        assert torch.equal(tensor, resumed.params[part]), part


class Odd(Dynamic):
    """FedDyn with a plain value of each client's own."""

    def client_init(self, model: Any, context: Context) -> Context:
        return super().client_init(model, context).deriving(odd=int(context.counts.argmax()) % 2)


def test_where_memory_runs_out_nobody_trains_twice(monkeypatch, tmp_path):
    """Clients whose contexts differ in a plain value are trained in parts; the second one here does not fit."""
    spec = experiment(vectorise=True, rounds=1, method={"name": "fedavg", "objective": Odd(alpha=1.0)})
    expected = fs.run(spec, out=tmp_path / "whole").params
    real, began = stacked.Run, []

    class Narrow(real):
        def go(self, *args: Any) -> None:
            began.append(len(self.starts))
            if len(began) == 2:
                raise torch.OutOfMemoryError("no room")
            super().go(*args)

    monkeypatch.setattr(vectorised, "Run", Narrow)
    found = fs.run(spec, out=tmp_path / "halved").params
    assert len(began) > 3
    same(found, expected)
    states = [checkpoint.load(tmp_path / name / "checkpoint").clients for name in ("whole", "halved")]
    assert states[0].keys() == states[1].keys()
    for client in states[0]:
        same(*(records.decode(each[client].read_bytes())["objective"] for each in states))


@pytest.mark.parametrize("name", ["moon", "rebafl"])
def test_a_submodule_of_two_names_trains_as_it_does_under_one(name, compare, tiny):
    compare(objective=OBJECTIVES.parse(name), module=TwoNames)
    two, _ = trained(tiny, False, TwoNames, objective=OBJECTIVES.parse(name))
    one, _ = trained(tiny, False, mlp, objective=OBJECTIVES.parse(name))
    for ours, theirs in zip(two, one, strict=True):
        for client, reply in ours.items():
            same(list(reply.weights.params.values()), list(theirs[client].weights.params.values()), atol=0)
