"""Choices of one method in another."""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path

import pytest
import torch
from quick import others_long
from skewed import LEFT_OVER

import fedstrata as fs
from fedstrata.aggregation.base import AGGREGATORS
from fedstrata.spec.experiment import variants

pytestmark = pytest.mark.slow


OPTIMIZERS = ("sgd", "adam", "adagrad", "yogi")
METHODS = [
    "fedprox",
    "scaffold",
    "feddyn",
    "moon",
    "fedrs",
    "fedlc",
    "bsm-fedavg",
    "fedbabu",
    "rebafl",
    "fedavg-ft",
    "ccvr",
    "fedntd",
    "fedavgm",
    "fedadagrad",
    "fedadam",
    "fedyogi",
    "fednova",
    "fedexp",
    "fedau",
    "mifa",
    "fedvarp",
    "fedawe",
    "feddecorr",
    "fedsam",
    "fedlesam",
    "fedentopt",
    "fedgs",
    "fedvls",
]
QUICK = [
    (method, optimizer)
    for place, method in enumerate(METHODS)
    for optimizer in (OPTIMIZERS if method == "scaffold" else (OPTIMIZERS[place % 4],))
]
"""All optimisers with one method, and one of them with each other method."""


@pytest.mark.parametrize(("method", "optimizer"), others_long(itertools.product(METHODS, OPTIMIZERS), QUICK))
def test_every_method_takes_a_server_optimiser(method, optimizer):
    own = fs.Experiment.from_table({"method": method}).method.choices()[3]
    momentum = {"momentum": 0.9} if optimizer == "sgd" else {}
    aggregator = {"name": own.name, "server": {"lr": 0.01, "optimizer": optimizer, **momentum}}
    assert own.name in AGGREGATORS
    more = {"per_class": 5} if method == "fedavg-ft" else {}
    history = fs.run({**LEFT_OVER, "method": {"name": method, "aggregator": aggregator, **more}})
    assert all(torch.isfinite(w).all() for w in history.params.values())
    assert all(record["clients_returned"] == 10 for record in history)


COMPOSITION = Path(__file__).parents[2] / "examples" / "specs" / "rebafl.toml"


def test_the_composition_that_no_paper_has():
    """FedSTS chooses the clients, ReBaFL is what they minimise: from the file alone."""
    experiments = variants(tomllib.loads(COMPOSITION.read_text()))
    spec = experiments["fedsts-rebafl"]
    assert [choice.name for choice in spec.method.choices()] == ["fedsts", "all", "rebafl", "stratum"]
    history = fs.run({**spec.to_spec(), "training": {**spec.to_spec()["training"], "rounds": 2, "local_epochs": 1}})
    assert len(history) == 2
    assert history[-1]["clients_returned"] > 0
    assert 0 < history[-1]["train_loss"] < 3
