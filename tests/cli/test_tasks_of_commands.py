"""The commands that take a spec or a run, on a regression from a CSV file."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from fedstrata.base.outer import installed
from fedstrata.cli import main

SPEC = """
task = { name = "regression", bins = 4 }
partition = "natural"
model = { name = "tabular", hidden = [4] }
training = { rounds = 2, lr = 0.05, local_epochs = 10, batch_size = 8 }

[data]
name = "stays.csv"
schema = { label = "days", client = "hospital", test = 0.25 }
"""


@pytest.fixture
def spec() -> str:
    generator = np.random.default_rng(0)
    with Path("stays.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["age", "score", "ward", "days", "hospital"])
        for row in range(80):
            age, score = round(generator.normal(60, 15), 1), round(generator.normal(), 3)
            days = round(age / 10 + 2 * score + generator.normal(), 2)
            writer.writerow([age, score, "abc"[row % 3], days, f"h{row % 4}"])
    Path("stays.toml").write_text(SPEC)
    return "stays.toml"


@pytest.mark.slow
def test_a_run_is_reported_and_predicts_numbers(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", spec, "--out", "run", "--quiet"]) == 0
    assert "rmse" in capsys.readouterr().out
    assert main(["report", "run"]) == 0
    assert "rmse" in Path("run/report.html").read_text()
    capsys.readouterr()
    assert main(["predict", "run", "stays.csv", "--keep", "hospital"]) == 0
    header, *rows = csv.reader(capsys.readouterr().out.splitlines())
    assert header == ["hospital", "predicted"]
    predicted = [float(row[1]) for row in rows]
    with Path("stays.csv").open() as file:
        days = [float(row["days"]) for row in csv.DictReader(file)]
    assert np.corrcoef(predicted, days)[0, 1] > 0.8
    assert main(["predict", "run", "stays.csv", "--keep", "hospital", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told[0] == {"hospital": "h0", "predicted": predicted[0]}


@pytest.mark.long
def test_methods_are_compared(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    compared = ["compare", spec, "--methods", "fedavg,stratify", "--out", "both", "--jobs", "1", "--quiet", "--json"]
    assert main(compared) == 0
    assert [row["label"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["fedavg", "stratify"]
    assert "final rmse" in Path("both/report.html").read_text()
    assert main(["table", "both"]) == 0
    assert "rmse" in capsys.readouterr().out


@pytest.mark.slow
def test_a_sweep_chooses_by_the_error(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--set", "evaluation.validation=0.2", "--set", "training.lr=0.0001,0.05", "--jobs", "1"]
    assert main(["sweep", spec, *given, "--out", "swept", "--quiet", "--json"]) == 0
    assert "0.05" in json.dumps(json.loads(capsys.readouterr().out)["best"])


@pytest.mark.skipif("sites" not in installed(), reason="the package for real sites was left out")
def test_what_is_asked(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["asks", spec]) == 0
    assert "sums of the model's losses and errors" in capsys.readouterr().out


@pytest.mark.slow
def test_how_samples_are_divided(spec: str) -> None:
    assert main(["partition", spec]) == 0
    assert Path("partition.png").is_file()


def test_settings_of_tasks_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "task.bins"]) == 0
    assert "--set task=regression" in capsys.readouterr().out
    assert main(["settings", "task", "segmentation"]) == 0
    assert "ignore" in capsys.readouterr().out


@pytest.mark.slow
def test_a_task_of_the_users_own_runs_and_is_imported_only_when_it_is_trusted(
    spec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", "task", "stays_task.py"]) == 0
    assert len(Path("stays_task.py").read_text().splitlines()) < 30
    table = 'task = { name = "stays_task:Quantile", level = 0.9 }'
    Path(spec).write_text(SPEC.replace('task = { name = "regression", bins = 4 }', table))
    longer = ["--set", "training.rounds=30", "--set", "training.local_epochs=4"]
    assert main(["run", spec, *longer, "--out", "run", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["predict", "run", "stays.csv"]) == 2
    refused = "fedstrata: error: name = 'stays_task:Quantile': names Python code, which this command does not import"
    assert capsys.readouterr().err.startswith(refused)
    assert main(["predict", "run", "stays.csv", "--trust"]) == 0
    predicted = np.array(capsys.readouterr().out.split()[1:], dtype=float)
    with Path("stays.csv").open() as file:
        days = np.array([float(row["days"]) for row in csv.DictReader(file)])
    assert 0.8 < (days < predicted).mean() < 1
