from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from quick import others_long
from torch import nn

import fedstrata as fs
from fedstrata.base.errors import DataError, SpecError
from fedstrata.base.jsonl import read_jsonl
from fedstrata.base.records import encode
from fedstrata.federation.messages import Fit

SMALL = {"partition": {"alpha": 0.5, "clients": 10}, "training": {"rounds": 3, "local_epochs": 1}}


def spec(**change):
    return fs.Experiment.from_table({**SMALL, **change})


def lines(folder: Path, name: str = "metrics.jsonl"):
    return read_jsonl(folder / name)


def timeless(records):
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]


HARD = {"availability": {"name": "bernoulli", "p": 0.6, "deadline": 0.3, "speed_spread": 0.5}}


@pytest.mark.slow
@pytest.mark.parametrize("method", others_long(["fedavg", "scaffold", "fedstas", "stratify"], ["scaffold", "stratify"]))
def test_the_same_spec_twice_gives_the_same_bytes(tmp_path, method):
    for name in ("one", "two"):
        torch.manual_seed(len(name) * hash(name) % 1000)  # of no consequence
        np.random.seed(ord(name[0]))  # noqa: NPY002
        fs.run(spec(method=method, **HARD), out=tmp_path / name)
    one, two = tmp_path / "one", tmp_path / "two"
    for file in ("model.safetensors", "spec.toml", "events.jsonl"):
        assert (one / file).read_bytes() == (two / file).read_bytes(), file
    assert timeless(lines(one)) == timeless(lines(two))
    assert sum(record["clients_dropped"] for record in lines(one)) > 0


@pytest.mark.slow
def test_another_seed_gives_another_model_and_another_partition():
    specs = [spec(seed=seed) for seed in (0, 1)]
    one, two = (fs.run(s) for s in specs)
    assert not torch.equal(next(iter(one.params.values())), next(iter(two.params.values())))
    assignments = [fs.prepare(s).assignment.indices for s in specs]
    assert (assignments[0] != assignments[1]).any()


@pytest.mark.slow
def test_evaluation_and_checkpoints_move_nobodys_draws(tmp_path):
    often = fs.run(spec(method="scaffold", evaluation={"every": 1, "checkpoint_every": 1}, **HARD), out=tmp_path / "a")
    never = fs.run(
        spec(method="scaffold", evaluation={"every": 0, "checkpoint_every": 0}, **HARD), callbacks=[lambda record: None]
    )
    assert safetensors.torch.save(often.params) == safetensors.torch.save(never.params)
    assert [record["accuracy"] is None for record in never] == [True, True, False]
    assert [record["accuracy"] is None for record in often] == [False] * 3
    changed = {"accuracy", "loss", "seconds"}
    for a, b in zip(often, never, strict=True):
        assert {k: v for k, v in a.items() if k not in changed} == {k: v for k, v in b.items() if k not in changed}
    assert often[-1]["accuracy"] == never[-1]["accuracy"]


@pytest.mark.slow
def test_one_client_more_changes_nothing_for_the_others(tiny):
    availability = fs.Bernoulli(p=0.6, speed_spread=0.7, deadline=0.013)
    answers = []
    for clients in (12, 13):
        federation = tiny(clients, availability=availability, local_epochs=2)
        rounds = []
        for round in range(1, 5):
            federation.begin(round)
            request = Fit(round, federation.weights, {}, keep=0.7)
            replies = federation.ask(range(clients), request, work=lambda samples: 2 * 0.7 * samples)
            absent = federation.log.dropped, federation.log.late
            rounds.append(({k: encode(r) for k, r in replies.items() if k < 12}, *[a - {12} for a in absent]))
        answers.append(rounds)
    assert answers[0] == answers[1]
    assert all(any(part) for part in zip(*answers[0], strict=True))


def test_one_client_more_in_a_given_partition_leaves_the_others_their_data():
    parts = [list(range(40 * k, 40 * k + 40)) for k in range(5)]
    four, five = (fs.prepare(fs.Experiment(partition=fs.Given(indices=parts[:n]))) for n in (4, 5))
    for client in range(4):
        assert (four.assignment[client] == five.assignment[client]).all()
    params = [prepared.config.model.params() for prepared in (four, five)]
    assert all(torch.equal(w, params[1][name]) for name, w in params[0].items())


@pytest.mark.slow
def test_the_run_folder(tmp_path, drawn):
    history = fs.run(spec(evaluation={"targets": [0.05, 1.0], "per_class": True}), out=tmp_path / "a" / "run")
    folder = tmp_path / "a" / "run"
    assert {path.name for path in folder.iterdir()} == {
        "spec.toml", "run.json", "metrics.jsonl", "summary.json", "model.json", "model.safetensors", "partition.png",
        "evaluation.json", "checkpoint",
    }  # fmt: skip
    assert (folder / "partition.png").stat().st_size > 10_000
    assert fs.Experiment.from_toml(folder / "spec.toml") == spec(evaluation={"targets": [0.05, 1.0], "per_class": True})
    records = lines(folder)
    assert records == list(history) == list(fs.History.load(folder))
    assert [record["round"] for record in records] == [1, 2, 3]
    for record in records:
        assert record["clients_invited"] == record["clients_returned"] == 10
        assert len(record["per_class"]) == 10
        assert record["bytes_up"] > 0
        assert record["seconds"] > 0
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == json.loads(json.dumps(history.summary))
    assert summary["final_accuracy"] == records[-1]["accuracy"]
    assert summary["rounds_to_target"] == {"0.05": 1, "1": None}
    saved = safetensors.torch.load_file(folder / "model.safetensors")
    assert all(torch.equal(saved[name], w) for name, w in history.params.items())
    # What is stored is what was evaluated.
    module = fs.prepare(history_spec := spec()).config.model.module
    module.load_state_dict(saved)
    data = history_spec.data.load(0)
    with torch.no_grad():
        hits = module(data.inputs(slice(None), "test")).argmax(1) == data.y_test
    assert int(hits.sum()) / len(hits) == records[-1]["accuracy"]


@pytest.mark.slow
def test_a_run_learns():
    history = fs.run(spec(training={"rounds": 8, "local_epochs": 2}, partition={"name": "iid", "clients": 10}))
    assert history.final_accuracy > 0.85


@pytest.mark.slow
def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(fs.run(spec())) == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_callbacks_see_every_round():
    seen = []
    history = fs.run(spec(), callbacks=[lambda record: seen.append(dict(record))])
    assert seen == list(history)


@pytest.mark.slow
def test_a_spec_may_be_a_file_or_a_table(tmp_path):
    path = tmp_path / "spec.toml"
    path.write_text(spec().to_toml())
    models = [safetensors.torch.save(fs.run(s).params) for s in (spec(), SMALL, path, str(path))]
    assert len(set(models)) == 1


def blobs():
    generator = np.random.default_rng(0)
    y = np.arange(200) % 4
    x = generator.normal(size=(200, 6)).astype(np.float32) + 4 * np.eye(4, 6, dtype=np.float32)[y]
    return x[:160], y[:160], x[160:], y[160:]


@pytest.mark.slow
def test_data_and_a_model_of_ones_own():
    x_train, y_train, x_test, y_test = blobs()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    start = module[0].weight.detach().clone()
    forms = [
        (x_train, y_train, x_test, y_test),
        {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test},
        fs.from_arrays(x_train, y_train, x_test, y_test),
    ]
    experiment = spec(training={"rounds": 10, "lr": 0.2})
    histories = [fs.run(experiment, data=data, model=module) for data in forms]
    assert len({safetensors.torch.save(history.params) for history in histories}) == 1
    assert histories[0].final_accuracy > 0.8
    assert torch.equal(module[0].weight, start)  # where training starts, and it was not moved
    assert set(histories[0].params) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_a_model_that_does_not_fit_the_data_is_said_before_anything_is_written(tmp_path):
    for problem, arguments in {
        "clients_per_round": {"spec": spec(training={"clients_per_round": 11})},
        r"is not an engine; did you mean 'local'\? Use one of: local, ray, nvflare": {
            "spec": spec(),
            "engine": "locl",
        },
        "at most 1437": {"spec": spec(partition={"clients": 2000})},
    }.items():
        with pytest.raises(SpecError, match=problem):
            fs.run(**arguments, out=tmp_path / "run")
    with pytest.raises(DataError):
        fs.run(spec(), data=(np.zeros((3, 2)), np.zeros(2), np.zeros((3, 2)), np.zeros(3)), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_is_never_written_over(tmp_path):
    fs.run(spec(), out=tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(SpecError, match=r"already contains a run. Give another folder, or resume the run"):
        fs.run(spec(), out=tmp_path / "run")
    with pytest.raises(
        SpecError, match=r"seed = 1: the run in this folder has 0\. Use the run's value, or use another folder than"
    ):
        fs.run(spec(seed=1), out=tmp_path / "run", resume=True)
    with pytest.raises(SpecError, match=r"resume: requires the folder of a run\. Set 'out' to this folder\."):
        fs.run(spec(), resume=True)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(SpecError, match="the folder cannot be created: "):
            fs.run(spec(), out=out)


@pytest.mark.slow
def test_the_number_of_threads_is_put_back():
    seen = []
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        fs.run(spec(), callbacks=[lambda _: seen.append(torch.get_num_threads())])
        assert seen == [1, 1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedrs", "rebafl"])
def test_the_default_dtype_has_no_effect_and_is_put_back(method):
    run = spec(method=method, training={"rounds": 1, "local_steps": 2})
    expected = fs.run(run).params
    torch.set_default_dtype(torch.float64)
    try:
        found = fs.run(run).params
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert {name: tensor.dtype for name, tensor in found.items()} == dict.fromkeys(expected, torch.float32)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_the_global_generators_are_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    np.random.seed(3)  # noqa: NPY002
    array = np.random.rand(2)  # noqa: NPY002
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    fs.run(spec(method="fedstas", training={"rounds": 1}))
    assert torch.equal(torch.rand(2), expected)
    assert (np.random.rand(2) == array).all()  # noqa: NPY002


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "batch_norm"), [("fedavg", "average"), ("fedavg", "local"), ("stratify", "average")]
)
def test_a_model_with_batchnorm_trains(tmp_path, method, batch_norm):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 10))
    experiment = spec(method=method, training={"rounds": 2, "batch_norm": batch_norm, "batch_size": 64, "lr": 0.3})
    history = fs.run(experiment, model=module, out=tmp_path / "run")
    assert history.params["2.num_batches_tracked"].dtype == torch.int64
    assert history.final_accuracy > 0.3
    assert all(torch.isfinite(w).all() for w in history.params.values())


@pytest.mark.long
@pytest.mark.slow
def test_two_processes_never_write_into_one_folder(tmp_path):
    """A run that is still going is neither begun nor resumed a second time, and what it writes is its own."""
    table = spec(training={"rounds": 2})
    seen = []

    def meanwhile(record):
        code = (
            "import sys, fedstrata as fs, fedstrata.base.errors\n"
            "for resume in (False, True):\n"
            "    try: fs.run(sys.argv[1], out=sys.argv[2], resume=resume)\n"
            "    except fedstrata.base.errors.SpecError as error: print(error)"
        )
        arguments = [str(tmp_path / "run" / "spec.toml"), str(tmp_path / "run")]
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        seen.extend(done.stdout.splitlines())

    history = fs.run(table, out=tmp_path / "run", callbacks=[lambda record: record["round"] == 1 and meanwhile(record)])
    assert ["another process is using this folder" in text for text in seen] == [True] * 2
    assert [record["round"] for record in fs.History.load(tmp_path / "run")] == [1, 2]
    assert fs.run(table, out=tmp_path / "run", resume=True).final_accuracy == history.final_accuracy


@pytest.mark.slow
def test_a_spec_says_the_same_however_it_is_written(tmp_path):
    """A version with a new setting still resumes older runs, and a comment does no harm."""
    fs.run(spec(training={"rounds": 2}), out=tmp_path)
    text = (tmp_path / "spec.toml").read_text()
    short = "\n".join(line for line in text.splitlines() if not line.startswith(("per_class", "weight_diversity")))
    (tmp_path / "spec.toml").write_text("# my own\n" + short.replace("rounds = 2", "rounds = 3"))
    resumed = fs.run(tmp_path / "spec.toml", out=tmp_path, resume=True)
    assert len(resumed) == 3
    with pytest.raises(SpecError, match=r"training\.lr = 0\.07: the run in this folder has 0\.1"):
        fs.run(spec(training={"rounds": 3, "lr": 0.07}), out=tmp_path, resume=True)


@pytest.mark.slow
def test_a_run_that_goes_on_has_no_result_yet(tmp_path):
    """Whoever looks for the model or the summary must not take those of the rounds before for the end."""
    fs.run(spec(training={"rounds": 2}), out=tmp_path)
    text = (tmp_path / "spec.toml").read_text()
    (tmp_path / "spec.toml").write_text(text.replace("rounds = 2", "rounds = 4"))

    def breaks_off(record):
        assert not (tmp_path / "model.safetensors").exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fs.run(tmp_path / "spec.toml", out=tmp_path, resume=True, callbacks=[breaks_off])
    assert not (tmp_path / "summary.json").exists()
    assert len(fs.run(tmp_path / "spec.toml", out=tmp_path, resume=True)) == 4


@pytest.mark.slow
def test_records_that_end_before_their_checkpoint_are_damaged(tmp_path):
    table = spec(training={"rounds": 2}, evaluation={"checkpoint_every": 1})
    fs.run(table, out=tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text(lines[0])
    with pytest.raises(DataError, match="ends before round 2, but a checkpoint"):
        fs.run(table, out=tmp_path, resume=True)
    assert (tmp_path / "model.safetensors").exists()
