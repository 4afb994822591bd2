"""Real runs killed by SIGKILL, and checkpoints damaged on disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import fedstrata as fs
from fedstrata.base.errors import CheckpointError
from fedstrata.base.records import encode
from fedstrata.cli import main
from fedstrata.clients.client import StateStore
from fedstrata.runs import checkpoint

METHODS = {"scaffold": 2, "stratify": 1, "fedavg": 2}
"""Rounds between two checkpoints."""

ADAMW = {"optimizer": "adamw", "optimizer_state": "keep", "lr": 0.01}
"""Settings of FedAvg with which clients keep a state."""


def experiment(method: str, rounds: int = 5, every: int | None = None) -> fs.Experiment:
    more = ADAMW if method == "fedavg" else {}
    return fs.Experiment.from_table(
        {
            "method": method,
            "data": {"name": "digits", "limit": 200},
            "partition": {"alpha": 0.5, "clients": 8},
            "availability": {"name": "bernoulli", "p": 0.7},
            "training": {"rounds": rounds, "local_epochs": 1, "clients_per_round": 4, **more},
            "evaluation": {"checkpoint_every": METHODS[method] if every is None else every},
        }
    )


def records(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # The clock is no part of it, nor is a checksum of what the clock is in.
    return [{key: value for key, value in line.items() if key not in ("seconds", "checksum")} for line in lines]


def result(folder: Path) -> tuple[bytes, list[dict], bytes]:
    """What must not depend on how often a run was killed."""
    events = folder / "events.jsonl"
    return (
        (folder / "model.safetensors").read_bytes(),
        records(folder),
        events.read_bytes() if events.exists() else b"",
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A finished run of each method, with its checkpoints."""
    folders = {method: tmp_path_factory.mktemp("undisturbed") / method for method in METHODS}
    for method, folder in folders.items():
        fs.run(experiment(method), out=folder)
    return folders


CRASH = """
import os, shutil, signal, sys
import torch
import sklearn.datasets
import fedstrata as fs, fedstrata.experiments.run
torch.set_num_threads(1)
root, *methods = sys.argv[1:]
for method in methods:
    spec = fs.Experiment.from_toml(f"{root}/{method}.toml")
    moment, finished = 1, False
    while not finished:
        pid = os.fork()
        if pid == 0:
            out = f"{root}/{method}-{moment}"
            os.mkdir(out)
            open(f"{out}/partition.png", "w").close()  # drawing it would take longer than all the rest
            # The process dies just before its moment-th change of the file system.
            left = moment
            def lethal(work):
                def wrapped(*args, **kwargs):
                    global left
                    left -= 1
                    if left == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return work(*args, **kwargs)
                return wrapped
            for name in ("fsync", "rename", "replace", "unlink", "mkdir"):
                setattr(os, name, lethal(getattr(os, name)))
            fs.run(spec, out=out)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        finished = os.WIFEXITED(status)
        assert finished or os.WTERMSIG(status) == signal.SIGKILL
        assert not finished or os.WEXITSTATUS(status) == 0
        moment = moment + 4 if moment < 5 else int(moment * 1.9)
"""
"""Kills runs at ever later moments, until one comes to its end."""


@pytest.mark.long
def test_a_run_killed_before_any_change_of_its_folder_ends_in_the_same_bytes(tmp_path, undisturbed):
    for method in METHODS:
        (tmp_path / f"{method}.toml").write_text(experiment(method).to_toml())
    subprocess.run([sys.executable, "-c", CRASH, str(tmp_path), *METHODS], check=True)
    for method in METHODS:
        killed = sorted(tmp_path.glob(f"{method}-*"), key=lambda path: int(path.name.split("-")[1]))
        assert len(killed) > 6
        started_over = resumed = 0
        for folder in killed:
            found = checkpoint.load(folder / "checkpoint")
            started_over, resumed = started_over + (found is None), resumed + (found is not None)
            fs.run(experiment(method), out=folder, resume=True)
            assert result(folder) == result(undisturbed[method]), folder.name
            assert not list(folder.rglob("*.part"))
            assert not list(folder.rglob(".*.tmp"))
        assert started_over >= 2
        assert resumed >= 2


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_killed_from_outside_and_resumed_by_command(tmp_path, undisturbed, capsys, method):
    path, folder = tmp_path / "spec.toml", tmp_path / "run"
    path.write_text(experiment(method).to_toml())
    command = [sys.executable, "-m", "fedstrata", "run", str(path), "--out", str(folder), "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (folder / "metrics.jsonl").exists() or len((folder / "metrics.jsonl").read_bytes().splitlines()) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"round": 3, "accu')  # a line that was being written
    assert main(["run", "--resume", str(folder), "--quiet"]) == 0
    assert result(folder) == result(undisturbed[method])
    assert [record["round"] for record in records(folder)] == [1, 2, 3, 4, 5]
    assert (folder / "summary.json").exists()
    capsys.readouterr()


@pytest.mark.slow
def test_resuming_a_finished_run_changes_nothing(tmp_path, undisturbed):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed["scaffold"], folder)
    history = fs.run(experiment("scaffold"), out=folder, resume=True)
    assert result(folder) == result(undisturbed["scaffold"])
    assert [record["round"] for record in history] == [1, 2, 3, 4, 5]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


def newest_client_file(folder: Path) -> Path:
    names = (folder / "checkpoint" / "clients").glob("*-5.bin")
    return min(names)


LAST = "checkpoint/round-00000005"
DAMAGES = {
    "a byte of the state": lambda folder: flip(folder / LAST / "state.bin"),
    "a byte of the manifest": lambda folder: flip(folder / LAST / "manifest.json"),
    "a byte of a client's state": lambda folder: flip(newest_client_file(folder)),
    "a truncated manifest": lambda folder: os.truncate(folder / LAST / "manifest.json", 40),
    "an empty manifest": lambda folder: os.truncate(folder / LAST / "manifest.json", 0),
    "a manifest of something else": lambda folder: (folder / LAST / "manifest.json").write_text("[1]"),
    "a truncated state": lambda folder: os.truncate(folder / LAST / "state.bin", 100),
    "no state": lambda folder: (folder / LAST / "state.bin").unlink(),
    "no file of a client": lambda folder: newest_client_file(folder).unlink(),
    "an empty folder": lambda folder: [path.unlink() for path in (folder / LAST).iterdir()],
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_recognised_and_the_one_before_is_used(tmp_path, undisturbed, damage):
    whole, folder = undisturbed["scaffold"], tmp_path / "run"
    shutil.copytree(whole, folder)
    assert checkpoint.load(folder / "checkpoint").round == 5
    DAMAGES[damage](folder)
    assert checkpoint.load(folder / "checkpoint").round == 4
    (folder / "model.safetensors").unlink()
    fs.run(experiment("scaffold"), out=folder, resume=True)
    assert result(folder) == result(whole)
    # The checkpoint written over the damaged one is what it was.
    again, expected = checkpoint.load(folder / "checkpoint"), checkpoint.load(whole / "checkpoint")
    assert again.round == 5
    assert encode(again.state) == encode(expected.state)
    assert {k: path.read_bytes() for k, path in again.clients.items()} == {
        k: path.read_bytes() for k, path in expected.clients.items()
    }


@pytest.mark.slow
def test_when_all_checkpoints_are_damaged_that_is_said(tmp_path, undisturbed, capsys):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed["scaffold"], folder)
    for state in folder.glob("checkpoint/round-*/state.bin"):
        flip(state)
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"05: the file state.bin is damaged.*04: the file state.bin is damaged"):
        fs.run(experiment("scaffold"), out=folder, resume=True)
    assert main(["run", "--resume", str(folder), "--quiet"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("fedstrata: all checkpoints in ")
    assert error.count("\n") == 1
    assert (folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_two_checkpoints_are_kept_and_only_files_that_they_need(undisturbed):
    folder = undisturbed["scaffold"] / "checkpoint"
    assert sorted(path.name for path in folder.iterdir()) == ["clients", "round-00000004", "round-00000005"]
    needed = {
        path.name
        for kept in ("round-00000004", "round-00000005")
        for path in checkpoint._read(folder / kept).clients.values()
    }
    assert {path.name for path in (folder / "clients").iterdir()} == needed


def test_only_states_that_changed_are_written(tmp_path):
    store = StateStore()
    for client in range(50):
        store.put(client, {"n": client})
    checkpoint.save(tmp_path, 1, "first", store)
    assert len(list((tmp_path / "clients").iterdir())) == 50
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "clients").iterdir()}
    store.put(7, {"n": 700})
    checkpoint.save(tmp_path, 2, "second", store)
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "clients").iterdir()}
    assert after.keys() - before.keys() == {"7-2.bin"}
    assert all(after[name] == changed for name, changed in before.items())
    found = checkpoint.load(tmp_path)
    again = StateStore()
    found.restore(again)
    assert (found.round, found.state) == (2, "second")
    assert {client: again.get(client)["n"] for client in again.clients} == {k: 700 if k == 7 else k for k in range(50)}
    assert again.changed == set()


def test_without_checkpoints_a_run_starts_over(tmp_path):
    assert checkpoint.load(tmp_path / "nowhere") is None
    spec = experiment("scaffold", rounds=2, every=0)
    fs.run(spec, out=tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoint").exists()
    before = result(tmp_path / "run")
    fs.run(spec, out=tmp_path / "run", resume=True)
    assert result(tmp_path / "run") == before


def test_a_state_larger_than_a_message_may_be_is_read_again(tmp_path, monkeypatch):
    """It was written and could never be read: the limit is for what others send."""
    from fedstrata.base import records

    store = StateStore()
    store.put(3, {"x": np.zeros(5000)})
    checkpoint.save(tmp_path, 1, {"w": np.ones(5000)}, store)
    monkeypatch.setattr(records, "DEFAULT_LIMIT", 1000)
    monkeypatch.setattr(records.decode, "__kwdefaults__", {"limit": 1000})
    found = checkpoint.load(tmp_path)
    assert found is not None
    assert found.state["w"].sum() == 5000
    found.restore(again := StateStore())
    assert again.get(3)["x"].shape == (5000,)


def test_it_says_what_the_run_is(tmp_path):
    """It was written, and what was read never had it."""
    checkpoint.save(tmp_path, 1, None, StateStore(), identity={"data": "abc"})
    assert checkpoint.load(tmp_path).identity == {"data": "abc"}


def test_one_under_the_name_of_another_round_is_damaged(tmp_path):
    """It was read, and the next one was built upon the one before it, or upon a damaged one with a traceback."""
    for round in (1, 2):
        checkpoint.save(tmp_path, round, round, StateStore())
    (tmp_path / "round-00000002").rename(tmp_path / "round-00000007")
    assert checkpoint.load(tmp_path).state == 1
    shutil.rmtree(tmp_path / "round-00000001")
    with pytest.raises(CheckpointError, match="07: the folder contains the checkpoint of round 2, but"):
        checkpoint.load(tmp_path)


def test_the_last_round_that_is_considered_is_one_of_them(tmp_path):
    for round in (1, 2, 3):
        checkpoint.save(tmp_path, round, f"state {round}", StateStore())
    found = [checkpoint.load(tmp_path, last) for last in (None, 3, 2, 1)]
    assert [each and (each.round, each.state) for each in found] == [
        (3, "state 3"),
        (3, "state 3"),
        (2, "state 2"),
        None,
    ]
