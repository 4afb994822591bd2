"""Tasks on engines: the same bytes from one process, from two, and from Ray; and after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quick import others_long
from task_cases import CASES, Networks, data_of, prepared_of, spec_of

import fedstrata as fs
from fedstrata.clients.client import StateStore
from fedstrata.engines.local import LocalEngine
from fedstrata.federation.engine import Engine
from fedstrata.runs.preparation import Prepared
from fedstrata.runs.simulation import make_context, run_prepared

WAYS: dict[str, Any] = {
    "asks": "fedavg",
    "relays": "sfl",
    "sums": {"name": "stratify", "batch_size": 8},
    "relays by stratum": {"name": "stratify", "mode": "single"},
}
"""A method for each way in which a server talks to clients."""

WITHOUT_STRATA = ("regression", "multilabel", "segmentation")
RUNS = [(case, way) for case in CASES for way in WAYS if not (case in WITHOUT_STRATA and "stratify" in str(WAYS[way]))]
TASKS = ("regression", "multilabel", "next-token, domains", "segmentation")
EACH_WAY_ONCE = [run for run in RUNS if run[0] == "classification"] + [(task, "asks") for task in TASKS]
"""In the usual tests, each way with classes and each task with the first way."""
EVALUATION = {"client_test": 0.2, "fine_tune": 1}


@pytest.fixture(autouse=True)
def _workers_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstrata.engines.local.STARTING_PAYS", -1.0)
    monkeypatch.setattr("fedstrata.engines.local.ASKING_PAYS", -1.0)


def run(prepared: Prepared, engine: Engine) -> fs.History:
    return run_prepared(prepared, None, engine)


def alone(prepared: Prepared) -> Engine:
    return LocalEngine(make_context(prepared), StateStore())


def same_bytes(one: fs.History, other: fs.History) -> None:
    rows = [[{key: value for key, value in row.items() if key != "seconds"} for row in each] for each in (one, other)]
    assert json.dumps(rows[0]) == json.dumps(rows[1])
    assert one.params.keys() == other.params.keys()
    assert all(torch.equal(one.params[name], other.params[name]) for name in one.params)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "way"), others_long(RUNS, EACH_WAY_ONCE))
def test_two_processes_give_the_same_bytes_and_a_fused_pass_the_same_numbers(case: str, way: str) -> None:
    prepared = prepared_of(case, WAYS[way], evaluation=EVALUATION)
    whole = run(prepared, alone(prepared))
    same_bytes(whole, run(prepared, LocalEngine(make_context(prepared), StateStore(), workers=2)))
    fused = prepared_of(case, WAYS[way], evaluation=EVALUATION, training={"execution": "fused"})
    other = run(fused, alone(fused))
    for name, tensor in whole.params.items():
        torch.testing.assert_close(other.params[name], tensor, rtol=1e-4, atol=1e-5)
    assert other[-1]["loss"] == pytest.approx(whole[-1]["loss"], rel=1e-4)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.xdist_group("servers")
@pytest.mark.parametrize(("case", "way"), RUNS)
def test_ray_gives_the_same_bytes(case: str, way: str, pool: Any) -> None:
    from fedstrata.engines.ray import RayEngine

    prepared = prepared_of(case, WAYS[way], evaluation=EVALUATION)
    whole = run(prepared, alone(prepared))
    same_bytes(whole, run(prepared, RayEngine(make_context(prepared), StateStore(), pool=pool)))


class KilledError(Exception):
    """The end of a run after a checkpoint."""


def die_once(record: Any) -> None:
    raise KilledError


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "way"),
    others_long(RUNS, [run for run in RUNS if run[0] == "classification" or run == ("regression", "asks")]),
)
def test_a_run_that_goes_on_from_a_checkpoint_ends_in_the_same_bytes(case: str, way: str, tmp_path: Path) -> None:
    spec, data, model = (
        spec_of(WAYS[way], evaluation=EVALUATION | {"checkpoint_every": 1}),
        data_of(case),
        Networks(case),
    )
    whole = fs.run(spec, data=data, model=model, out=tmp_path / "whole")
    with pytest.raises(KilledError):
        fs.run(spec, data=data, model=model, out=tmp_path / "killed", callbacks=[die_once])
    assert len((tmp_path / "killed/metrics.jsonl").read_text().splitlines()) == 1
    resumed = fs.run(spec, data=data_of(case), model=Networks(case), out=tmp_path / "killed", resume=True)
    same_bytes(whole, resumed)
    assert (tmp_path / "killed/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()
