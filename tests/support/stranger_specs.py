"""Specs of short runs with the unusual models of ``strangers.py``, for each method."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import safetensors.torch
from strangers import DRAWS, ZOO

import fedstrata as fs
from fedstrata.clients.client import StateStore
from fedstrata.engines.local import LocalEngine
from fedstrata.methods import base as registry
from fedstrata.runs.simulation import make_context, run_prepared

FOLDER = str(Path(__file__).parent)
"""The folder from which other processes import the models."""

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "scaffold": {},
    "moon": {},
    "rebafl": {},
    "feddyn": {},
    "fedbabu": {},
    "fedper": {},
    "fedrep": {"head_epochs": 2},
    "ditto": {},
    "fedssar": {},
    "fedstas": {"strata": 2, "fraction": 0.5},
    "sfl": {},
    "stratify": {"cap": 6},
    "stratify, single": {"name": "stratify", "mode": "single", "cap": 4},
    "stratify, together": {"name": "stratify", "cap": 6},
    "fedtan": {},
}
TOGETHER = ("stratify, together", "fedtan")
"""The methods in which a model with BatchNorm needs sums over all clients within a forward pass."""

SETTINGS: dict[str, dict[str, Any]] = {
    "fedsts": {"strata": 2},
    "fedsampling": {"samples": 60},
    "fedavg-ft": {"per_class": 2},
}
"""The settings of other methods, if they cannot run with the default values."""
MORE = {name: SETTINGS.get(name, {}) for name in registry.METHODS if name not in METHODS}
"""The other methods, which share their code with those above."""

PARTITION = {"name": "dirichlet", "alpha": 0.5, "clients": 4, "min_size": 4}
SPARING = {"name": "classes", "per_client": 4, "size": 10, "clients": 4}
"""A partition that leaves samples for the server, which FedAvg-FT needs."""

KINDS = {
    "scaffold": "ask, state",
    "stratify": "sum, pools",
    "stratify, together": "together, pools",
    "sfl": "relay",
    "stratify, single": "relay, pools",
}
"""One method for each kind of exchange and state, for engines whose processes take long to start."""

NAMES = [model.__name__ for model in ZOO]


def spec(model: str, method: str, **training: Any) -> fs.Experiment:
    settings = {"rounds": 2, "clients_per_round": 3, "batch_size": 16, "lr": 0.02}
    settings |= {} if "local_steps" in training else {"local_epochs": 1}
    return fs.Experiment.from_table(
        {
            "data": {"name": "digits", "limit": 120, "normalize": "unit"},
            "partition": SPARING if method == "fedavg-ft" else PARTITION,
            "model": f"strangers:{model}{'Normed' if method in TOGETHER else ''}",
            "method": {"name": method, **METHODS.get(method, MORE.get(method, {}))},
            "training": {**settings, **training},
            "evaluation": {"every": 0},
        }
    )


def bytes_of(history: fs.History) -> bytes:
    assert history.params is not None
    return safetensors.torch.save(history.params)


def refused(model: str, method: str) -> bool:
    """Return True if the model must be refused, because it draws from a generator that clients, as threads, share."""
    return method in TOGETHER and model in {m.__name__ for m in DRAWS}


@cache
def here(model: str, method: str) -> bytes:
    """Return the bytes of the final model that the local engine computes."""
    prepared = fs.prepare(spec(model, method, execution="per-client"))
    return bytes_of(run_prepared(prepared, engine=LocalEngine(make_context(prepared), StateStore())))


ELSEWHERE = [(model, method) for model in NAMES for method in KINDS]
PAIRS = [pair for pair in ELSEWHERE if not refused(*pair)]
