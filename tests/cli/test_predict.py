from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

import fedstrata as fs
from fedstrata.cli import main
from fedstrata.data.tables import read_csv

ROWS = "age;kind;ill\n20;x;=no\n;y;yes\n60;y;yes\n\n70;x;=no\n" + "30;x;=no\n65;y;yes\n" * 4
SPEC = """
partition = { name = "iid", clients = 2, min_size = 1 }
model = { name = "tabular", hidden = [4] }
training = { rounds = 1 }

[data]
name = "rows.csv"
[data.schema]
label = "ill"
delimiter = ";"
columns = { age = { impute = "median" }, kind = "category" }
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> fs.Predictor:
    """A run in ``run``, and two new rows in ``new.csv``, between them an empty line, without a label."""
    Path("rows.csv").write_text(ROWS)
    Path("spec.toml").write_text(SPEC)
    assert main(["run", "spec.toml", "--quiet", "--out", "run"]) == 0
    Path("new.csv").write_text("note;kind;age\nfirst;y;64\n\nsecond;x;\n")
    capsys.readouterr()
    return fs.load("run")


@pytest.mark.slow
def test_predictions_of_a_file(run: fs.Predictor, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.schema is not None
    new = read_csv(Path("new.csv"), ";")
    labels, likely = run.predict(new).tolist(), run.predict_proba(new)
    assert main(["predict", "run", "new.csv"]) == 0
    text = capsys.readouterr().out
    header, *rows = csv.reader(text.splitlines())
    assert header == ["predicted", "p_=no", "p_yes"]
    assert [row[0] for row in rows] == labels
    assert [[float(cell) for cell in row[1:]] for row in rows] == [pytest.approx(of_row) for of_row in likely.tolist()]
    assert main(["predict", "run", "new.csv", "--out", "there/predictions.csv"]) == 0
    assert capsys.readouterr().out == "2 predictions: there/predictions.csv\n"
    assert Path("there/predictions.csv").read_text() == text
    assert main(["predict", "run", "new.csv", "--json", "--out", "again.csv"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"predicted": label, "probabilities": dict(zip(("=no", "yes"), of_row, strict=True))}
        for label, of_row in zip(labels, likely.tolist(), strict=True)
    ]
    assert Path("again.csv").read_text() == text


@pytest.mark.slow
def test_columns_are_kept_beside_the_predictions(run: fs.Predictor, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "run", "new.csv", "--keep", "note,age"]) == 0
    header, *rows = csv.reader(capsys.readouterr().out.splitlines())
    assert header == ["note", "age", "predicted", "p_=no", "p_yes"]
    assert [row[:2] for row in rows] == [["first", "64"], ["second", ""]]
    assert main(["predict", "run", "new.csv", "--keep", "note", "--json"]) == 0
    assert [row["note"] for row in json.loads(capsys.readouterr().out)] == ["first", "second"]
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(
        pytest.importorskip("pyarrow").table({"id": [0, 1], "kind": ["x", "y"], "age": [3, 4]}), "new.parquet"
    )
    assert main(["predict", "run", "new.parquet", "--keep", "id"]) == 0
    assert [row.partition(",")[0] for row in capsys.readouterr().out.splitlines()] == ["id", "0", "1"]
    assert main(["predict", "run", "new.parquet", "--keep", "id", "--json"]) == 0
    assert [row["id"] for row in json.loads(capsys.readouterr().out)] == [0, 1]
    assert main(["predict", "run", "new.csv", "--keep", "nota"]) == 2
    assert "--keep = 'nota': new.csv has no such column" in capsys.readouterr().err


@pytest.mark.slow
def test_the_path_of_a_file_is_read_in_python_too(run: fs.Predictor) -> None:
    expected = run.predict_proba(read_csv(Path("new.csv"), ";"))
    assert (run.predict_proba("new.csv") == expected).all()
    assert (run.predict_proba(Path("new.csv")) == expected).all()


@pytest.mark.slow
def test_a_folder_of_several_runs_names_them(run: fs.Predictor, capsys: pytest.CaptureFixture[str]) -> None:
    Path("all/fedavg").mkdir(parents=True)
    Path("run").rename("all/fedavg/seed-0")
    assert main(["predict", "all", "new.csv"]) == 2
    assert "Use one of its runs: fedavg/seed-0" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("kind;age\ny;old\n", "bad.csv, line 2, column 'age' = 'old': is not a finite number. Use numbers"),
        ("kind;age\nx;3\n\nw;4\n", "bad.csv, line 4, column 'kind' = 'w': is not a category. Use one of 'x', 'y'"),
        ("kind;age\n;4\n", "bad.csv, line 2, column 'kind' = '': is missing. Add a value, or a rule"),
        ("kind,age\nx,4\n", "data.schema.columns.age = 'age': bad.csv has no such column. Use one of: kind,age"),
        ("kind;age\n", "bad.csv has no rows below the line with the names"),
    ],
)
def test_rows_that_do_not_fit(run: fs.Predictor, capsys: pytest.CaptureFixture[str], rows: str, message: str) -> None:
    Path("bad.csv").write_text(rows)
    assert main(["predict", "run", "bad.csv", "--out", "predictions.csv"]) == 2
    assert f"fedstrata: error: {message}" in capsys.readouterr().err
    assert not Path("predictions.csv").exists()


@pytest.mark.slow
def test_a_model_of_the_users_own_is_imported_only_when_it_is_trusted(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.csv").write_text(ROWS)
    Path("spec.toml").write_text(SPEC.replace('{ name = "tabular", hidden = [4] }', '{ name = "net_of_rows:net" }'))
    Path("net_of_rows.py").write_text(
        "from torch import nn\n\ndef net(shape, classes):\n    return nn.Linear(*shape, classes)\n"
    )
    assert main(["run", "spec.toml", "--quiet", "--out", "run"]) == 0
    assert main(["predict", "run", "rows.csv"]) == 2
    assert "names Python code, which this command does not import" in capsys.readouterr().err
    assert main(["predict", "run", "rows.csv", "--trust"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 13


@pytest.mark.slow
def test_a_model_of_arrays(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.csv").write_text(ROWS)
    fs.run(fs.Experiment(training={"rounds": 1}), out="digits")
    assert main(["predict", "digits", "rows.csv"]) == 2
    assert "RUN = 'digits': this run's model needs arrays of shape (1, 8, 8), not rows of a" in capsys.readouterr().err
    assert main(["predict", "nowhere", "rows.csv"]) == 2
    assert "run_dir = 'nowhere': is not a run folder" in capsys.readouterr().err
