"""What MLflow is told, with a client in memory in place of MLflow, whose import takes seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.evaluation.history import numbers
from fedstrata.spec.tracking import stored_name


class RefusedError(Exception):
    """An error of the client, such as for an experiment that exists already."""


class Server:
    """A server in memory, which is at once MLflow's client.

    Attributes:
        experiments: A mapping from names to ids.
        runs: A mapping from ids to runs.
        refuses: Whether the server refuses to create an experiment.
        others: Whether another process creates the experiment just before this one does.
    """

    def __init__(self) -> None:
        self.experiments: dict[str, int] = {}
        self.runs: dict[str, Any] = {}
        self.refuses = self.others = False

    def __call__(self, tracking_uri: str | None) -> Server:
        self.uri = tracking_uri
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str) -> int:
        if self.others:
            self.experiments[name] = 7
        if self.refuses or self.others:
            raise RefusedError
        return self.experiments.setdefault(name, len(self.experiments))

    def search_runs(self, experiments: list[str], words: str, max_results: int) -> list[Any]:
        return [run for run in self.runs.values() if words == f"tags.`fedstrata.run` = '{run.tags['fedstrata.run']}'"]

    def create_run(self, experiment: str, tags: dict[str, str], run_name: str) -> Any:
        run = f"run-{len(self.runs)}"
        self.runs[run] = SimpleNamespace(
            info=SimpleNamespace(run_id=run), experiment=experiment, tags=dict(tags), name=run_name, status="RUNNING",
            params={}, metrics={}, artifacts=[],
        )  # fmt: skip
        return self.runs[run]

    def update_run(self, run: str, status: str) -> None:
        self.runs[run].status = status

    def get_run(self, run: str) -> Any:
        return SimpleNamespace(data=self.runs[run])

    def get_metric_history(self, run: str, name: str) -> list[Any]:
        return [SimpleNamespace(step=step, value=value) for step, value in self.runs[run].metrics[name]]

    def log_batch(self, run: str, params: Any = (), metrics: Any = ()) -> None:
        for name, value in params:
            assert name not in self.runs[run].params, "MLflow does not allow changes of parameters"
            self.runs[run].params[name] = value
        for name, value, _, step in metrics:
            self.runs[run].metrics.setdefault(name, []).append((step, value))

    def set_tag(self, run: str, key: str, text: str) -> None:
        self.runs[run].tags[key] = text

    def log_artifact(self, run: str, path: str) -> None:
        self.runs[run].artifacts.append(Path(path).name)

    def set_terminated(self, run: str, status: str) -> None:
        self.runs[run].status = status


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server whose client stands in for the library MLflow."""
    made = Server()
    contents: dict[str, dict[str, Any]] = {
        "mlflow": {"MlflowClient": made, "get_tracking_uri": lambda: "http://there"},
        "mlflow.entities": {"Param": lambda *values: values, "Metric": lambda *values: values},
        "mlflow.exceptions": {"MlflowException": RefusedError},
    }
    for name, members in contents.items():
        module = ModuleType(name)
        vars(module).update(members, __spec__=ModuleSpec(name, None))
        monkeypatch.setitem(sys.modules, name, module)
    return made


def spec(rounds: int = 4, **more: object) -> fs.Experiment:
    return fs.Experiment.from_table(
        {
            "seed": 3,
            "data": {"name": "digits", "limit": 60},
            "partition": {"name": "iid", "clients": 2},
            "model": {"name": "mlp", "hidden": []},
            "training": {"rounds": rounds, "local_steps": 1},
            "evaluation": {"every": 2, "checkpoint_every": 1},
            **more,
        }
    )


def logged(history: fs.History) -> dict[str, list[tuple[int, float]]]:
    """Return the metrics that MLflow must have after a run."""
    found: dict[str, list[tuple[int, float]]] = {}
    for record in history:
        for name, value in numbers(record).items():
            found.setdefault(name, []).append((record["round"], value))
    return found


def test_a_run_has_metrics_settings_tags_and_files(server: Server, tmp_path: Path) -> None:
    history = fs.run(spec(), out=tmp_path / "run", callbacks=[fs.MLflow(uri="http://here", tags={"why": "a test"})])
    (run,) = server.runs.values()
    assert server.uri == "http://here"
    assert (run.status, run.experiment) == ("FINISHED", str(server.experiments["fedstrata"]))
    assert run.name.startswith("fedavg-digits-seed-3-")
    assert run.metrics == logged(history)
    assert (run.params["training.rounds"], run.params["model.hidden"]) == ("4", "[]")
    del run.tags["fedstrata.run"]
    about = {"method": "fedavg", "data": "digits", "seed": "3", "why": "a test"}
    assert run.tags == about | {"fedstrata.folder": str(tmp_path / "run")}
    assert {"spec.toml", "metrics.jsonl", "summary.json", "model.safetensors"} <= set(run.artifacts)
    assert {"tracking.json", "checkpoint"}.isdisjoint(run.artifacts)


def test_a_run_that_was_interrupted_goes_on_in_the_same_run(server: Server, tmp_path: Path) -> None:
    def interrupt(record: dict[str, Any]) -> None:
        if record["round"] == 3:
            raise KeyboardInterrupt

    how = {"out": tmp_path / "run"}
    shown = fs.MLflow(uri=f"sqlite:///{tmp_path / 'mlflow.db'}", artifacts=False)
    with pytest.raises(KeyboardInterrupt):
        fs.run(spec(), callbacks=[shown, interrupt], **how)
    (run,) = server.runs.values()
    assert run.status == "KILLED"
    history = fs.run(spec(5), callbacks=[shown], resume=True, **how)
    assert list(server.runs.values()) == [run]
    assert run.status == "FINISHED"
    steps = {name: [step for step, _ in pairs] for name, pairs in logged(history).items()}
    assert {name: [step for step, _ in pairs] for name, pairs in run.metrics.items()} == steps, (
        "no round is there twice"
    )
    assert run.params["training.rounds"] == "4", "a parameter keeps its first value"
    assert run.artifacts == []


def test_a_run_that_fails_or_stops_says_so(server: Server) -> None:
    def fail(record: dict[str, Any]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fs.run(spec(), callbacks=[fs.MLflow(run="first"), fail])
    stops = spec(evaluation={"validation": 0.2})
    history = fs.run(stops, callbacks=[fs.MLflow(run="second"), fs.EarlyStopping(patience=1, min_delta=100.0)])
    first, second = server.runs.values()
    assert [(run.name, run.status) for run in (first, second)] == [("first", "FAILED"), ("second", "FINISHED")]
    assert "fedstrata.stopped" not in first.tags
    assert second.tags["fedstrata.stopped"] == history.stopped
    assert second.artifacts == [], "this run has no folder"


def test_an_experiment_that_another_process_creates_is_used(server: Server) -> None:
    server.others = True
    fs.run(spec(1), callbacks=[fs.MLflow()])
    (run,) = server.runs.values()
    assert run.experiment == "7"


def test_an_experiment_that_cannot_be_created_is_an_error(server: Server) -> None:
    server.refuses = True
    message = r"tracking\.mlflow\.experiment = 'mine': MLflow does not have this experiment, and cannot create it"
    with pytest.raises(SpecError, match=message):
        fs.run(spec(1, tracking={"mlflow": {"experiment": "mine"}}))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"mlflow": 3}', '{"tensorboard": "b"}'])
def test_a_name_is_made_again_if_the_file_does_not_have_it(text: str, tmp_path: Path) -> None:
    made: Callable[[], str] = iter("ab").__next__
    (tmp_path / "tracking.json").write_text(text)
    assert [stored_name(tmp_path, "mlflow", made) for _ in range(2)] == ["a", "a"]
    assert stored_name(None, "mlflow", made) == "b"
