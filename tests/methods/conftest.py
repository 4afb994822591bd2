"""A federation whose server and clients a test can look into between the rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fedstrata.clients.context import ClientContext
from fedstrata.clients.store import StateStore
from fedstrata.data import Dataset, from_arrays
from fedstrata.engines import make_engine
from fedstrata.experiment import prepare
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Weights
from fedstrata.spec import Experiment


class Started:
    """A run taken round by round."""

    def __init__(self, spec: Experiment, data: Dataset | None, model: nn.Module | None) -> None:
        prepared = prepare(spec, data=data, model=model)
        self.config, self.method, self.store = prepared.config, spec.method, StateStore()
        context = ClientContext(prepared.config, prepared.data, prepared.assignment, spec.method.objective_in_use())
        self.federation = Federation(
            make_engine("local", context, self.store), prepared.config, spec.availability, "test"
        )
        self.federation.begin(0)
        weights = Weights(prepared.config.model.params(), prepared.config.model.buffers())
        self.state: Any = spec.method.init(self.federation, weights)
        self.round = 0

    def step(self) -> dict[str, Any]:
        """One more round; its metrics."""
        self.round += 1
        self.federation.begin(self.round)
        self.state, metrics = self.method.run_round(self.federation, self.state)
        return self.federation.accounting.metrics() | metrics


@pytest.fixture
def start() -> Callable[..., Started]:
    """Starts a federation from a spec."""
    torch.set_num_threads(1)
    return lambda spec, data=None, model=None: Started(spec, data, model)


@pytest.fixture(scope="session")
def seven() -> Dataset:
    """Seven samples of two features and three classes, as they are."""
    x = [[0.5, -1.0], [1.5, 0.3], [-0.7, 0.8], [0.2, 0.9], [-1.1, -0.4], [0.6, 1.2], [-0.3, -1.6]]
    return from_arrays(x, [0, 1, 2, 0, 1, 2, 0], x, [0, 1, 2, 0, 1, 2, 0], normalize="none")


@pytest.fixture
def trace(tmp_path) -> Callable[[dict[int, list[int]]], dict[str, str]]:
    """Writes a trace of who is there: client to rounds."""

    def write(rounds: dict[int, list[int]]) -> dict[str, str]:
        lines = [f"{client},{t},{t}" for client, there in rounds.items() for t in there]
        (tmp_path / "trace.csv").write_text("\n".join(["client,first,last", *lines]))
        return {"name": "trace", "file": str(tmp_path / "trace.csv")}

    return write
