"""Augmentation on engines: the same bytes from one process, from two, and from Ray; and after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata as fs
from fedstrata.clients.client import StateStore
from fedstrata.engines.local import LocalEngine
from fedstrata.federation.engine import Engine
from fedstrata.runs.simulation import make_context, run_prepared

WAYS: dict[str, Any] = {
    "asks": {"method": "fedavg"},
    "asks, kept states": {"training": {"optimizer": "adamw", "optimizer_state": "keep"}},
    "relays": {"method": "sfl"},
    "sums": {"method": {"name": "stratify", "cap": 10}},
    "relays by stratum": {"method": {"name": "stratify", "mode": "single", "cap": 5}},
}
"""A spec for each way in which a server talks to clients."""

AUGMENTATIONS = ({"name": "crop-flip", "padding": 2}, "augmentations:noise")


def spec_of(way: str, augment: Any) -> fs.Experiment:
    training = {"rounds": 2, "batch_size": 8, "local_epochs": 1, "execution": "per-client"}
    table = {
        "data": {"name": "digits", "limit": 80, "augment": augment},
        "partition": {"name": "iid", "clients": 4},
        "model": {"name": "mlp", "hidden": [8]},
        "evaluation": {"client_test": 0.2, "fine_tune": 1, "checkpoint_every": 1},
        **WAYS[way],
    }
    return fs.Experiment.from_table({**table, "training": training | table.get("training", {})})


def same_bytes(one: fs.History, other: fs.History) -> None:
    rows = [[{key: value for key, value in row.items() if key != "seconds"} for row in each] for each in (one, other)]
    assert json.dumps(rows[0]) == json.dumps(rows[1])
    assert all(torch.equal(one.params[name], other.params[name]) for name in one.params)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("augment", AUGMENTATIONS, ids=str)
def test_two_processes_give_the_same_bytes(way: str, augment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstrata.engines.local.STARTING_PAYS", -1.0)
    monkeypatch.setattr("fedstrata.engines.local.ASKING_PAYS", -1.0)
    spec = spec_of(way, augment)
    prepared = fs.prepare(spec)
    engine: Engine = LocalEngine(make_context(prepared), StateStore(), workers=2)
    same_bytes(fs.run(spec), run_prepared(prepared, None, engine))


@pytest.mark.long
@pytest.mark.xdist_group("servers")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("augment", AUGMENTATIONS, ids=str)
def test_ray_gives_the_same_bytes(way: str, augment: Any, pool: Any) -> None:
    from fedstrata.engines.ray import RayEngine

    spec = spec_of(way, augment)
    prepared = fs.prepare(spec)
    same_bytes(fs.run(spec), run_prepared(prepared, None, RayEngine(make_context(prepared), StateStore(), pool=pool)))


class KilledError(Exception):
    """The end of a run after a checkpoint."""


def die_once(record: Any) -> None:
    raise KilledError


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_goes_on_from_a_checkpoint_ends_in_the_same_bytes(way: str, tmp_path: Path) -> None:
    spec = spec_of(way, AUGMENTATIONS[0])
    whole = fs.run(spec, out=tmp_path / "whole")
    with pytest.raises(KilledError):
        fs.run(spec, out=tmp_path / "killed", callbacks=[die_once])
    assert len((tmp_path / "killed/metrics.jsonl").read_text().splitlines()) == 1
    same_bytes(whole, fs.run(spec, out=tmp_path / "killed", resume=True))
    assert (tmp_path / "killed/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()
