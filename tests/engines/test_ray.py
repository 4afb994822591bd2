"""The Ray engine: the same bits as the local one, whoever computes them, and whoever dies."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matrix
import pytest
import raycases
import torch
from lazy import Lazy
from quick import others_long
from torch import nn

import fedstrata as fs
from fedstrata.base.errors import ExtraMissingError, FedstrataError, SpecError
from fedstrata.base.jsonl import read_jsonl
from fedstrata.clients.client import ClientContext, StateStore
from fedstrata.engines import make_engine
from fedstrata.federation.engine import HopByHop
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Weights
from fedstrata.runs.preparation import prepare
from fedstrata.runs.simulation import make_context
from fedstrata.stratify.masking.key_store import KeyRing

ray = Lazy("ray")

from fedstrata.engines import ray as engine_module  # noqa: E402
from fedstrata.engines.ray import RayEngine, WorkerPool  # noqa: E402
from fedstrata.engines.ray_worker import WorkerPayload  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("servers")]


def rows(history: fs.History) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key != "seconds"} for record in history]


def context_of(spec: fs.Experiment, model: nn.Module | None = None) -> ClientContext:
    context, own = make_context(prepare(spec, model=model)), [raycases.trouble]
    return dataclasses.replace(context, handlers=context.handlers + own)


def federation(engine: Any, context: ClientContext) -> Federation:
    made = Federation(engine, context.config, fs.Always(), "test")
    made.begin(1)
    return made


QUICK = [
    "ask",
    "ask, state of the optimiser",
    *(["sum, pools, masked labels"] if "sum, pools, masked labels" in matrix.MATRIX else []),
    "together, pools",
    "ask, memories of codecs",
    "sum, false labels",
    "relay, pools",
]
"""A spec for each way to ask, with each kind of state; without the extra ``he``, no labels are masked."""


@pytest.mark.parametrize("label", others_long(matrix.MATRIX, QUICK))
def test_equal_bytes_and_equal_books(label: str, on_ray: Any, local: Callable[[str], fs.History]) -> None:
    here, there = local(label), on_ray(matrix.MATRIX[label])
    assert matrix.final_bytes(here) == matrix.final_bytes(there)
    assert rows(here) == rows(there)


@pytest.mark.long
@pytest.mark.parametrize("name", matrix.EVERY_METHOD)
def test_every_method_gives_equal_bytes_and_equal_books(name: str, on_ray: Any) -> None:
    here, there = fs.run(matrix.EVERY_METHOD[name]), on_ray(matrix.EVERY_METHOD[name])
    assert matrix.final_bytes(here) == matrix.final_bytes(there)
    assert rows(here) == rows(there)


def test_many_clients_in_a_call(on_ray: Any) -> None:
    base = matrix.MATRIX["ask, state of the objective"].to_spec()
    base["partition"]["clients"], base["training"]["clients_per_round"] = 60, 40
    spec = fs.Experiment.from_table(base)
    assert matrix.final_bytes(fs.run(spec)) == matrix.final_bytes(on_ray(spec))


def test_failures_are_told_as_in_the_local_engine(pool: WorkerPool) -> None:
    context = context_of(fs.Experiment(partition=fs.IID(clients=5)))
    told = []
    for make in (
        lambda store: make_engine("local", context, store),
        lambda store: RayEngine(context, store, pool=pool),
    ):
        store = StateStore()
        asked = federation(make(store), context)
        for _ in range(2):
            replies = asked.ask(range(5), raycases.Trouble())
        assert {client: reply.times for client, reply in replies.items()} == {0: 2, 4: 2}
        # What was raised or refused leaves no trace in a client's state.
        assert {client: store.get(client) for client in range(5)} == {
            0: {"times": 2}, 1: {}, 2: {}, 3: {}, 4: {"times": 2},
        }  # fmt: skip
        # What cannot be decoded never arrives: failed here, and refused there.
        told.append(sorted((event["clients"], event["reason"]) for event in asked.events))
        asked.engine.close()
    assert told[0] == told[1]
    assert any("ValueError: no luck" in reason and "raycases.py:" in reason for _, reason in told[1])


@pytest.mark.long
@pytest.mark.parametrize("deaths", [1, engine_module.DEATHS - 1])
def test_a_worker_that_is_killed_costs_nothing(on_ray: Any, tmp_path: Path, deaths: int) -> None:
    """Its client failed, and the bytes were others."""
    (markers := tmp_path / "markers").mkdir()
    spec = fs.Experiment.from_table(
        {
            "partition": {"name": "iid", "clients": 6},
            "method": {"name": "fedavg", "objective": {"name": "raycases:Fatal", "markers": str(markers)}},
            "model": {"name": "mlp", "hidden": [16]},
            "training": {"rounds": 3, "local_epochs": 1, "batch_size": 32, "execution": "per-client"},
        }
    )

    def kill(row: Any) -> None:
        if row["round"] == 1:
            for number in range(deaths):
                (markers / str(number)).touch()

    there = on_ray(spec, out=tmp_path / "run", callbacks=[kill])
    assert list(markers.iterdir()) == []
    assert not (tmp_path / "run" / "events.jsonl").exists() or read_jsonl(tmp_path / "run" / "events.jsonl") == []
    here = fs.run(spec)
    assert matrix.final_bytes(there) == matrix.final_bytes(here)
    assert rows(there) == rows(here)


@pytest.mark.long
def test_a_client_that_kills_its_workers_fails_alone(pool: WorkerPool) -> None:
    context = context_of(fs.Experiment(partition=fs.IID(clients=5)))
    context = dataclasses.replace(context, handlers=context.handlers + [raycases.deadly])  # noqa: RUF005
    asked = federation(RayEngine(context, StateStore(), pool=pool), context)
    answered = set(asked.ask(range(5), raycases.Deadly()))
    failed = {client for event in asked.events for client in event["clients"]}
    assert 1 in failed
    assert len(failed) <= 2, "but for those of its own call, who are few where work is quick"
    assert answered == set(range(5)) - failed
    assert "its worker (process " in asked.events[0]["reason"]
    asked.engine.close()


@pytest.mark.long
def test_workers_that_are_killed_at_random_times_leave_no_trace(on_ray: Any, pool: WorkerPool, tmp_path: Path) -> None:
    base = matrix.MATRIX["ask, state of the objective"].to_spec()
    base["training"]["rounds"] = 90
    spec = fs.Experiment.from_table(base)
    draw, killed, timers = random.Random(0), list[int](), list[threading.Timer]()

    def kill() -> None:
        # Who has no name yet has not begun.
        if names := [worker.name for worker in pool._all if worker.hello is None and worker.name]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid := int(draw.choice(names).split()[1]), signal.SIGKILL)
                killed.append(pid)

    def soon(row: Any) -> None:
        """In the middle of a later round, and never after the last one: later tests share the workers."""
        if row["round"] % 3 == 0 and row["round"] <= 75:
            timers.append(threading.Timer(draw.uniform(0.0, 0.2), kill))
            timers[-1].start()

    there = on_ray(spec, out=tmp_path / "run", callbacks=[soon])
    for timer in timers:
        timer.join()
    assert len(set(killed)) >= 10
    assert not (tmp_path / "run" / "events.jsonl").exists(), "nobody failed"
    assert matrix.final_bytes(there) == matrix.final_bytes(fs.run(spec))
    print(f"{len(set(killed))} workers killed")


def test_a_run_goes_on_from_its_checkpoint(on_ray: Any, local: Callable[[str], fs.History], tmp_path: Path) -> None:
    label = "ask, state of the objective"
    spec = matrix.MATRIX[label]

    def stop(row: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        on_ray(spec, out=tmp_path, callbacks=[stop])
    assert matrix.final_bytes(on_ray(spec, out=tmp_path, resume=True)) == matrix.final_bytes(local(label))


def test_random_layers_cannot_run_together(pool: WorkerPool) -> None:
    context = context_of(fs.Experiment(), nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(), nn.Linear(8, 10)))
    asked = federation(RayEngine(context, StateStore(), pool=pool), context)
    with pytest.raises(SpecError, match="draws random numbers"):
        asked.ask(range(2), raycases.Trouble(), together=True)
    # The engine goes on.
    assert list(asked.ask([0], raycases.Trouble())) == [0]
    asked.engine.close()


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_data_are_read_where_they_lie(pool: WorkerPool) -> None:
    context = context_of(fs.Experiment())
    payload = ray.put(WorkerPayload.of(context, KeyRing()))
    twice = [ray.get(payload) for _ in range(2)]
    first, second = (each.unpack() for each in twice)
    assert first.data.x_train.data_ptr() == second.data.x_train.data_ptr()
    assert torch.equal(first.data.inputs(slice(0, 9)), context.data.inputs(slice(0, 9)))
    assert len(first.data.y_test) == 0
    assert first.config.server_data is None


def test_a_world_has_no_more_luggage_than_its_clients_need() -> None:
    context = context_of(fs.Experiment())
    size = len(pickle.dumps(WorkerPayload.of(context, KeyRing())))
    model = sum(tensor.nbytes for tensor in context.config.model.params().values())
    assert (
        size < context.data.x_train.nbytes + context.data.y_train.nbytes + context.assignment.indices.nbytes + 4 * model
    )


@pytest.mark.long
def test_a_session_that_was_there_before_stays(pool: WorkerPool) -> None:
    context = context_of(matrix.MATRIX["ask"])
    engine = RayEngine(context, StateStore(), workers=1)
    asked = federation(engine, context)
    assert list(asked.ask([0, 2], raycases.Trouble())) == [0]
    weights = Weights(context.config.model.params(), {})
    assert isinstance(engine.relay(raycases.Trouble, weights), HopByHop)
    assert engine.ask_sum({}) is None
    engine.close()
    assert ray.is_initialized()


@pytest.mark.long
def test_a_cluster_that_reports_no_processors_gets_one_worker(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It got none."""
    monkeypatch.setattr("ray.cluster_resources", dict)
    context = context_of(matrix.MATRIX["ask"])
    engine = RayEngine(context, StateStore())
    assert list(federation(engine, context).ask([0], raycases.Trouble())) == [0]
    engine.close()


def test_other_versions_are_refused(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "VERSIONS", "fedstrata 0")
    with pytest.raises(FedstrataError, match=r"but this process uses fedstrata 0\. Install the same versions"):
        RayEngine(context_of(fs.Experiment()), StateStore(), pool=pool)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ExtraMissingError, match=r"fedstrata\[ray\]"):
        make_engine("ray", context_of(fs.Experiment()), StateStore())


def descendants(pid: int) -> set[int]:
    """All processes below one."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, grown = {pid}, set[int]()
    while found != grown:
        grown = set(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return found - {pid}


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
def test_ctrl_c_leaves_no_process_behind(tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text("[training]\nrounds = 100000\n[evaluation]\nevery = 0\n")
    command = [sys.executable, "-m", "fedstrata", "run", "spec.toml", "--engine", "ray", "--out", "run"]
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        # A shell's background jobs ignore interrupts, and so does all that they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        patience = time.monotonic() + 120
        while not (metrics.exists() and metrics.read_text()):
            assert process.poll() is None, process.communicate()[0].decode()
            assert time.monotonic() < patience
            time.sleep(0.1)
        below = descendants(process.pid)
        assert below
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=60)[0].decode()
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, said
    assert "interrupted. To continue" in said
    assert "WARNING" not in said
    patience = time.monotonic() + 10
    while still := [pid for pid in below if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < patience, still
        time.sleep(0.1)
