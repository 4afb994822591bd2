"""A model whose results can be computed by hand, and the context of a client."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedstrata.models.model import Model
from fedstrata.objectives.base import Context, Objective


class Logits(nn.Module):
    """A model whose logits are its three parameters, for every input."""

    def __init__(self, z: list[float]) -> None:
        super().__init__()
        self.head = nn.Linear(1, 3, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(torch.tensor(z)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


@pytest.fixture
def logits() -> Callable[..., Model]:
    """Return a function that builds a model with given logits."""
    return lambda *z: Model(Logits(list(z)))


@pytest.fixture
def begun() -> Callable[..., Context]:
    """Return a function that builds a client's context after ``client_init``."""

    def client_init(objective: Objective, model: Model, counts: list[float], kept=None, **received: object) -> Context:
        context = Context(model.params(), torch.tensor(counts), dict(received), kept, lr=0.1)
        return objective.client_init(model, context)

    return client_init
