"""Where clients keep their sizes private, nothing that they send gives them away, and what would is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.engines.local import LocalEngine
from fedstrata.federation.messages import FitReply


@pytest.mark.slow
def test_under_privacy_no_reply_tells_a_size(monkeypatch):
    replies = []
    ask = LocalEngine.ask

    def listen(self, requests, *, together):
        found = ask(self, requests, together=together)
        replies.extend(reply for reply in found.values() if isinstance(reply, FitReply))
        return found

    monkeypatch.setattr(LocalEngine, "ask", listen)
    settings = {"partition": fs.IID(clients=12), "training": {"rounds": 2, "clients_per_round": 10}}
    for private in ({"epsilon": 3.0, "bound": 200, "fraction": 0.5}, {"share": 0.5}):
        fs.run(fs.Experiment(method={"name": "fedstas", **private}, **settings))
        assert replies
        assert {(reply.samples, reply.steps, reply.seen) for reply in replies} == {(0, 0, 0)}
        replies.clear()
    fs.run(fs.Experiment(method={"name": "fedstas", "fraction": 0.5}, **settings))
    assert all(reply.samples > 0 for reply in replies)


def test_private_sizes_cannot_be_weights():
    spec = fs.Experiment(method={"name": "fedstas", "epsilon": 3.0, "aggregator": "size"}, partition=fs.IID(clients=20))
    with pytest.raises(
        SpecError, match=r"method\.aggregator: this aggregator needs the clients' numbers of samples, which"
    ):
        fs.prepare(spec)


@pytest.mark.slow
def test_under_privacy_neither_counters_nor_control_variates_tell_a_size(monkeypatch):
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
    with pytest.raises(
        SpecError,
        match=r"method\.objective = 'scaffold': discloses the clients' numbers.* training\.local_steps",
    ):
        fs.prepare(fs.Experiment(method=private, **settings))
    fs.prepare(fs.Experiment(method=private, partition=fs.IID(clients=12), training={"local_steps": 3}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": "norm"},
            r"^training\.local_steps: is required, .* With local_epochs, BatchNorm's running statistics would disclose",
        ),
        (
            {"weight_decay": 0.1},
            r"^training\.local_steps: is required, .* With local_epochs, weight decay would disclose",
        ),
        (
            {"optimizer": "adamw"},
            r"^training\.local_steps: is required, .* With local_epochs, the length of an optimiser's steps would",
        ),
        (
            {"client_sampler": "weighted"},
            r"^method\.client_sampler: needs the clients' numbers of samples, which",
        ),
        (
            {"client_sampler": "clustered"},
            r"^method\.client_sampler: needs the clients' numbers of samples, which",
        ),
        ({"client_sampler": "power-of-choice"}, r"^method\.client_sampler: needs the clients' numbers of samples"),
    ],
    ids=str,
)
def test_under_privacy_nothing_else_tells_a_size(changes, message):
    norm = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    method = {"name": "fedstas", "epsilon": 3.0, "bound": 200, "aggregator": "mean"}
    if "client_sampler" in changes:
        method["client_sampler"] = changes["client_sampler"]
    decay = {key: changes[key] for key in ("weight_decay", "optimizer") if key in changes}
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
