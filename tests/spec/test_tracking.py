"""What trackers are told, read back by their own readers: of a run, of one that was killed, and of several at once."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from lazy import Lazy

import fedstrata as fs
from fedstrata.base.errors import ExtraMissingError, SpecError
from fedstrata.evaluation.history import numbers
from fedstrata.experiments.compare import compare
from fedstrata.runs.identity import identity_of
from fedstrata.spec.experiment import variants

mlflow = Lazy("mlflow")
event_accumulator = Lazy("tensorboard.backend.event_processing.event_accumulator")
plugin_data_pb2 = Lazy("tensorboard.plugins.hparams.plugin_data_pb2")

# MLflow's own, of its own store.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow"),
]


@pytest.fixture(scope="module", autouse=True)
def _needed() -> None:
    """Import TensorBoard when the first test of this file runs, because the import takes a second."""
    pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


TABLE = {
    "seed": 3,
    "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 6},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"rounds": 7, "local_epochs": 1, "clients_per_round": 2, "lr": 0.3},
    "evaluation": {"checkpoint_every": 3, "validation": 0.1, "every": 2},
}


def spec(**more: object) -> fs.Experiment:
    return fs.Experiment.from_table({**TABLE, **more})


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows, by tag."""
    found = event_accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def expected(history: fs.History) -> dict[str, list[tuple[int, float]]]:
    """What it should show: single precision is what it keeps."""
    columns: dict[str, list[tuple[int, float]]] = {}
    for record in history:
        for name, value in numbers(record).items():
            columns.setdefault(name.replace(".", "/"), []).append((record["round"], pytest.approx(value, rel=1e-6)))
    return columns


def metrics(client: Any, run: str) -> dict[str, list[tuple[int, float]]]:
    names = client.get_run(run).data.metrics
    return {name: [(m.step, m.value) for m in client.get_metric_history(run, name)] for name in names}


def dotted(history: fs.History) -> dict[str, list[tuple[int, float]]]:
    return {name: list(zip(*map(list, history.column(name)), strict=True)) for name in history.columns}


def runs_of(client: Any, experiment: str = "fedstrata"):
    return client.search_runs([client.get_experiment_by_name(experiment).experiment_id])


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> str:
    """A local store of MLflow's, made once: that takes a second."""
    pytest.importorskip("mlflow")
    place = tmp_path_factory.mktemp("mlflow")
    uri = f"sqlite:///{place / 'mlflow.db'}"
    client = mlflow.MlflowClient(uri)
    for name in ("fedstrata", "killed", "failed", "several", "spec"):
        client.create_experiment(name, artifact_location=str(place / name))
    return uri


class Killed(BaseException):
    """As if the process had been."""


class KilledAfter(fs.Callback):
    """Ends the run as a kill would: nobody closes anything."""

    round: int

    def on_round(self, simulation, record):
        if record["round"] == self.round:
            raise Killed


@pytest.fixture
def unclosed(monkeypatch):
    """Nothing is closed at the end, as after a kill."""
    patch = pytest.MonkeyPatch()
    patch.setattr("fedstrata.runs.simulation._close", lambda *_: None)
    yield patch
    patch.undo()


def test_tensorboard_shows_every_number_of_every_round(tmp_path):
    history = fs.run(spec(), out=tmp_path / "run", callbacks=[fs.TensorBoard(dir=tmp_path / "tb")])
    (place,) = (tmp_path / "tb").iterdir()
    assert place.name.startswith("fedavg-digits-seed-3-")
    assert scalars(place) == expected(history)
    assert [step for step, _ in scalars(place)["validation/accuracy"]] == [2, 4, 6, 7]
    found = event_accumulator.EventAccumulator(str(place))
    found.Reload()
    (text,) = found.Tensors("spec/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert tomllib.loads(shown.removeprefix("```toml\n").removesuffix("```")) == spec().to_spec()
    started = plugin_data_pb2.HParamsPluginData.FromString(
        found.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    )
    told = started.session_start_info.hparams
    assert told["training.lr"].string_value == "0.3"
    assert told["partition.name"].string_value == "dirichlet"
    assert not [key for key in told if key.startswith("tracking")]


def test_tensorboard_of_a_run_that_was_killed_has_no_round_twice(tmp_path, unclosed):
    tracked = spec(tracking={"tensorboard": True})
    with pytest.raises(Killed):
        fs.run(tracked, out=tmp_path / "run", callbacks=[KilledAfter(round=5)])
    unclosed.undo()
    before = scalars(tmp_path / "run" / "tensorboard")
    assert [step for step, _ in before["samples"]] == [1, 2, 3, 4, 5]
    history = fs.run(tracked, out=tmp_path / "run", resume=True)
    assert scalars(tmp_path / "run" / "tensorboard") == expected(history)
    again = event_accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    again.Reload()
    assert len(again.Tensors("spec/text_summary")) == 1


def test_one_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path, unclosed):
    tracked = spec(tracking={"tensorboard": {"dir": str(tmp_path / "tb")}})
    with pytest.raises(Killed):
        fs.run(tracked, out=tmp_path / "run", callbacks=[KilledAfter(round=2)])
    unclosed.undo()
    history = fs.run(tracked, out=tmp_path / "run", resume=True)
    (place,) = (tmp_path / "tb").iterdir()
    assert scalars(place) == expected(history)


def test_tensorboard_needs_a_place():
    with pytest.raises(
        SpecError, match=r"tracking\.tensorboard\.dir: is required, because this run does not have a run folder"
    ):
        fs.run(spec(tracking={"tensorboard": True}))


@pytest.mark.long
def test_mlflow_has_metrics_settings_tags_and_files(tmp_path, store):
    history = fs.run(spec(), out=tmp_path / "run", callbacks=[fs.MLflow(uri=store, tags={"why": "a test"})])
    client = mlflow.MlflowClient(store)
    (run,) = runs_of(client)
    assert metrics(client, run.info.run_id) == dotted(history)
    assert run.info.status == "FINISHED"
    assert run.info.run_name.startswith("fedavg-digits-seed-3-")
    assert run.data.params["training.lr"] == "0.3"
    assert run.data.params["model.hidden"] == "[8]"
    tags = {key: run.data.tags[key] for key in ("method", "data", "seed", "why", "fedstrata.folder")}
    assert tags == {
        "method": "fedavg", "data": "digits", "seed": "3", "why": "a test", "fedstrata.folder": str(tmp_path / "run"),
    }  # fmt: skip
    files = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert files >= {"spec.toml", "metrics.jsonl", "summary.json", "model.safetensors", "model.json", "run.json"}
    kept = Path(client.download_artifacts(run.info.run_id, "model.safetensors", str(tmp_path)))
    assert kept.read_bytes() == (tmp_path / "run" / "model.safetensors").read_bytes()


@pytest.mark.long
def test_a_run_that_was_killed_goes_on_in_the_same_run_of_mlflow(tmp_path, store, unclosed):
    tracked = spec(tracking={"mlflow": {"uri": store, "experiment": "killed", "artifacts": False}})
    with pytest.raises(Killed):
        fs.run(tracked, out=tmp_path / "run", callbacks=[KilledAfter(round=5)])
    client = mlflow.MlflowClient(store)
    (run,) = runs_of(client, "killed")
    assert run.info.status == "RUNNING"
    assert len(metrics(client, run.info.run_id)["samples"]) == 5
    unclosed.undo()
    longer = spec(
        training={**TABLE["training"], "rounds": 8},
        tracking={"mlflow": {"uri": store, "experiment": "killed", "artifacts": False}},
    )
    history = fs.run(longer, out=tmp_path / "run", resume=True)
    (again,) = runs_of(client, "killed")
    assert (again.info.run_id, again.info.status) == (run.info.run_id, "FINISHED")
    found = metrics(client, run.info.run_id)
    times = found.pop("seconds"), dotted(history).pop("seconds")
    assert [step for step, _ in times[0]] == [step for step, _ in times[1]]  # the clock went differently
    assert found == {name: pairs for name, pairs in dotted(history).items() if name != "seconds"}
    assert client.list_artifacts(run.info.run_id) == []


@pytest.mark.long
def test_mlflow_is_told_how_a_run_broke_off(tmp_path, store):
    with pytest.raises(ZeroDivisionError):
        fs.run(
            spec(callbacks=["watching:Clumsy"]),
            out=tmp_path / "run",
            callbacks=[fs.MLflow(uri=store, experiment="failed")],
        )
    client = mlflow.MlflowClient(store)
    assert [run.info.status for run in runs_of(client, "failed")] == ["FAILED"]
    with pytest.raises(KeyboardInterrupt):
        fs.run(spec(), callbacks=[fs.MLflow(uri=store, experiment="failed"), interrupt])
    assert sorted(run.info.status for run in runs_of(client, "failed")) == ["FAILED", "KILLED"]


def interrupt(record):
    raise KeyboardInterrupt


@pytest.mark.long
def test_several_at_once_make_a_store_of_their_own(tmp_path, monkeypatch):
    """Two processes begin with neither a store nor an experiment."""
    pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'new.db'}"
    table = {**TABLE, "tracking": {"mlflow": {"uri": uri, "experiment": "several", "artifacts": False}}}
    monkeypatch.setattr("fedstrata.reporting.html.write_comparison", lambda out: None)
    monkeypatch.chdir(tmp_path)
    found = compare(variants(table, ["fedavg", "scaffold"]), out=tmp_path / "out", jobs=2)
    client = mlflow.MlflowClient(uri)
    shown = {run.data.tags["method"]: run.data.metrics["accuracy"] for run in runs_of(client, "several")}
    assert shown == {label: runs[0].final_accuracy for label, runs in found.items()}


@pytest.mark.long
def test_a_run_is_the_same_to_the_byte_with_and_without(tmp_path, store):
    fs.run(spec(), out=tmp_path / "plain")
    tracked = spec(tracking={"tensorboard": True, "mlflow": {"uri": store}})
    fs.run(tracked, out=tmp_path / "tracked")
    for path in (tmp_path / "plain").rglob("*"):
        other = tmp_path / "tracked" / path.relative_to(tmp_path / "plain")
        if path.name in ("spec.toml", "metrics.jsonl", "summary.json") or path.suffix == ".png" or path.is_dir():
            continue  # which have the clock, or say where the run was shown
        if path.parent.name != "checkpoint" and path.parent.parent.name != "checkpoint":
            assert path.read_bytes() == other.read_bytes(), path
    prepared = fs.prepare(tracked)
    assert prepared.identity == fs.prepare(spec()).identity
    assert "tracking" not in json.dumps(identity_of(tracked, prepared.data, prepared.config.model, prepared.assignment))
    checkpoints = [sorted(p.name for p in (tmp_path / run / "checkpoint").rglob("*")) for run in ("plain", "tracked")]
    assert checkpoints[0] == checkpoints[1]
    # It may be shown elsewhere, or nowhere, from any round on.
    fs.run(spec(training={**TABLE["training"], "rounds": 8}), out=tmp_path / "tracked", resume=True)
    assert "tracking" not in (tmp_path / "tracked" / "spec.toml").read_text()


def test_a_spec_says_it_and_reads_it_back(tmp_path):
    both = spec(tracking={"tensorboard": True, "mlflow": {"experiment": "mine", "tags": {"a": "b"}}})
    assert [type(each) for each in both.tracking.callbacks] == [fs.TensorBoard, fs.MLflow]
    assert fs.Experiment.from_table(tomllib.loads(both.to_toml())) == both
    none = spec(tracking={"tensorboard": False})
    assert none.tracking.callbacks == []
    assert none.to_spec() == spec().to_spec()


@pytest.mark.parametrize(
    ("tracking", "message"),
    [
        ({"tensorbord": True}, "tracking.tensorbord = True: is not a known key; did you mean 'tensorboard'"),
        ({"tensorboard": {"folder": "x"}}, "tracking.tensorboard.folder = 'x': is not a known key. Use one of: dir"),
        ({"mlflow": 3}, "tracking.mlflow = 3: must be true, false or a table of settings"),
        ({"mlflow": {"tags": {"a": 1}}}, r"tracking.mlflow.*tags.a.* = 1"),
    ],
)
def test_what_a_spec_cannot_say(tracking, message):
    with pytest.raises(SpecError, match=message):
        spec(tracking=tracking)


def test_without_the_extra_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for tracking in ("tensorboard", "mlflow"):
        with pytest.raises(ExtraMissingError, match=r"pip install 'fedstrata\[tracking\]'"):
            fs.run(spec(tracking={tracking: True}), out=tmp_path / "run")
        with pytest.raises(ExtraMissingError):
            compare({"a": spec(tracking={tracking: True})}, out=tmp_path / "out", jobs=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("hook", ["add_scalar", "close"])
def test_a_tracker_that_fails_costs_a_run_nothing(tmp_path, monkeypatch, hook):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"torch.utils.tensorboard.SummaryWriter.{hook}", full)
    with pytest.warns(
        UserWarning, match=r"TensorBoard failed, and the run continues without it: OSError: .*No space"
    ) as told:
        history = fs.run(spec(), callbacks=[fs.TensorBoard(dir=tmp_path)])
    assert len([each for each in told if "the run continues without it" in str(each.message)]) == 1
    assert len(history) == 7


def test_a_run_that_goes_on_with_more_rounds_is_shown_in_the_same_place(tmp_path):
    shown = fs.TensorBoard(dir=tmp_path / "shown")
    fs.run(spec(), out=tmp_path / "run", callbacks=[shown])
    more = spec(training={**TABLE["training"], "rounds": 9, "workers": 1})
    history = fs.run(more, out=tmp_path / "run", callbacks=[shown], resume=True)
    (folder,) = (tmp_path / "shown").iterdir()
    assert scalars(folder) == expected(history)
