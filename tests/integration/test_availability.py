"""Availability models on digits, from the command line, and after a run was resumed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tomli_w

import fedstrata as fs
from fedstrata.base.jsonl import read_jsonl
from fedstrata.cli import main

pytestmark = pytest.mark.slow

TRACE = "client,first,last\n" + "".join(f"{client},{30 * client},{30 * client + 95}\n" for client in range(6))
MODELS = {
    "markov": {"name": "markov", "online_rounds": 2.0, "offline_rounds": 3.0},
    "cyclic": {"name": "cyclic", "p": 0.4, "period": 5},
    "diurnal": {"name": "diurnal", "period": 6},
    "labels": {"name": "label-correlated", "mean": 0.5, "concentration": 0.5},
    "labels in spells": {"name": "label-correlated", "mean": 0.5, "pattern": "markov", "offline_rounds": 3.0},
    "sizes": {"name": "size-correlated", "mean": 0.5, "exponent": 0.5, "pattern": "cyclic", "period": 4},
    "seconds": {"name": "trace", "file": "trace.csv", "round_seconds": 60.0},
    "several": [{"name": "label-correlated", "mean": 0.7}, {"name": "markov"}, {"name": "bernoulli", "p": 0.9}],
}


def run(name: str, rounds: int, out: str) -> int:
    table = {
        "data": {"name": "digits", "limit": 300},
        "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 6},
        "availability": MODELS[name],
        "training": {"rounds": rounds, "clients_per_round": 6, "local_epochs": 1},
        "evaluation": {"checkpoint_every": 2},
    }
    Path("spec.toml").write_text(tomli_w.dumps(table))
    return main(["run", "spec.toml", "--out", out, "--quiet"])


def figures(folder: str) -> list[dict[str, object]]:
    records = read_jsonl(Path(folder) / "metrics.jsonl")
    return [{key: value for key, value in record.items() if key not in ("seconds", "checksum")} for record in records]


def dropped(folder: str) -> dict[int, list[int]]:
    events = read_jsonl(Path(folder) / "events.jsonl")
    return {event["round"]: event["clients"] for event in events if event["kind"] == "dropped"}


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("labels in spells", "several") else pytest.param(name, marks=pytest.mark.long)
        for name in MODELS
    ],
)
def test_a_resumed_run_ends_in_the_same_bytes(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("trace.csv").write_text(TRACE)
    assert run(name, 9, "whole") == 0
    assert run(name, 5, "resumed") == 0
    assert main(["run", "--resume", "resumed", "--set", "training.rounds=9", "--quiet"]) == 0
    assert figures("whole") == figures("resumed")
    assert dropped("whole") == dropped("resumed")
    assert Path("whole/model.safetensors").read_bytes() == Path("resumed/model.safetensors").read_bytes()
    # The events name the clients that the model says are offline.
    model = fs.prepare(fs.Experiment.from_toml("whole/spec.toml")).spec.availability
    for round in range(1, 10):
        assert dropped("whole").get(round, []) == np.flatnonzero(~model.online(np.arange(6), round, 0)).tolist()
    assert 0 < sum(map(len, dropped("whole").values())) < 54
