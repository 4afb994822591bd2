"""A run goes on only as the run that it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import fedstrata as fs
from fedstrata.base.errors import DataError, FedstrataError, SpecError
from fedstrata.base.jsonl import read_jsonl
from fedstrata.cli import main
from fedstrata.runs import identity
from fedstrata.runs.run_folder import prepare_again

X = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
Y = np.arange(60) % 3
OWN = (X, Y, X[:30], Y[:30])


def spec(**tables: Any) -> fs.Experiment:
    table = {
        "data": {"name": "digits", "limit": 200},
        "partition": {"name": "iid", "clients": 4},
        "model": {"name": "mlp", "hidden": [8]},
        "training": {"rounds": 2, "local_steps": 2},
        "evaluation": {"every": 0, "checkpoint_every": 1},
    }
    for section, change in tables.items():
        table[section] = {**table[section], **change} if isinstance(change, dict) and section in table else change
    return fs.Experiment.from_table(table)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    fs.run(spec(), out=folder)
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


OTHERS = {
    "training.lr = 0.2: the run in this folder has 0.1": {"training": {"lr": 0.2}},
    "seed = 3: the run in this folder has 0": {"seed": 3},
    "training.momentum = 0.9: the run in this folder has 0.0": {"training": {"momentum": 0.9}},
    "training.precision = 'bf16': the run in this folder has 'float32'": {"training": {"precision": "bf16"}},
    "partition.clients = 5: the run in this folder has 4": {"partition": {"clients": 5}},
    "data.limit = 150: the run in this folder has 200": {"data": {"limit": 150}},
    "model.hidden = [9]: the run in this folder has [8]": {"model": {"hidden": [9]}},
    "method.name = 'scaffold': the run in this folder has 'fedavg'": {"method": "scaffold"},
    "availability.name = 'bernoulli': the run in this folder has 'always'": {"availability": "bernoulli"},
    "training.rounds = 1: the run in this folder has 2, and you may only increase": {"training": {"rounds": 1}},
}


@pytest.mark.parametrize("message", OTHERS)
def test_what_decides_a_result_may_not_differ(folder: Path, message: str) -> None:
    """Ten of eleven such edits went on: one history of two experiments, exit code 0."""
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(SpecError) as caught:
        fs.run(spec(**OTHERS[message]), out=folder, resume=True)
    # Several keys may differ where a section has another name; the first is named.
    assert str(caught.value).split(". Use")[0] == message or caught.value.key.startswith(message.split(".")[0])
    assert "Use the run's value, or use another folder than" in str(caught.value)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("edited", ["", "seed = 5\n", "[training]\nlr = 0.5\n"])
def test_an_edited_spec_file_is_not_what_the_run_was(folder: Path, edited: str, capsys: pytest.CaptureFixture) -> None:
    """An empty one finished as the experiment of all defaults."""
    (folder / "spec.toml").write_text(edited)
    assert main(["run", "--resume", str(folder), "--quiet"]) == 2
    assert "Use the run's value, or use another folder than" in capsys.readouterr().err


@pytest.mark.slow
def test_more_rounds_go_on_and_are_noted(folder: Path) -> None:
    assert main(["run", "--resume", str(folder), "--set", "training.rounds=4", "--quiet"]) == 0
    history = fs.History.load(folder)
    assert [record["round"] for record in history] == [1, 2, 3, 4]
    (event,) = read_jsonl(folder / "events.jsonl")
    assert (event["round"], event["kind"]) == (2, "resumed")
    assert "training.rounds was 2 and is 4" in event["reason"]
    straight = fs.run(spec(training={"rounds": 4}))
    assert all((straight.params[name] == tensor).all() for name, tensor in history_params(folder).items())
    # What the folder says now is what it goes on as.
    assert main(["run", "--resume", str(folder), "--quiet"]) == 0


def history_params(folder: Path) -> dict[str, Any]:
    import safetensors.torch

    return safetensors.torch.load_file(folder / "model.safetensors")


def test_what_decides_no_round_may_change(folder: Path) -> None:
    changed = spec(training={"rounds": 3, "workers": 1}, evaluation={"every": 1, "targets": [0.5], "per_class": True})
    history = fs.run(changed, out=folder, resume=True)
    assert history[-1]["per_class"] is not None
    reasons = " ".join(event["reason"] for event in read_jsonl(folder / "events.jsonl"))
    for key in ("training.workers", "training.rounds", "evaluation.every", "evaluation.targets"):
        assert f"{key} was" in reasons


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "why"),
    [({"training": {"schedule": "cosine"}}, "cosine"), ({"method": {"name": "stratify", "mode": "hybrid"}}, "hybrid")],
)
def test_more_rounds_are_refused_where_their_number_decides_every_round(
    tmp_path: Path, table: dict[str, Any], why: str
) -> None:
    fs.run(spec(**table), out=tmp_path / "run")
    with pytest.raises(SpecError, match=f"{why}.* every round depends on the total number of rounds"):
        fs.run(
            spec(**{**table, "training": {**table.get("training", {}), "rounds": 3}}), out=tmp_path / "run", resume=True
        )


@pytest.mark.slow
def test_data_of_ones_own_stand_in_the_spec_and_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The folder said digits and mlp whatever was passed; resuming it trained on digits."""
    out = tmp_path / "own"
    own = spec()
    fs.run(own, data=OWN, out=out)
    text = (out / "spec.toml").read_text()
    assert 'name = "custom"' in text
    assert "60 training and 30 test samples of shape (4,), 3 classes" in text
    assert main(["run", "--resume", str(out), "--quiet"]) == 2
    assert "arrays from a Python program. Pass the same arrays again" in capsys.readouterr().err
    longer = spec(training={"rounds": 3})
    with pytest.raises(SpecError, match="data"):
        fs.run(longer, data=(X + 1, *OWN[1:]), out=out, resume=True)
    with pytest.raises(SpecError, match="data"):
        fs.run(longer, out=out, resume=True)
    assert len(fs.run(longer, data=OWN, out=out, resume=True)) == 3


@pytest.mark.slow
def test_a_module_of_ones_own_stands_in_the_spec_and_is_checked(tmp_path: Path) -> None:
    def module(width: int, seed: int = 0) -> nn.Module:
        from fedstrata.base.rng import torch_seeded

        with torch_seeded(seed, "module"):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    out = tmp_path / "own"
    fs.run(spec(), model=module(8), out=out)
    assert "torch.nn.modules.container.Sequential" in (out / "spec.toml").read_text()
    longer = spec(training={"rounds": 3})
    for other in (module(9), module(8, seed=1)):
        with pytest.raises(SpecError, match="model"):
            fs.run(longer, model=other, out=out, resume=True)
    with pytest.raises(SpecError, match="model"):
        fs.run(longer, out=out, resume=True)
    assert len(fs.run(longer, model=module(8), out=out, resume=True)) == 3


def test_changed_data_behind_the_same_name_are_noticed(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", x_train=X, y_train=Y, x_test=X, y_test=Y)
    own = spec(data={"name": str(tmp_path / "own.npz")})
    fs.run(own, out=tmp_path / "run")
    np.savez(tmp_path / "own.npz", x_train=X[::-1], y_train=Y, x_test=X, y_test=Y)
    with pytest.raises(SpecError, match="data: differs from the data of the run in this folder"):
        fs.run(
            own.model_copy(update={"training": fs.Training(rounds=3, local_steps=2)}), out=tmp_path / "run", resume=True
        )


def test_changed_code_of_the_users_own_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    source = "import fedstrata as fs\n\n\nclass Mine(fs.FedAvg):\n    '''Mine.'''\n"
    (tmp_path / "mine_of_identity.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    mine = spec(method="mine_of_identity:Mine")
    fs.run(mine, out=tmp_path / "run")
    (tmp_path / "mine_of_identity.py").write_text(source + "    paper = 'another'\n")
    import linecache

    linecache.checkcache()
    importlib.reload(importlib.import_module("mine_of_identity"))
    with pytest.raises(
        SpecError, match="code: the Python module 'mine_of_identity' has changed since the run in this folder"
    ):
        fs.run(mine, out=tmp_path / "run", resume=True)


def test_code_of_a_model_in_a_list_is_part_of_the_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import fedstrata as fs\n\n\nclass Mine(fs.Bernoulli):\n    pass\n"
    (tmp_path / "mine_in_a_list.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    several = spec(availability=["markov", "mine_in_a_list:Mine"])
    fs.run(several, out=tmp_path / "run")
    assert "mine_in_a_list" in json.loads((tmp_path / "run/run.json").read_text())["identity"]["code"]
    with pytest.raises(SpecError, match="availability = "):
        fs.run(spec(availability=["markov", "bernoulli"]), out=tmp_path / "run", resume=True)


def test_another_results_version_is_another_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "RESULTS", identity.RESULTS + 1)
    with pytest.raises(
        SpecError, match=("the run in this folder was started with a version of fedstrata that computes different")
    ):
        fs.run(spec(training={"rounds": 3}), out=folder, resume=True)


def test_another_environment_warns_and_is_noted(folder: Path) -> None:
    made = json.loads((folder / "run.json").read_text())
    made["made_with"]["torch"] = "1.0"
    (folder / "run.json").write_text(json.dumps(made))
    with pytest.warns(UserWarning, match=r"changed: torch 1\.0"):
        fs.run(spec(training={"rounds": 3}), out=folder, resume=True)
    assert "changed: torch 1.0" in " ".join(event["reason"] for event in read_jsonl(folder / "events.jsonl"))


@pytest.mark.parametrize("key", ["spec", "data", "code", "results_version", None])
def test_a_folder_that_does_not_say_what_it_was_is_left_alone(folder: Path, key: str | None) -> None:
    shutil.rmtree(folder / "checkpoint")
    whole = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({"identity": {**whole["identity"], key: None}} if key else {}))
    with pytest.raises(
        SpecError,
        match=(
            r"contains a run, but its description \(run\.json\) cannot be read\. "
            r"Give"
        ),
    ):
        fs.run(spec(), out=folder, resume=True)


def test_the_checkpoint_says_it_where_run_json_was_edited(folder: Path) -> None:
    text = (folder / "run.json").read_text()
    (folder / "run.json").write_text(text.replace('"training.lr": 0.1', '"training.lr": 0.2'))
    with pytest.raises(
        SpecError,
        match=r"training\.lr = 0\.2: the run in this folder has 0\.1\. Use the run's value, or use another folder than",
    ):
        fs.run(spec(training={"lr": 0.2}), out=folder, resume=True)


@pytest.mark.slow
def test_damaged_events_are_found_said_and_kept(folder: Path) -> None:
    """A zero-filled file counted as a torn line: all events vanished, exit code 0."""
    fs.run(spec(training={"rounds": 3}), out=folder, resume=True)
    whole = (folder / "events.jsonl").read_bytes()
    (folder / "events.jsonl").write_bytes(bytes(len(whole)))
    fs.run(spec(training={"rounds": 4}), out=folder, resume=True)
    assert (folder / "events.jsonl.damaged").read_bytes() == bytes(len(whole))
    assert "events.jsonl, line 1 is not a JSON object. The damaged file was renamed" in " ".join(
        e["reason"] for e in read_jsonl(folder / "events.jsonl")
    )


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flipped", "deleted", "twice", "swapped", "zeros"])
def test_damaged_records_are_found_and_a_run_does_not_go_on_over_them(folder: Path, damage: str) -> None:
    fs.run(spec(training={"rounds": 4}), out=folder, resume=True)
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    changed = {
        "flipped": [lines[0], lines[1].replace(b'"clients_returned": 4', b'"clients_returned": 3'), *lines[2:]],
        "deleted": [lines[0], *lines[2:]],
        "twice": [lines[0], lines[1], *lines[1:]],
        "swapped": [lines[1], lines[0], *lines[2:]],
        "zeros": [lines[0], bytes(40) + b"\n", *lines[2:]],
    }[damage]
    path.write_bytes(b"".join(changed))
    with pytest.raises(
        DataError,
        match=r"metrics\.jsonl, line \d.*remove this line and the lines after it",
    ):
        fs.History.load(folder)
    with pytest.raises(FedstrataError, match="ends before round 4"):
        fs.run(spec(training={"rounds": 5}), out=folder, resume=True)
    assert (folder / "metrics.jsonl.damaged").read_bytes() == b"".join(changed)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["gone", "emptied", "shortened"])
def test_events_that_were_lost_whole_are_missed(folder: Path, damage: str) -> None:
    """The running checksum says nothing of lines that are missing at the end."""
    fs.run(spec(training={"rounds": 3}), out=folder, resume=True)
    path = folder / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) if damage == "shortened" else b"")
    if damage == "gone":
        path.unlink()
    fs.run(spec(training={"rounds": 4}), out=folder, resume=True)
    told = " ".join(event["reason"] for event in read_jsonl(path))
    assert "events.jsonl was changed after the checkpoint of round 3" in told
    before = path.read_bytes()
    fs.run(spec(training={"rounds": 5}), out=folder, resume=True)  # said once, and then known
    assert path.read_bytes().startswith(before)
    assert path.read_text().count("was changed after the checkpoint") == 1


def test_events_after_a_checkpoint_are_no_damage(folder: Path) -> None:
    """A run that was resumed and killed before its next checkpoint has more lines than its checkpoint knows of."""
    longer = spec(training={"rounds": 3})
    prepared = fs.prepare(longer)
    for _ in range(2):
        with (
            fs.RunFolder.open(folder, prepared, resume=True) as run,
            fs.Simulation(prepared, checkpoint=run.checkpoint) as simulation,
        ):
            run.begin(simulation)
    fs.run(longer, out=folder, resume=True)
    assert "was changed after the checkpoint" not in (folder / "events.jsonl").read_text()


@pytest.mark.slow
def test_records_of_another_run_are_not_this_runs(folder: Path, tmp_path: Path) -> None:
    fs.run(spec(seed=1), out=tmp_path / "other")
    shutil.copy(tmp_path / "other" / "metrics.jsonl", folder / "metrics.jsonl")
    with pytest.raises(DataError, match=r"metrics\.jsonl was changed after the checkpoint of round 2 was written"):
        fs.run(spec(training={"rounds": 3}), out=folder, resume=True)


def long_division(shift: int = 0) -> fs.Given:
    return fs.Given(indices=np.roll(np.arange(160), shift).reshape(4, 40))


@pytest.mark.slow
def test_long_lists_of_indices_lie_beside_the_spec(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """They were thousands of its lines."""
    own, out = spec(partition=long_division()), tmp_path / "run"
    fs.run(own, out=out)
    text = (out / "spec.toml").read_text()
    assert 'file = "partition.npz"' in text
    assert len(text.splitlines()) < 100
    assert fs.Experiment.from_toml(out / "spec.toml") == own
    assert prepare_again(out, "folder").spec == own
    assert main(["run", "--resume", str(out), "--set", "training.rounds=3", "--quiet"]) == 0
    assert len(fs.run(spec(partition=long_division(), training={"rounds": 4}), out=out, resume=True)) == 4
    with pytest.raises(SpecError, match=r"partition\.indices = '4 items.*: the run in this folder has '4 items"):
        fs.run(spec(partition=long_division(1), training={"rounds": 5}), out=out, resume=True)
    (out / "partition.npz").write_bytes(long_division(1).packed())
    assert main(["run", "--resume", str(out), "--set", "training.rounds=5", "--quiet"]) == 2
    assert "partition.indices" in capsys.readouterr().err
    (out / "partition.npz").unlink()
    assert main(["run", "--resume", str(out), "--set", "training.rounds=5", "--quiet"]) == 2
    assert "partition.file" in capsys.readouterr().err


def test_short_lists_of_indices_stay_in_the_spec(tmp_path: Path) -> None:
    fs.run(spec(partition=fs.Given(indices=np.arange(40).reshape(4, 10))), out=tmp_path / "run")
    assert "indices = [" in (tmp_path / "run" / "spec.toml").read_text()
    assert not (tmp_path / "run" / "partition.npz").exists()


@pytest.mark.slow
def test_how_a_run_is_measured_may_change_and_who_trains_on_what_may_not(folder: Path) -> None:
    other = {"metrics": ["accuracy", "macro-f1"], "targets": {"macro-f1": [0.1]}, "per_class": True, "unheard": 3}
    longer = spec(training={"rounds": 3}, evaluation={**other, "every": 1})
    history = fs.run(longer, out=folder, resume=True)
    assert "test" not in history[1]
    assert history[2]["test"]["macro-f1"] > 0
    (_, *noted) = [event["reason"] for event in read_jsonl(folder / "events.jsonl") if event["kind"] == "resumed"]
    assert any("evaluation.metrics was ['accuracy'] and is ['accuracy', 'macro-f1']" in reason for reason in noted)
    for key in ("validation", "client_test", "test_clients"):
        with pytest.raises(SpecError, match=f"evaluation.{key} = 0.2: the run in this folder has 'left out'"):
            fs.run(spec(training={"rounds": 4}, evaluation={key: 0.2}), out=folder, resume=True)
    with pytest.raises(SpecError, match=r"callbacks = .*: the run in this folder has 'left out'"):
        fs.run(spec(training={"rounds": 4}, callbacks=["keep-best"]), out=folder, resume=True)


@pytest.mark.parametrize("what", ["data", "model", "partition"])
def test_each_fingerprint_is_compared(what: str) -> None:
    now = fs.prepare(spec()).identity
    with pytest.raises(SpecError, match=f"^{what}: differs from the {what} of the run in this folder "):
        identity.require_same({**now, what: "0" * 64}, now, "here")
