"""What a review found, kept from coming back."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata import checkpoint, records
from fedstrata.aggregation.base import HorvitzThompson
from fedstrata.cli import main
from fedstrata.errors import ExtraMissingError, SpecError
from fedstrata.federation.messages import Fit, FitReply, Weights
from fedstrata.objectives.base import CrossEntropy
from fedstrata.rng import rng

HALF = fs.Bernoulli(p=0.5)


def test_under_privacy_no_reply_tells_a_size(monkeypatch):
    from fedstrata.engines.local import LocalEngine

    replies = []
    ask = LocalEngine.ask

    def listen(self, requests, *, together):
        found = ask(self, requests, together=together)
        replies.extend(reply for reply in found.values() if isinstance(reply, FitReply))
        return found

    monkeypatch.setattr(LocalEngine, "ask", listen)
    settings = {"partition": fs.IID(clients=12), "training": {"rounds": 2, "clients_per_round": 10}}
    fs.run(fs.Experiment(method={"name": "fedstas", "epsilon": 3.0, "bound": 200, "fraction": 0.5}, **settings))
    assert replies
    assert {(reply.samples, reply.steps, reply.seen) for reply in replies} == {(0, 0, 0)}
    replies.clear()
    fs.run(fs.Experiment(method={"name": "fedstas", "fraction": 0.5}, **settings))
    assert all(reply.samples > 0 for reply in replies)


def test_private_sizes_cannot_be_weights():
    spec = fs.Experiment(method={"name": "fedstas", "epsilon": 3.0, "aggregator": "size"}, partition=fs.IID(clients=20))
    with pytest.raises(SpecError, match=r"method\.aggregator: weighs by sizes that clients keep private"):
        fs.prepare(spec)


def test_fedstas_invites_only_those_who_answered_this_round():
    spec = fs.Experiment(
        method={"name": "fedstas", "fraction": 0.5},
        partition=fs.IID(clients=40),
        availability=HALF,
        training={"rounds": 4, "clients_per_round": 10},
    )
    for record in fs.run(spec):
        assert record["clients_trained"] == 10  # nobody who is away was given a place


def test_work_in_steps_is_the_same_for_large_and_small_clients():
    request = Fit(1, Weights({}, {}), {}, 1.0, passes=5.0, steps=3, batch_size=32)
    assert request.work(32) == request.work(3200) == 96
    assert Fit(1, Weights({}, {}), {}, 0.5, passes=5.0).work(100) == 250


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.body(x))


def test_a_last_sample_alone_joins_the_batch_before_it_under_batchnorm():
    indices = [list(range(11)), list(range(20, 32))]
    spec = fs.Experiment(
        partition=fs.Given(indices=indices), training={"rounds": 1, "batch_size": 5, "local_epochs": 2}
    )
    (record,) = fs.run(spec, model=Norm())
    assert record["clients_failed"] == 0
    assert record["samples"] == 2 * (11 + 12)


def test_random_layers_in_a_group_are_refused_with_advice():
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 10))
    spec = fs.Experiment(
        method="stratify", partition=fs.IID(clients=3), training={"rounds": 1, "execution": "per-client"}
    )
    with pytest.raises(SpecError, match=r"model: Dropout.*fused"):
        fs.run(spec, model=module)


@pytest.mark.parametrize(
    "error", [SpecError("a.b", "is wrong", 3), SpecError("a", "x"), ExtraMissingError("this", "he")]
)
def test_errors_cross_from_worker_processes(error):
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is type(error)
    assert str(twin) == str(error)


def test_a_method_cannot_write_over_the_books():
    class Liar(fs.FedAvg):
        def run_round(self, federation, state):
            state, metrics = super().run_round(federation, state)
            return state, {**metrics, "round": 99, "accuracy": 1.0, "own": 7}

    (record,) = fs.run(fs.Experiment(method=Liar(), training={"rounds": 1}))
    assert (record["round"], record["own"]) == (1, 7)
    assert record["accuracy"] < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "--methods", "fedavg", "--seeds", "0,0"], "--seeds = '0,0': expected different whole numbers"),
        (["compare", "--set", "compare.fedavg=3"], "compare.fedavg = 3: expected a table of sections"),
        (["compare", "--set", "compare.fedavg.method=3"], "compare.fedavg.method = 3: expected a name or a table"),
        (["partition", "--out", "p.foo"], "--out = 'p.foo': expected a picture: .png, .pdf or .svg"),
        (["run", "--set", "training.lr=inf"], "training.lr = inf: input should be a finite number"),
    ],
)
def test_plain_mistakes_are_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_key_that_was_set_by_hand_is_not_blamed_on_the_file(capsys, tmp_path):
    spec = tmp_path / "spec.toml"
    spec.write_text("[partition]\nalpha = 0.1\n")
    assert main(["run", str(spec), "--set", "partition.alpha=-1", "--out", str(tmp_path / "run")]) == 2
    assert "line" not in capsys.readouterr().err
    spec.write_text("[partition]\nalpha = -1\n")
    assert main(["run", str(spec), "--out", str(tmp_path / "run")]) == 2
    assert "line 2" in capsys.readouterr().err


def test_evaluation_with_batch_statistics_has_no_batch_of_one():
    from fedstrata.handlers.evaluation import evaluate

    prepared = fs.prepare(fs.Experiment(), model=Norm())
    model = prepared.config.model
    weights = Weights(model.params(), model.buffers())
    size = len(prepared.data.y_test) - 1
    score = evaluate(model, weights, prepared.data, batch_size=size, batch_statistics=True)
    assert np.isfinite(score.loss)
    assert torch.equal(model.buffers()["body.2.running_mean"], torch.zeros(8))


def test_under_privacy_neither_counters_nor_control_variates_tell_a_size(monkeypatch):
    from fedstrata.engines.local import LocalEngine

    sent, ask = [], LocalEngine.ask

    def listen(self, requests, *, together):
        found = ask(self, requests, together=together)
        sent.extend((requests[k], reply) for k, reply in found.items() if isinstance(reply, FitReply))
        return found

    monkeypatch.setattr(LocalEngine, "ask", listen)
    method = {"name": "fedstas", "epsilon": 3.0, "bound": 200, "fraction": 0.5}
    settings = {"partition": fs.IID(clients=12), "training": {"rounds": 1, "batch_size": 2}}
    steps = {**settings, "training": {**settings["training"], "local_steps": 40}}
    norm = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    fs.run(fs.Experiment(method=method, **steps), model=norm)
    counter = "2.num_batches_tracked"
    assert sent
    assert all(torch.equal(reply.weights.buffers[counter], ask.weights.buffers[counter]) for ask, reply in sent)
    assert any(
        not torch.equal(reply.weights.buffers["2.running_mean"], ask.weights.buffers["2.running_mean"])
        for ask, reply in sent
    )

    # SCAFFOLD's (w_t − w) / (K η) gives K, and epochs give n_k from it.
    private = {**method, "objective": "scaffold"}
    with pytest.raises(SpecError, match=r"method\.objective = 'scaffold': tells sizes .* training\.local_steps"):
        fs.prepare(fs.Experiment(method=private, **settings))
    fs.prepare(fs.Experiment(method=private, partition=fs.IID(clients=12), training={"local_steps": 3}))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            {"name": "rebafl", "mu": 5.0, "objective": "rebafl"},
            r"method\.mu = 5\.0: has no effect: it belongs to the method's own objective",
        ),
        (
            {"name": "fedsts", "strata": 4, "client_sampler": "uniform"},
            r"method\.strata = 4: has no effect: it belongs to the method's own client_sampler",
        ),
    ],
)
def test_a_setting_of_a_choice_that_was_replaced_is_refused(method, message):
    with pytest.raises(SpecError, match=message):
        fs.Experiment(method=method)


def test_a_setting_that_still_means_something_is_kept():
    # It shapes the sampler and the aggregator, and one of them is left. Defaults, as a run writes them, are no loss.
    fs.Experiment(method={"name": "fedsts", "aggregation": "horvitz-thompson", "client_sampler": "uniform"})
    spec = fs.Experiment(method={"name": "fedsts", "client_sampler": "uniform"})
    assert fs.Experiment.from_table(spec.to_spec()) == spec


class FinishesWithBuffers(CrossEntropy):
    """What a user may write: the buffers at the end of training."""

    def client_final(self, trained, context):
        assert trained.model.current_buffers() == {}
        return {}, {name: w.clone() for name, w in trained.params.items()}


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_finish_has_a_loaded_model_whatever_trained_it(precision):
    spec = {"method": {"objective": FinishesWithBuffers()}, "partition": {"clients": 3}}
    history = fs.run({**spec, "training": {"rounds": 1, "precision": precision}})
    assert history[-1]["clients_trained"] == 3


def test_a_head_with_statistics_of_its_own_is_tuned_with_them(start):
    class Headed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 6))
            self.head = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 10))
            self.head[0].running_mean += 2.0

        def forward(self, x):
            return self.head(self.body(x))

    spec = fs.Experiment(
        partition={"name": "classes", "clients": 5, "per_client": 2, "size": 60},
        method={"name": "fedavg-ft", "per_class": 4, "steps": 1},
    )
    started = start(spec, None, Headed())
    weights, loss = spec.method.tuned(started.config, started.state.weights)
    x, y = started.config.server_data.balanced(4, rng(spec.seed, "server-samples"))
    expected = torch.nn.functional.cross_entropy(Headed().eval()(x), y).item()
    assert loss == pytest.approx(expected, rel=1e-5)
    assert not torch.equal(weights.params["head.1.weight"], started.state.weights.params["head.1.weight"])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"data": ([[1.0]], [0])}, r"data = '2 of them': expected a Dataset, a mapping, or four arrays: x_train"),
        ({"data": {"x_train": [[1.0]], "labels": [0]}}, r"data = \['labels', 'x_test', 'y_test', 'y_train'\]"),
        ({"data": 3}, r"data = 'int': expected a Dataset"),
        ({"model": "cnn"}, r"model = 'cnn': expected an nn\.Module or a fedstrata Model"),
        (
            {"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 9))},
            r"logits of shape \(B, 10\); this one gave \(2, 9\)",
        ),
        ({"model": nn.Linear(64, 10)}, r"a batch of shape \(B, 1, 8, 8\) .*; this one failed"),
    ],
)
def test_data_and_models_that_cannot_be_used_are_found_before_the_first_round(how, message):
    with pytest.raises(SpecError, match=message):
        fs.prepare(fs.Experiment(), **how)


def test_a_device_that_is_none_says_which_there_are():
    with pytest.raises(SpecError, match=r"training\.device = 'gpu': expected cpu, cuda, cuda:N or auto"):
        fs.Experiment.from_table({"training": {"device": "gpu"}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "norm"}, r"^training\.local_steps: with epochs BatchNorm's running statistics would tell"),
        ({"weight_decay": 0.1}, r"^training\.local_steps: with epochs weight decay would tell"),
        ({"client_sampler": "weighted"}, r"^method\.client_sampler: asks for sizes that clients keep private"),
        ({"client_sampler": "clustered"}, r"^method\.client_sampler: asks for sizes that clients keep private"),
        ({"client_sampler": "power-of-choice"}, r"^method\.client_sampler: asks for sizes"),
    ],
    ids=str,
)
def test_under_privacy_nothing_else_tells_a_size(changes, message):
    norm = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    method = {"name": "fedstas", "epsilon": 3.0, "bound": 200, "aggregator": "mean"}
    if "client_sampler" in changes:
        method["client_sampler"] = changes["client_sampler"]
    decay = {"weight_decay": changes.get("weight_decay", 0.0)}
    model = norm if "model" in changes else None

    def prepared(**training):
        return fs.prepare(fs.Experiment(method=method, partition=fs.IID(clients=12), training=training), model=model)

    with pytest.raises(SpecError, match=message):
        prepared(**decay)
    if "client_sampler" not in changes:
        prepared(**decay, local_steps=3)
        method["epsilon"] = None
        prepared(**decay)


def test_weight_decay_and_epochs_tell_how_many_steps_were_taken():
    """Why they are refused: a pixel that is always 0 has no gradient, and its weights shrink by (1 − η λ) a step."""
    spec = fs.Experiment(
        data={"name": "digits", "normalize": "unit"},
        method="fedavg",
        partition=fs.IID(clients=1),
        training={"weight_decay": 0.5, "lr": 0.1, "rounds": 1, "local_epochs": 1},
    )
    data = spec.data.load(0)
    dark = torch.nonzero(data.x_train.flatten(1).float().std(dim=0) == 0).flatten()
    prepared = fs.prepare(spec, data=data)
    first, before = next(iter(prepared.config.model.params().items()))
    after = fs.run(spec, data=data).params[first]
    steps = torch.log(after[:, dark[0]] / before[:, dark[0]]) / torch.log(torch.tensor(1 - 0.1 * 0.5))
    assert round(steps.median().item()) == -(-data.train_size // spec.training.batch_size)


def test_a_model_that_no_reply_can_be_like_is_refused():
    class Masked(nn.Linear):
        def __init__(self, persistent: bool) -> None:
            super().__init__(64, 10)
            self.register_buffer("mask", torch.full((3,), -torch.inf), persistent=persistent)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.flatten(1))

    spec = fs.Experiment(method="fedavg", partition=fs.IID(clients=4), training={"rounds": 1})
    with pytest.raises(SpecError, match=r"^model: mask holds NaN or infinity.*persistent=False"):
        fs.run(spec, model=Masked(persistent=True))
    assert fs.run(spec, model=Masked(persistent=False))[-1]["clients_trained"] == 4


def test_statistics_of_a_batch_of_one_are_refused_before_training():
    norm = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    table = {"training": {"batch_norm": "local"}, "evaluation": {"batch_size": 1}}
    with pytest.raises(SpecError, match=r"^evaluation\.batch_size = 1: .*two samples"):
        fs.prepare(fs.Experiment.from_table(table), model=norm)
    with pytest.raises(SpecError, match=r"^training\.batch_norm = 'local': Stratify's statistics"):
        fs.prepare(fs.Experiment.from_table({**table, "method": "stratify", "evaluation": {}}), model=norm)
    with pytest.raises(SpecError, match=r"^training\.batch_size = 1: BatchNorm needs at least two"):
        fs.prepare(fs.Experiment.from_table({"method": "stratify", "training": {"batch_size": 1}}), model=norm)


@pytest.mark.parametrize(
    "sampler", [{"name": "clustered", "algorithm": 2}, "fedssar", {"name": "fedsts", "gradients": "updates"}], ids=str
)
def test_a_relay_has_no_models_to_learn_from(sampler):
    with pytest.raises(SpecError, match=r"^method\.client_sampler = '.*': learns from the models"):
        fs.prepare(fs.Experiment(method={"name": "sfl", "client_sampler": sampler}))


def test_clients_with_one_sample_and_batchnorm_take_no_step():
    """FedSampling often leaves a client a single sample: nobody's failure."""
    norm = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    spec = fs.Experiment(
        data={"name": "digits", "limit": 120},
        method={"name": "fedsampling", "samples": 16},
        partition=fs.IID(clients=8),
        training={"rounds": 6, "local_epochs": 1},
    )
    history = fs.run(spec, model=norm)
    assert [record["clients_failed"] for record in history] == [0] * 6
    assert history.total("samples") > 0


def test_with_local_statistics_only_batchnorms_buffers_stay_with_the_client(tmp_path):
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(64, 6).requires_grad_(False)
            self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 10)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.seen += 1
            return self.head(self.norm(self.frozen(x.flatten(1))))

    table = {"partition": {"name": "iid", "clients": 3}, "training": {"rounds": 1, "batch_norm": "local"}}
    params = fs.run(fs.Experiment.from_table(table), model=Mixed(), out=tmp_path).params
    kept = records.decode(checkpoint.load(tmp_path / "checkpoint").clients[0].read_bytes())["buffers"]
    assert set(kept) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert params["seen"] > 0
    assert not params["norm.running_mean"].any()


def test_announced_dropout_leaves_horvitz_thompson_with_fedssar_its_size():
    """Weights of a round add up to 1 however many of a cluster are away."""
    spec = fs.Experiment(
        partition=fs.Classes(clients=12, per_client=2),
        availability=fs.Bernoulli(p=0.5, announced=True),
        method={"name": "fedssar", "aggregator": "horvitz-thompson"},
        training={"rounds": 4, "clients_per_round": 5, "local_epochs": 1},
    )
    totals = []

    class Watching(HorvitzThompson):
        def coefficients(self, *args, **kwargs):
            found = super().coefficients(*args, **kwargs)
            totals.append(found.sum())
            return found

    fs.run(spec.model_copy(update={"method": spec.method.model_copy(update={"aggregator": Watching()})}))
    assert totals == pytest.approx([1.0] * 4)
