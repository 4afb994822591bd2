"""An objective with which chosen clients misbehave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedstrata.objectives.base import Context, Objective, Trained


class Broken(Objective):
    """An objective that counts the visits to a client, and lets some clients ("culprits") misbehave.

    ``how`` is one way for all culprits, or a way for each, as in ``"raise 1, nan 2"``. A client is recognised by the
    number of its samples: eight for the first, sixteen for the second and so on.
    """

    culprits: list[int] = []
    how: str = "raise"

    def _way(self, context: Context) -> str | None:
        who = int(context.counts.sum()) // 8 - 1
        ways = dict(reversed(part.split()) for part in self.how.split(",")) if " " in self.how else {}
        return ways.get(str(who), self.how) if who in self.culprits else None

    def loss(self, model: Any, params: Any, batch: Any, context: Context) -> torch.Tensor:
        way = self._way(context)
        if way == "raise":
            raise ZeroDivisionError("on purpose")
        loss = super().loss(model, params, batch, context)
        return loss * {"nan": float("nan"), "inf": float("inf")}.get(way or "", 1.0)

    def client_final(self, trained: Trained, context: Context) -> tuple[Any, Any]:
        way, params = self._way(context), trained.params
        name = next(iter(params))
        if way == "shape":
            params[name] = params[name][:, :-1].clone()
        elif way == "broadcast":
            params[name] = params[name][:1, :1].clone()
        elif way == "dtype":
            params[name] = params[name].double()
        elif way == "missing":
            del params[name]
        elif way == "unknown":
            params["another"] = params[name]
        elif way == "list":
            params[name] = params[name].tolist()
        elif way == "complex":
            params[name] = params[name] * 1j
        message = {"extra": {"w": torch.ones(1)}} if way == "message" else {}
        if way == "none":
            message = None
        visits = context.kept["visits"] if context.kept else 0
        return message, {"visits": visits + 1}


@pytest.fixture
def broken() -> Callable[..., Objective]:
    return Broken
