"""MOON's contrastive loss by hand, and which way round it goes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedstrata as fs
from fedstrata.models.model import Model
from fedstrata.objectives.base import Batch, Context, Trained
from fedstrata.objectives.moon import Contrastive, contrastive

X = torch.tensor([[1.0, 2.0], [0.3, -0.4], [-1.0, 0.6]])
Y = torch.tensor([0, 1, 2])


class Net(nn.Module):
    """Two features straight from a matrix, BatchNorm in between where asked."""

    def __init__(self, matrix: list[list[float]], norm: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2, bias=False)
        self.norm = nn.BatchNorm1d(2) if norm else nn.Identity()
        self.head = nn.Linear(2, 3)
        with torch.no_grad():
            self.body.weight.copy_(torch.tensor(matrix))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)))


def test_it_is_the_papers_formula():
    z, same, far = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, -2.0]])
    a, b = math.exp(0.6 / 0.5), math.exp(-0.8 / 0.5)
    assert contrastive(z, same, far, 0.5).item() == pytest.approx(-math.log(a / (a + b)), abs=1e-6)


def model_and_context(objective: Contrastive, previous: list[list[float]] | None) -> tuple[Model, Context]:
    """The global model is the identity; the client's last one as given."""
    model = Model(Net([[1.0, 0.0], [0.0, 1.0]]))
    kept = None if previous is None else {**model.params(), "body.weight": torch.tensor(previous)}
    received = objective.client_prepare(model, type("W", (), {"buffers": model.buffers()})(), lambda: [], {})
    return model, objective.client_init(model, Context(model.params(), torch.ones(3), received, kept, 0.1))


def test_the_global_model_attracts_and_the_last_one_repels():
    objective = Contrastive(mu=5.0)
    turned = [[0.0, 1.0], [-1.0, 0.0]]
    model, context = model_and_context(objective, turned)
    plain = {name: p.clone() for name, p in model.params().items()}
    as_global = objective.losses(model, plain, Batch(X, Y), context)
    as_last = objective.losses(model, {**plain, "body.weight": torch.tensor(turned)}, Batch(X, Y), context)
    ce_global = F.cross_entropy(model(plain, X), Y, reduction="none")
    ce_last = F.cross_entropy(model({**plain, "body.weight": torch.tensor(turned)}, X), Y, reduction="none")
    # A quarter turn apart: similarity 1 to itself and 0 to the other.
    low, high = math.log(1 + math.exp(-2)), math.log(1 + math.exp(2))
    torch.testing.assert_close(as_global - ce_global, torch.full((3,), 5 * low), rtol=0, atol=1e-5)
    torch.testing.assert_close(as_last - ce_last, torch.full((3,), 5 * high), rtol=0, atol=1e-5)


def test_the_first_time_it_has_no_gradient():
    objective = Contrastive(mu=5.0)
    model, context = model_and_context(objective, None)
    params = {name: p.requires_grad_(True) for name, p in model.params().items()}
    params["body.weight"] = torch.tensor([[0.5, 0.2], [-0.3, 1.0]], requires_grad=True)
    found = torch.autograd.grad(objective.loss(model, params, Batch(X, Y), context), list(params.values()))
    plain = torch.autograd.grad(F.cross_entropy(model(params, X), Y), list(params.values()))
    for a, b in zip(found, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_frozen_models_get_no_gradient_and_keep_their_own_statistics():
    objective = Contrastive()
    model = Model(Net([[1.0, 0.0], [0.0, 1.0]], norm=True))
    theirs = {"norm.running_mean": torch.tensor([5.0, -5.0]), "norm.running_var": torch.tensor([4.0, 9.0])}
    buffers = {**model.buffers(), **theirs}
    received = objective.client_prepare(model, type("W", (), {"buffers": buffers})(), lambda: [], {})
    context = objective.client_init(model, Context(model.params(), torch.ones(3), received, None, 0.1))
    with model.loaded(model.params(), buffers, train=True) as params:
        loss = objective.loss(model, params, Batch(X, Y), context)
        assert model.module.training
        loss.backward()
        # One update of the running statistics a step, by the batch that is trained; none by the frozen models.
        mean = (0.9 * theirs["norm.running_mean"] + 0.1 * X.mean(dim=0)).tolist()
        assert model.current_buffers()["norm.running_mean"].tolist() == pytest.approx(mean, rel=1e-5)
        z = model.module.norm(model.module.body(X))
        frozen = (X - theirs["norm.running_mean"]) / (theirs["norm.running_var"] + 1e-5).sqrt()
        expected = F.cross_entropy(model.module.head(z), Y) + contrastive(z, frozen, frozen, 0.5).mean()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        message, kept = objective.client_final(
            Trained({n: p.detach() for n, p in params.items()}, 1, model, list), context
        )
        assert message == {}
        assert kept.keys() == {*params, *buffers}


def test_moon_keeps_the_model_that_it_trained(start, seven):
    spec = fs.Experiment(
        partition={"name": "given", "indices": ((0, 1, 2, 3), (4, 5, 6))},
        availability={"name": "always"},
        method="moon",
        training={"clients_per_round": 1, "local_epochs": 2, "lr": 0.2},
    )
    started = start(spec, seven)
    before = started.config.model.params()
    started.step()
    (client,) = started.store.clients
    kept = started.store.get(client)["objective"]
    # One client alone: what it trained is the new global model.
    for name, w in started.state.weights.params.items():
        torch.testing.assert_close(kept[name], w)
        assert not torch.equal(kept[name], before[name])
