"""Small specs for each kind of exchange and of state, which all engines must compute to the same bits."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import safetensors.torch
from torch import nn

import fedstrata as fs
from fedstrata.aggregation.optimizers import ServerOptimizer
from fedstrata.methods.base import METHODS
from fedstrata.methods.recipe import Recipe

CLIENTS = 3

_NORMALISED = {"model": {"name": "resnet20"}, "training": {"local_steps": 2, "batch_size": 8, "batch_norm": "local"}}
"""Settings with a model that has BatchNorm, and with few steps."""

_TABLES: dict[str, dict[str, Any]] = {
    "ask": {
        "method": "fedavg",
        "availability": {"name": "bernoulli", "p": 0.6},
        "training": {"momentum": 0.9},
        "evaluation": {"metrics": ["accuracy", "auroc", "ece"], "client_test": 0.2, "validation": 0.1, "fine_tune": 1},
    },
    "ask, state of the objective": {
        "method": "scaffold",
        "training": {"clients_per_round": 2, "rounds": 4},
        "evaluation": {"every": 0, "checkpoint_every": 1},
    },
    "ask, state of the optimiser": {
        "method": "fedprox",
        "training": {"rounds": 3, "clients_per_round": 2, "optimizer": "adamw", "optimizer_state": "keep", "lr": 0.01},
        "evaluation": {"every": 0, "checkpoint_every": 1, "client_test": 0.2, "fine_tune": 1},
    },
    "ask, state of BatchNorm": {
        "method": "fedavg",
        **_NORMALISED,
        "evaluation": {"every": 0, "client_test": 0.2, "fine_tune": 0},
    },
    "sum, pools, masked labels": {"method": {"name": "stratify", "masking": "ckks", "cap": 5}},
    "together, pools": {
        "method": {"name": "stratify", "cap": 4},
        "model": _NORMALISED["model"],
        "training": {"batch_size": 20},
    },
    "ask, memories of codecs": {
        "method": "scaffold",
        "availability": {"name": "bernoulli", "p": 0.6},
        "training": {"rounds": 3},
        "communication": {"up": {"name": "powersgd", "rank": 2}, "down": "qsgd"},
    },
    "ask, several models of availability": {
        "method": "fedavg",
        "availability": [
            {"name": "label-correlated", "mean": 0.6, "least": 0.4, "pattern": "markov", "offline_rounds": 2},
            {"name": "size-correlated", "mean": 0.8},
        ],
        "training": {"rounds": 3},
    },
    "ask, false updates": {
        "method": {"name": "fedavg", "aggregator": "median"},
        "attack": {"name": "gaussian", "clients": [1], "deviation": 0.1},
        "communication": {"up": "qsgd"},
    },
    "sum, false labels": {"method": {"name": "stratify", "cap": 5}, "attack": {"name": "label-flip", "clients": [0]}},
    "sum, memories of codecs": {
        "method": {"name": "stratify", "cap": 5},
        "communication": {"up": {"name": "top-k", "fraction": 0.1}, "down": {"name": "powersgd", "rank": 1}},
    },
    "sum, pools, parts held back": {"method": {"name": "stratify", "cap": 8}, "privacy": {"min_samples": 3}},
    "relay": {"method": "sfl"},
    "relay, pools": {"method": {"name": "stratify", "mode": "single", "cap": 4}},
}


def _spec(table: dict[str, Any]) -> fs.Experiment:
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
            "training": training,
        }
    )


HE = importlib.util.find_spec("tenseal") is not None
MATRIX = {label: _spec(table) for label, table in _TABLES.items() if HE or "masked" not in label}
"""A mapping from labels to experiments; without the extra ``he``, those with masked labels are left out."""


_METHODS: dict[str, dict[str, Any]] = {
    "fedsts": {"method": {"strata": 2}, "training": {"clients_per_round": 2}},
    "fedstas": {"method": {"strata": 2, "fraction": 0.5, "epsilon": 3.0, "bound": 700}},
    "fedsampling": {"method": {"samples": 200}},
    "clustered": {"training": {"clients_per_round": 2}},
    "power-of-choice": {"training": {"clients_per_round": 2}},
    "fedavg-ft": {
        "method": {"per_class": 5},
        "partition": {"name": "classes", "per_client": 4, "size": 100, "clients": CLIENTS},
    },
    "ccvr": {"method": {"every": 2}},
    "fedtan": {**_NORMALISED, "training": {"local_steps": 2, "batch_size": 8}},
}


def _spec_of_method(name: str, table: dict[str, Any]) -> fs.Experiment:
    """Return an experiment with a method in which clients drop out and return."""
    method = {"name": name, **table.get("method", {})}
    training = {"rounds": 3, **table.get("training", {})}
    availability = {"name": "bernoulli", "p": 0.7}
    return _spec({**table, "method": method, "training": training, "availability": availability})


EVERY_METHOD = {name: _spec_of_method(name, _METHODS.get(name, {})) for name in METHODS}
"""A mapping from each registered method to an experiment with it, for tests that may take minutes."""


def with_states(name: str) -> fs.Experiment:
    """Return an experiment with a method in which clients drop out, and which writes all states into checkpoints.

    Convolutions round by the memory format of their weights, which no file keeps. BatchNorm has statistics, and the
    server an optimiser. If the method keeps personal models, they are evaluated.
    """
    method, table = EVERY_METHOD[name].method, EVERY_METHOD[name].to_spec()
    table["partition"] |= {"clients": 5} | ({"size": 20} if "size" in table["partition"] else {})
    if isinstance(method, Recipe) and method.aggregator.server == ServerOptimizer():
        table["method"] |= {"aggregator": {"name": method.aggregator.name, "server": "adam"}}
    training = {"rounds": 3, "clients_per_round": 4, "local_steps": 3, "batch_size": 16, "lr": 0.1, "workers": 1}
    changes = {
        "data": {"name": "digits", "limit": 240},
        "model": "matrix:convolutions",
        "training": training | {"execution": "per-client"},
        "evaluation": {"every": 1, "checkpoint_every": 1, "client_test": 0.2, "fine_tune": 0},
    }
    return fs.Experiment.from_table(table | changes)


def figures(history: fs.History) -> list[dict[str, Any]]:
    """Return the records without times."""
    return [{key: value for key, value in record.items() if key != "seconds"} for record in history]


def final_bytes(history: fs.History) -> bytes:
    """Return the final model as bytes, as in ``model.safetensors``."""
    return safetensors.torch.save(history.params)


def convolutions(shape: Sequence[int], classes: int) -> nn.Module:
    """Return a model of images with convolutions and BatchNorm, which trains quickly."""
    channels, rows, columns = shape
    module = nn.Sequential(nn.Conv2d(channels, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    module.append(nn.Flatten())
    module.add_module("head", nn.Linear(rows * columns, classes))
    return module
