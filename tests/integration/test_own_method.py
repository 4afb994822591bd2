"""A method, an objective, a partition and a sampler of one's own, without touching the package."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pydantic import PositiveFloat

import fedstrata as fs
from fedstrata.cli import main
from fedstrata.federation.messages import Fit
from fedstrata.methods.recipe import RecipeState
from fedstrata.sampling.base import Selection


class SignVote(fs.Method):
    """Clients train; the server moves every parameter by a fixed step in the direction that most of them took.

    Args:
        step: How far.
    """

    paper = "Bernstein et al. 2019, signSGD with majority vote (ICLR)"
    step: PositiveFloat = 0.01

    def init(self, federation, weights):
        return RecipeState(weights, None, None, None, aggregator=0)

    def run_round(self, federation, state):
        sampler = federation.candidates()
        clients = federation.rng("client-sampling").choice(
            sampler, size=federation.config.training.invited(len(sampler))
        )
        request = Fit(federation.round, state.weights, {}, keep=1.0)
        replies = federation.ask(clients, request)
        params = {}
        for name, w in state.weights.params.items():
            votes = sum((torch.sign(reply.weights.params[name] - w) for reply in replies.values()), torch.zeros(()))
            params[name] = w + self.step * torch.sign(votes)
        weights = type(state.weights)(params, state.weights.buffers)
        rounds = state.aggregator + 1
        return RecipeState(weights, None, None, None, rounds), {"voters": len(replies), "rounds_so_far": rounds}


class Smooth(fs.Objective):
    """Cross-entropy with label smoothing."""

    amount: PositiveFloat = 0.1

    def loss(self, model, params, batch, context):
        return F.cross_entropy(model(params, batch.x), batch.y, label_smoothing=self.amount)


class Stripes(fs.Partition):
    """Every N-th sample."""

    def assign(self, labels, domains, rng):
        return np.arange(len(labels)) % self.clients


class Loudest(fs.ClientSampler):
    """The clients with the largest numbers."""

    def select(self, federation, state, weights):
        clients = federation.candidates()[-federation.config.training.invited(federation.config.clients) :]
        return Selection.plain(clients, federation.config.clients), (state or 0) + 1


HERE = Path(__file__)
SPEC = f"""
[method]
name = "{HERE.stem}:SignVote"
step = 0.02
[partition]
name = "iid"
clients = 8
[training]
rounds = 4
clients_per_round = 5
[evaluation]
checkpoint_every = 2
"""


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "spec.toml"
    path.write_text(SPEC)
    return path


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_it_takes_under_forty_lines():
    assert len(inspect.getsource(SignVote).splitlines()) < 40


@pytest.mark.slow
def test_from_python_and_from_the_command_line_it_is_the_same_run(spec, tmp_path, monkeypatch):
    history = fs.run(
        fs.Experiment(
            method=SignVote(step=0.02),
            partition=fs.IID(clients=8),
            training=fs.Training(rounds=4, clients_per_round=5),
            evaluation=fs.Evaluation(checkpoint_every=2),
        ),
        out=tmp_path / "python",
    )
    assert [record["rounds_so_far"] for record in history] == [1, 2, 3, 4]
    assert history.best_accuracy > 0.5
    monkeypatch.syspath_prepend(str(HERE.parent))
    assert main(["run", str(spec), "--out", str(tmp_path / "cli"), "--quiet"]) == 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("python", "cli")]
    assert weights[0] == weights[1]
    records = [lines(tmp_path / name) for name in ("python", "cli")]
    assert [r["voters"] for r in records[0]] == [r["voters"] for r in records[1]]


@pytest.mark.slow
def test_its_settings_are_checked_like_any_others(spec, tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE.parent))
    assert main(["run", str(spec), "--set", "method.step=-1", "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == ("fedstrata: error: method.step = -1: must be greater than 0.\n")
    assert main(["run", str(spec), "--set", "method.stepp=1", "--out", str(tmp_path / "run")]) == 2
    assert "method.stepp = 1: is not a known key; did you mean 'step'? Use one of: step" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_choices_of_ones_own_in_a_named_method(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE.parent))
    name = HERE.stem
    table = {
        "method": {
            "name": "scaffold",
            "objective": {"name": f"{name}:Smooth", "amount": 0.3},
            "client_sampler": f"{name}:Loudest",
            "aggregator": "size",
        },
        "partition": {"name": f"{name}:Stripes", "clients": 6},
        "training": {"rounds": 2, "clients_per_round": 2},
    }
    history = fs.run(table, out=tmp_path / "run")
    assert [record["clients_returned"] for record in history] == [2, 2]
    again = fs.Experiment.from_toml(tmp_path / "run" / "spec.toml")
    assert again.method.objective.amount == 0.3
    assert again.partition.clients == 6
    assert {type(again.method.client_sampler).__name__, type(again.partition).__name__} == {"Loudest", "Stripes"}
    prepared = fs.prepare(again)
    assert prepared.assignment[1][:3].tolist() == [1, 7, 13]
    plain = fs.run({**table, "method": {**table["method"], "objective": "cross-entropy"}})
    assert history[1]["train_loss"] > plain[1]["train_loss"]


def test_a_partition_of_ones_own_that_loses_samples_is_caught():
    class Forgetful(fs.Partition):
        def assign(self, labels, domains, rng):
            return np.where(np.arange(len(labels)) < 10, -1, np.arange(len(labels)) % self.clients)

    from fedstrata.base.errors import SpecError

    with pytest.raises(SpecError, match="Forgetful leaves out 10 of 1437 samples"):
        fs.prepare(fs.Experiment(partition=Forgetful(clients=5)))
