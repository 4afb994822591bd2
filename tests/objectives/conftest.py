"""A model that one can compute by hand, and a client's context."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedstrata.models.model import Model
from fedstrata.objectives.base import Context, Objective


class Logits(nn.Module):
    """Three logits that are the parameters themselves, whatever the sample."""

    def __init__(self, z: list[float]) -> None:
        super().__init__()
        self.head = nn.Linear(1, 3, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(torch.tensor(z)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


@pytest.fixture
def logits() -> Callable[..., Model]:
    """A model whose logits for x = 1 are given."""
    return lambda *z: Model(Logits(list(z)))


@pytest.fixture
def begun() -> Callable[..., Context]:
    """A client's context after ``client_init``."""

    def client_init(objective: Objective, model: Model, counts: list[float], kept=None, **received: object) -> Context:
        context = Context(model.params(), torch.tensor(counts), dict(received), kept, lr=0.1)
        return objective.client_init(model, context)

    return client_init
