"""Every objective's loss and correction run under ``torch.func.vmap`` over clients, with the plain loop's result."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedstrata.federation.messages import Weights
from fedstrata.nn.model import Model
from fedstrata.objectives.base import OBJECTIVES, Batch, Context
from fedstrata.settings import Training

CLIENTS, B = 3, 5
LABELS = torch.tensor([[0, 0, 1, 1, 0], [2, 2, 2, 2, 2], [1, 2, 3, 0, 1]])


def stacked(trees: list[dict]) -> dict:
    """Tensors stacked along a new first axis, level by level."""
    first = trees[0]
    if isinstance(first, dict):
        return {key: stacked([tree[key] for tree in trees]) for key in first}
    return torch.stack(trees) if isinstance(first, Tensor) else first


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_losses_and_corrections_vectorise_over_clients(name):
    torch.manual_seed(0)
    objective = OBJECTIVES.parse(name)
    model = Model(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)))
    start = model.params()
    x = torch.randn(CLIENTS, B, 4)
    config = type("Job", (), {"classes": 4, "model": model, "training": Training(), "clients": CLIENTS})()
    state = objective.init(Weights(start, {}), config)
    contexts, params = [], []
    for k in range(CLIENTS):
        batch = Batch(x[k], LABELS[k])
        received = objective.client_prepare(
            model, Weights(start, {}), lambda batch=batch: [batch], objective.message(state)
        )
        counts = torch.bincount(LABELS[k], minlength=4).float()
        contexts.append(objective.client_init(model, Context(start, counts, received, None, 0.1)))
        params.append({n: w + 0.1 * torch.randn_like(w) for n, w in start.items()})

    def step(own: dict, x: Tensor, y: Tensor, derived: dict) -> tuple[dict, Tensor, dict]:
        context = Context(start, torch.zeros(4), {}, None, 0.1, derived)
        gradient, loss = torch.func.grad_and_value(lambda p: objective.loss(model, p, Batch(x, y), context))(own)
        return gradient, loss, objective.correction(own, context) or {}

    derived = [{key: value for key, value in c.derived.items() if value is not None} for c in contexts]
    nothing = {key: None for key, value in contexts[0].derived.items() if value is None}
    if any(derived):
        vectorised = torch.func.vmap(lambda p, x, y, d: step(p, x, y, {**d, **nothing}))
        found = vectorised(stacked(params), x, LABELS, stacked(derived))
    else:
        found = torch.func.vmap(lambda p, x, y: step(p, x, y, {}))(stacked(params), x, LABELS)
    for k in range(CLIENTS):
        gradient, loss, correction = step(params[k], x[k], LABELS[k], dict(contexts[k].derived))
        torch.testing.assert_close(found[1][k], loss)
        for n in start:
            torch.testing.assert_close(found[0][n][k], gradient[n])
            if correction:
                torch.testing.assert_close(found[2][n][k], correction[n])
