"""A small spec for every method and every verb: what all engines must compute to the same bits."""

from __future__ import annotations

from typing import Any

import safetensors.torch

import fedstrata as fs
from fedstrata.methods.base import METHODS

CLIENTS = 3

_RESNET = {"model": {"name": "resnet20"}, "training": {"local_steps": 2, "batch_size": 8}}
"""A model with BatchNorm, and few steps with it."""

_TABLES: dict[str, dict[str, Any]] = {
    "fedavg": {"training": {"momentum": 0.9, "weight_decay": 1e-3}},
    "fedavg, clients drop out": {"availability": {"name": "bernoulli", "p": 0.6}},
    "fedavg, cnn": {"model": {"name": "cnn", "channels": [4, 8], "hidden": 16}},
    "fedavg, local batchnorm": _RESNET | {"training": {**_RESNET["training"], "batch_norm": "local"}},
    "scaffold": {"training": {"clients_per_round": 2, "rounds": 3}},
    "fedsts": {"method": {"strata": 2}, "training": {"clients_per_round": 2}},
    "fedstas": {"method": {"strata": 2, "fraction": 0.5, "epsilon": 3.0, "bound": 700}},
    "fedsampling": {"method": {"samples": 200}},
    "clustered": {"training": {"clients_per_round": 2}},
    "power-of-choice": {"training": {"clients_per_round": 2}},
    "fedavg-ft": {
        "method": {"per_class": 5},
        "partition": {"name": "classes", "per_client": 4, "size": 100, "clients": CLIENTS},
    },
    "fedtan": _RESNET,
    "stratify": {"method": {"cap": 10}},
    "stratify, batchnorm": {"method": {"cap": 4}, "model": _RESNET["model"], "training": {"batch_size": 20}},
    "stratify, single": {"method": {"mode": "single", "cap": 10}},
    "stratify, hybrid": {"method": {"mode": "hybrid", "cap": 8}},
}

MASKED = ("stratify, prf", "stratify, ckks")
"""Those that need the extra ``he``."""


def _spec(label: str, table: dict[str, Any]) -> fs.Experiment:
    training = {"rounds": 2, "batch_size": 32, "lr": 0.05, "execution": "per-client", **table.get("training", {})}
    if "local_steps" not in training:
        training["local_epochs"] = 1
    return fs.Experiment.from_table(
        {
            "data": "digits",
            "partition": {"name": "dirichlet", "alpha": 0.5, "clients": CLIENTS},
            "model": {"name": "mlp", "hidden": [16]},
            "evaluation": {"every": 0},
            **table,
            "method": {"name": label.split(",")[0], **table.get("method", {})},
            "training": training,
        }
    )


def _tables() -> dict[str, dict[str, Any]]:
    masked = {label: {"method": {"masking": label.split()[-1], "cap": 5}} for label in MASKED}
    return _TABLES | masked | {name: {} for name in METHODS if name not in _TABLES}


MATRIX = {label: _spec(label, table) for label, table in _tables().items()}
"""Experiments by what they stand for; every method that is registered is there."""


def final_bytes(history: fs.History) -> bytes:
    """The final model, as ``model.safetensors`` holds it."""
    return safetensors.torch.save(history.params)
