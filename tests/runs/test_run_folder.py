"""The files of a run."""

from __future__ import annotations

import hashlib
import json

import pytest

import fedstrata as fs
from fedstrata.base import jsonl
from fedstrata.base.errors import DataError, SpecError
from fedstrata.runs import checkpoint

SPEC = fs.Experiment.from_table(
    {
        "method": "scaffold",
        "partition": {"name": "iid", "clients": 4},
        "model": {"name": "mlp", "hidden": [8]},
        "availability": {"name": "bernoulli", "p": 0.6},
        "training": {"rounds": 4, "local_epochs": 1},
        "evaluation": {"every": 2, "checkpoint_every": 2},
    }
)


@pytest.fixture(scope="module")
def prepared():
    return fs.prepare(SPEC)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder that ``run`` writes."""
    out = tmp_path_factory.mktemp("whole") / "run"
    fs.run(SPEC, out=out)
    return out


def drive(path, prepared, *, rounds=4, resume=False):
    """The loop that ``run`` is, stopped early where asked."""
    with (
        fs.RunFolder.open(path, prepared, resume=resume) as folder,
        fs.Simulation(prepared, checkpoint=folder.checkpoint) as simulation,
    ):
        folder.begin(simulation)
        while simulation.round < rounds:
            folder.log(simulation.step(), simulation)
            folder.save_checkpoint(simulation)
        return folder.finish(simulation) if simulation.done else folder.history


def files(folder):
    """What is there, but for the clock."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for name in (name for name in found if name.endswith("manifest.json")):
        manifest = json.loads(json.loads(found[name])["manifest"])
        del manifest["logs"]["metrics.jsonl"]  # a checksum of records that have the clock in them
        found[name] = json.dumps(manifest).encode()
    return {name: data for name, data in found.items() if name not in ("metrics.jsonl", "summary.json")}


def timeless(history):
    return [{key: value for key, value in record.items() if key != "seconds"} for record in history]


@pytest.mark.slow
def test_without_a_folder_the_history_is_kept_in_memory(prepared, whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    history = drive(None, prepared)
    assert list(tmp_path.iterdir()) == []
    assert history.path is None
    assert timeless(history) == timeless(fs.History.load(whole))
    assert history.params.keys() == prepared.config.model.params().keys()


def test_nothing_goes_on_in_memory(prepared):
    with (
        pytest.raises(SpecError, match=r"resume: requires the folder of a run\. Set 'out' to this folder\."),
        fs.RunFolder.open(None, prepared, resume=True),
    ):
        raise AssertionError


@pytest.mark.slow
def test_driven_by_hand_it_holds_what_run_writes(prepared, whole, tmp_path):
    history = drive(tmp_path / "run", prepared)
    assert files(tmp_path / "run") == files(whole)
    assert {"spec.toml", "events.jsonl", "partition.png", "model.safetensors"} <= files(whole).keys()
    assert timeless(fs.History.load(tmp_path / "run")) == timeless(history) == timeless(fs.History.load(whole))


@pytest.mark.slow
def test_what_comes_after_the_checkpoint_is_dropped_and_done_again(prepared, whole, tmp_path):
    drive(tmp_path / "run", prepared, rounds=3)
    assert [record["round"] for record in fs.History.load(tmp_path / "run")] == [1, 2, 3]
    with fs.RunFolder.open(tmp_path / "run", prepared, resume=True) as folder:
        assert folder.checkpoint.round == 2
        with fs.Simulation(prepared, checkpoint=folder.checkpoint) as simulation:
            folder.begin(simulation)
    assert [record["round"] for record in fs.History.load(tmp_path / "run")] == [1, 2]
    drive(tmp_path / "run", prepared, resume=True)
    assert files(tmp_path / "run") == files(whole)


@pytest.mark.slow
def test_nothing_changes_before_it_begins(prepared, whole):
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    with fs.RunFolder.open(whole, prepared, resume=True) as folder:
        assert folder.checkpoint.round == 4
    with pytest.raises(SpecError, match="already contains a run"), fs.RunFolder.open(whole, prepared):
        raise AssertionError
    assert {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()} == before


def begin_and_fail(path, prepared):
    with fs.RunFolder.open(path, prepared) as folder, fs.Simulation(prepared) as simulation:
        folder.begin(simulation)
        raise ZeroDivisionError


def test_a_folder_that_was_made_for_a_run_that_never_began_goes(prepared, tmp_path):
    with pytest.raises(ZeroDivisionError), fs.RunFolder.open(tmp_path / "run", prepared):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "there").mkdir()
    with pytest.raises(ZeroDivisionError), fs.RunFolder.open(tmp_path / "there", prepared):
        raise ZeroDivisionError
    assert (tmp_path / "there").is_dir()
    with pytest.raises(ZeroDivisionError):
        begin_and_fail(tmp_path / "begun", prepared)
    assert (tmp_path / "begun" / "spec.toml").is_file()


def test_records_that_end_before_their_checkpoint_are_damaged(prepared, tmp_path):
    drive(tmp_path / "run", prepared, rounds=2)
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0])
    with pytest.raises(DataError, match="ends before round 2, but a checkpoint"):
        drive(tmp_path / "run", prepared, resume=True)


@pytest.mark.slow
def test_a_run_killed_before_its_spec_was_written_holds_nothing_yet(prepared, whole, tmp_path):
    """It could neither go on nor begin."""
    drive(tmp_path / "run", prepared, rounds=0)
    kept = (tmp_path / "run" / "run.json").read_bytes()
    for path in (tmp_path / "run").iterdir():
        path.unlink()
    (tmp_path / "run" / "run.json").write_bytes(kept)
    drive(tmp_path / "run", prepared)
    assert files(tmp_path / "run") == files(whole)


@pytest.mark.slow
def test_a_checkpoint_is_written_where_one_is_due(prepared, tmp_path):
    drive(tmp_path / "run", prepared, rounds=1)
    assert checkpoint.load(tmp_path / "run" / "checkpoint") is None
    drive(tmp_path / "other", prepared, rounds=3)
    assert checkpoint.load(tmp_path / "other" / "checkpoint").round == 2


def test_a_checkpoint_holds_the_checksums_of_the_last_lines_and_reads_no_log_for_it(prepared, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(jsonl, "_lines", lambda path, lines=jsonl._lines: read.append(path.name) or lines(path))
    drive(tmp_path / "run", prepared, rounds=2)
    assert read == []
    logs = checkpoint.load(tmp_path / "run" / "checkpoint").logs
    assert logs.keys() == {"metrics.jsonl", "events.jsonl"}
    for name, last in logs.items():
        assert json.loads((tmp_path / "run" / name).read_bytes().splitlines()[-1])["checksum"] == last


@pytest.mark.slow
def test_a_checkpoint_that_says_nothing_of_the_logs_goes_on(prepared, whole, tmp_path):
    """As those of runs from before they did."""
    drive(tmp_path / "run", prepared, rounds=2)
    path = tmp_path / "run" / "checkpoint" / "round-00000002" / "manifest.json"
    manifest = json.loads(json.loads(path.read_bytes())["manifest"])
    del manifest["logs"]
    text = json.dumps(manifest)
    path.write_text(json.dumps({"manifest": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}))
    drive(tmp_path / "run", prepared, resume=True)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


armed = False


def strikes(labels, probabilities):
    """Raise in the next evaluation once the test says so: a metric of a user's own."""
    if armed:
        raise RuntimeError("the disk of this metric is full")
    return 0.5


@pytest.mark.slow
def test_a_round_that_breaks_off_in_its_evaluation_writes_each_event_once(tmp_path, monkeypatch):
    metrics = ["accuracy", f"{__name__}:strikes"]
    tables = SPEC.to_spec() | {"evaluation": {"every": 1, "checkpoint_every": 1, "metrics": metrics}}
    fs.run(tables, out=tmp_path / "whole")
    arm = monkeypatch.setattr
    with pytest.raises(RuntimeError, match="disk of this metric"):
        fs.run(
            tables, out=tmp_path / "broken", callbacks=[lambda record: arm(f"{__name__}.armed", record["round"] == 3)]
        )
    monkeypatch.undo()
    fs.run(tables, out=tmp_path / "broken", resume=True)
    whole, broken = (jsonl.read_jsonl(tmp_path / name / "events.jsonl") for name in ("whole", "broken"))
    assert [event["round"] for event in whole if event["kind"] == "dropped"]
    assert broken == whole
