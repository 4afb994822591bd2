"""Personal models: rounds by hand, the laws of its limits, and what it is for."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.clients.client import Client
from fedstrata.clients.handlers.evaluation import personal
from fedstrata.evaluation.messages import Evaluate

LR = 0.2
CLIENTS = ((0, 1, 2, 3, 4), (5, 6))
BODY, HEAD = ("0.weight", "0.bias"), ("2.weight", "2.bias")

TWO_CLASSES: dict[str, Any] = {
    "partition": {"name": "classes", "clients": 10, "per_client": 2},
    "model": {"name": "mlp", "hidden": [16]},
    "training": {"rounds": 6, "clients_per_round": 5, "local_epochs": 2, "lr": 0.1},
    "evaluation": {"client_test": 0.3, "fine_tune": 0},
}
PERSONAL: list[Any] = ["fedper", {"name": "fedrep", "head_epochs": 3}, "ditto"]


def small() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))


def small_spec(method: Any, **training: Any) -> fs.Experiment:
    """Two clients, which take one step on all of their samples per epoch."""
    return fs.Experiment.from_table(
        {
            "partition": {"name": "given", "indices": CLIENTS},
            "availability": "always",
            "method": method,
            "training": {"clients_per_round": 2, "local_epochs": 2, "batch_size": 100, "lr": LR, **training},
        }
    )


def gradient(w: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Of the mean cross-entropy of the small model, in float64."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in w.items()}
    z = torch.tanh(x @ leaves["0.weight"].T + leaves["0.bias"]) @ leaves["2.weight"].T + leaves["2.bias"]
    parts = torch.autograd.grad(F.cross_entropy(z, y), list(leaves.values()))
    return dict(zip(leaves, parts, strict=True))


def descended(w: dict[str, Tensor], data: fs.Dataset, client: int, steps: int, names: Any = None) -> dict[str, Tensor]:
    """Steps of gradient descent on a client's samples, of some parameters."""
    where = list(CLIENTS[client])
    for _ in range(steps):
        g = gradient(w, data.x_train[where].double(), data.y_train[where])
        w = {name: tensor - LR * g[name] * (names is None or name in names) for name, tensor in w.items()}
    return w


def mean(models: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    sizes = [len(each) for each in CLIENTS]
    return {n: sum(k / 7 * m[n] for k, m in zip(sizes, models, strict=True)) for n in models[0]}  # type: ignore[misc]


def double(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: w.double() for name, w in params.items()}


def close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name].double(), other[name], rtol=2e-5, atol=2e-6)


def test_two_rounds_of_fedper_by_hand(start, seven):
    started = start(small_spec("fedper"), seven, small())
    initial = double(started.state.weights.params)
    body, heads = {n: initial[n] for n in BODY}, [{n: initial[n] for n in HEAD}] * 2
    for _ in range(2):
        started.step()
        models = [descended({**body, **heads[k]}, seven, k, 2) for k in range(2)]
        heads = [{n: model[n] for n in HEAD} for model in models]
        body = {n: mean(models)[n] for n in BODY}
        close(started.state.weights.params, {**body, **{n: initial[n] for n in HEAD}})
        for k in range(2):
            close(started.store.get(k)["layers"], heads[k])


def test_two_rounds_of_fedrep_by_hand(start, seven):
    started = start(small_spec({"name": "fedrep", "head_epochs": 3}), seven, small())
    initial = double(started.state.weights.params)
    body, heads = {n: initial[n] for n in BODY}, [{n: initial[n] for n in HEAD}] * 2
    for _ in range(2):
        record = started.step()
        assert record["samples"] == 7 * (3 + 2)
        headed = [descended({**body, **heads[k]}, seven, k, 3, HEAD) for k in range(2)]
        heads = [{n: model[n] for n in HEAD} for model in headed]
        models = [descended(headed[k], seven, k, 2, BODY) for k in range(2)]
        body = {n: (models[0][n] + models[1][n]) / 2 for n in BODY}
        close(started.state.weights.params, {**body, **{n: initial[n] for n in HEAD}})
        for k in range(2):
            close(started.store.get(k)["layers"], heads[k])


def test_the_simulated_time_of_fedrep_counts_the_heads_epochs():
    training, objective = fs.Training(local_steps=3, batch_size=10), fs.Experiment(method="fedrep").method.objective
    assert objective.sample_gradients(training, 40) == 10 * 40 + 30
    assert objective.sample_gradients(training, 40, keep=0.5) == 10 * 20 + 30


def test_fedreps_body_does_not_learn_batchnorm_statistics_from_the_heads_epochs(start, seven):
    """The first stage leaves the body as it is, whose statistics follow its own two steps alone."""
    norm = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    started = start(small_spec({"name": "fedrep", "head_epochs": 5}), seven, norm)
    started.step()
    assert int(started.state.weights.buffers["1.num_batches_tracked"]) == 2


@pytest.mark.parametrize("method", ["fedper", "fedrep"])
def test_a_client_that_was_never_asked_has_the_initial_head(method, start, seven):
    started = start(small_spec(method, clients_per_round=1), seven, small())
    before = started.state.weights.params
    started.step()
    (asked,) = started.store.clients
    after = started.state.weights.params
    request = Evaluate(1, started.state.weights, "test", True, 0, 0, 0)
    for k in range(2):
        own = personal(Client(k, started.context, started.store.get(k)), request).params
        for name in BODY:
            assert torch.equal(own[name], after[name])
        for name in HEAD:
            assert torch.equal(own[name], before[name]) == (k != asked)
            assert torch.equal(after[name], before[name])


SERVER = {"name": "size", "server": {"optimizer": "adam", "lr": 0.1, "weight_decay": 0.1}}


@pytest.mark.parametrize("aggregator", ["size", SERVER], ids=["mean", "adam"])
def test_fedper_without_personal_layers_is_fedavg(aggregator, start, seven):
    methods = [{"name": "fedper", "layers": []}, {"name": "fedavg"}]
    specs = [small_spec({**method, "aggregator": aggregator}, batch_size=2) for method in methods]
    one, other = (start(spec, seven, small()) for spec in specs)
    for _ in range(2):
        assert one.step() == other.step()
        for name, w in one.state.weights.params.items():
            assert torch.equal(w, other.state.weights.params[name])


@pytest.mark.parametrize("aggregator", ["size", SERVER], ids=["mean", "adam"])
def test_personal_layers_never_leave_their_client(aggregator, start, seven):
    method = {"name": "fedper", "layers": ["0"], "aggregator": aggregator}
    started = start(small_spec(method, weight_decay=0.01, momentum=0.5), seven, small())
    before = started.state.weights.params
    for _ in range(2):
        started.step()
    after = started.state.weights.params
    assert [name for name in after if torch.equal(after[name], before[name])] == list(BODY)
    assert all(started.store.get(k)["layers"].keys() == {*BODY} for k in range(2))


def pulled(v: dict[str, Tensor], w: dict[str, Tensor], data: fs.Dataset, client: int, strength: float) -> Any:
    """Two steps of a personal model."""
    where = list(CLIENTS[client])
    for _ in range(2):
        g = gradient(v, data.x_train[where].double(), data.y_train[where])
        v = {n: tensor - LR * (g[n] + strength * (tensor - w[n])) for n, tensor in v.items()}
    return v


@pytest.mark.parametrize("strength", [0.0, 0.7])
def test_two_rounds_of_ditto_by_hand(strength, start, seven):
    """Without the pull, each personal model is one that the client trains alone."""
    started = start(small_spec({"name": "ditto", "strength": strength}), seven, small())
    w = double(started.state.weights.params)
    own = [w, w]
    for _ in range(2):
        assert started.step()["samples"] == 2 * 7 * 2
        own = [pulled(own[k], w, seven, k, strength) for k in range(2)]
        w = mean([descended(w, seven, k, 2) for k in range(2)])
        close(started.state.weights.params, w)
        for k in range(2):
            close(started.store.get(k)["personal"], own[k])
            if strength == 0:
                close(own[k], descended(double(small_params()), seven, k, 2 * started.round))


def small_params() -> dict[str, Tensor]:
    return {name: w.detach() for name, w in small().named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("training", [{"batch_size": 2}, {"batch_size": 2, "momentum": 0.9, "optimizer_state": "keep"}])
def test_dittos_global_model_is_fedavgs(training, start, seven):
    for module in (small(), nn.Linear(2, 3)):  # trained by autograd and with handwritten gradients
        one, other = (start(small_spec(name, **training), seven, deepcopy(module)) for name in ("ditto", "fedavg"))
        for _ in range(2):
            records = one.step(), other.step()
            assert [record["accuracy"] for record in records] == [records[0]["accuracy"]] * 2
            for name, w in one.state.weights.params.items():
                assert torch.equal(w, other.state.weights.params[name])


def test_ditto_measures_the_personal_model_and_without_one_the_global_model(start, seven):
    norm = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    started = start(small_spec("ditto", clients_per_round=1), seven, norm)
    started.step()
    (asked,) = started.store.clients
    weights = started.state.weights
    request = Evaluate(1, weights, "test", True, 0, 0, 0)
    for k in range(2):
        own = personal(Client(k, started.context, started.store.get(k)), request)
        expected = started.store.get(k)["personal"] if k == asked else {**weights.params, **weights.buffers}
        assert expected.keys() == {*own.params, *own.buffers}
        assert all(torch.equal(w, expected[name]) for name, w in {**own.params, **own.buffers}.items())


def test_fedper_refuses_layers_that_leave_nothing_to_do(seven):
    with pytest.raises(SpecError, match=r"^method\.layers = .*'third' has no trained param.* Use names from 0, 2\.$"):
        fs.prepare(small_spec({"name": "fedper", "layers": ["third"]}), data=seven, model=small())
    with pytest.raises(SpecError, match=r"^method\.layers = .*: all layers of the model would stay at the clients\."):
        fs.prepare(small_spec({"name": "fedper", "layers": ["0", "2"]}), data=seven, model=small())
    with pytest.raises(SpecError, match=r"^model = .*has only a head"):
        fs.prepare(small_spec("fedper"), data=seven, model=nn.Linear(2, 3))
    with pytest.raises(SpecError, match=r"^model = .*has only a head"):
        fs.prepare(small_spec("fedrep"), data=seven, model=nn.Linear(2, 3))


@pytest.mark.slow
@pytest.mark.parametrize("method", PERSONAL)
def test_personal_models_beat_fedavg_if_each_client_has_two_classes(method):
    own, usual = (fs.run({**TWO_CLASSES, "method": each})[-1]["personal"]["accuracy"] for each in (method, "fedavg"))
    assert own["mean"] > usual["mean"] + 0.2
    assert own["worst"] > usual["worst"]
