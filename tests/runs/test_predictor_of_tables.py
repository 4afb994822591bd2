"""The model of a table takes new rows as they are in a file or data frame, and refuses what the run would refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lazy import Lazy
from sklearn.datasets import load_wine

import fedstrata as fs
from fedstrata.base.errors import DataError, FedstrataError, SpecError
from fedstrata.base.jsonl import write_json
from fedstrata.data.tables import read_csv, table_of
from fedstrata.runs.predictor import describe_model

pandas = Lazy("pandas")
polars = Lazy("polars")

COLUMNS: dict[str, Any] = {
    "dose": {"unit": "mg", "range": [0, 900], "missing": ["0"], "impute": "median", "step": 5, "indicator": True},
    "kind": {"type": "category", "impute": "most-frequent"},
    "age": {"range": [18, 100], "unit": "years"},
    "smoker": {"type": "boolean", "impute": "constant", "value": False},
}
ROWS: dict[str, list[Any]] = {
    "age": [20, 40, 60, 80, 30, 50],
    "kind": ["x", "y", "y", "?", "z", "x"],
    "dose": [100, 0, 300, 303.5, None, 200],
    "smoker": ["yes", "no", None, "no", "yes", "no"],
    "ill": ["no", "yes", "yes", "no", "yes", "no"],
    "part": ["train", "train", "train", "train", "test", "test"],
}
SCHEMA: dict[str, Any] = {"label": "ill", "test": "part", "missing": ["?"], "columns": COLUMNS}


def spec(**change: Any) -> fs.Experiment:
    return fs.Experiment.from_table(
        {
            "partition": {"name": "iid", "clients": 2, "min_size": 1},
            "model": {"name": "tabular", "hidden": [8]},
            "training": {"rounds": 2, "local_epochs": 1, "lr": 0.05},
            **change,
        }
    )


def write(path: Path, columns: dict[str, list[Any]]) -> Path:
    lines = [columns.keys(), *zip(*columns.values(), strict=True)]
    path.write_text("".join(",".join("" if cell is None else str(cell) for cell in line) + "\n" for line in lines))
    return path


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    write(tmp_path / "rows.csv", ROWS)
    fs.run(spec(data={"name": str(tmp_path / "rows.csv"), "schema": SCHEMA}), out=tmp_path / "run")
    return tmp_path / "run"


def test_model_json_holds_the_columns_and_what_was_computed_from_the_training_rows(trained: Path) -> None:
    about = json.loads((trained / "model.json").read_text())
    # Doses count in steps of 5: 100, 300 and 305, whose median is 300. "y" is the most frequent kind, number 1.
    assert about["table"]["imputed"] == {"dose": 300.0, "kind": 1.0, "smoker": 0.0}
    assert about["table"]["features"] == [
        "dose", "dose missing", "kind=x", "kind=y", "kind=z", "age", "smoker"
    ]  # fmt: skip
    assert about["class_names"] == ["no", "yes"]
    schema = about["table"]["schema"]
    assert (schema["label"], schema["missing"], schema["delimiter"]) == ("ill", ["?"], ",")
    assert list(schema["columns"]) == list(COLUMNS)
    dose = {"unit": "mg", "range": [0, 900], "missing": ["0"], "impute": "median", "step": 5, "indicator": True}
    assert schema["columns"]["dose"] == {"type": "number", **dose}
    assert schema["columns"]["kind"]["categories"] == ["x", "y", "z"], "z is in a test row only"
    assert about["normalisation"]["shift"] == pytest.approx([250.875, 0.25, 0.25, 0.75, 0, 50, 0.25])


def test_new_rows_become_features_by_hand(trained: Path) -> None:
    predictor = fs.load(trained)
    assert predictor.schema is not None
    assert predictor.schema.names() == ["dose", "dose missing", "kind=x", "kind=y", "kind=z", "age", "smoker"]
    new = {"dose": [None, 0, 7.5], "kind": ["z", "?", "x"], "age": [18, 20, 30], "smoker": ["1", None, "No"]}
    features = [[300, 1, 0, 0, 1, 18, 1], [300, 1, 0, 1, 0, 20, 0], [7.5, 0, 1, 0, 0, 30, 0]]
    about = json.loads((trained / "model.json").read_text())["normalisation"]
    expected = (torch.tensor(features) - torch.tensor(about["shift"])) * torch.tensor(about["scale"])
    assert torch.equal(predictor.inputs(new), expected)
    assert predictor.predict(new).tolist() == predictor.predict(np.array(features)).tolist(), "prepared features"
    for single in range(3):
        row = {name: cells[single : single + 1] for name, cells in new.items()}
        assert torch.equal(predictor.inputs(row), expected[single : single + 1])


@pytest.mark.slow
def test_every_form_of_rows_gives_the_same(trained: Path) -> None:
    predictor = fs.load(trained)
    expected = predictor.predict_proba(ROWS)
    frame = pandas.DataFrame(ROWS)
    less = frame.drop(columns=["ill", "part"])[["smoker", "kind", "dose", "age"]].assign(note="=1+1")
    numbers = {**ROWS, "age": np.array(ROWS["age"]), "dose": torch.tensor([100, 0, 300, 303.5, torch.nan, 200])}
    without_label = {**ROWS, "ill": [None] * 6}
    for form in (frame, less, numbers, without_label, read_csv(trained.parent / "rows.csv")):
        np.testing.assert_array_equal(predictor.predict_proba(form), expected)


@pytest.mark.slow
def test_rows_of_polars(trained: Path) -> None:
    predictor = fs.load(trained)
    frame = polars.DataFrame({name: ROWS[name] for name in COLUMNS}, strict=False)
    np.testing.assert_array_equal(predictor.predict_proba(frame), predictor.predict_proba(ROWS))


def wine() -> Any:
    """A data frame of scikit-learn with text, true and false, missing values, an owner and a number that is large."""
    frame = load_wine(as_frame=True).frame.rename(columns={"od280/od315_of_diluted_wines": "od"})
    draw = np.random.default_rng(0)
    frame["origin"] = np.array(["north", "south", "west"])[draw.integers(0, 3, len(frame))]
    frame["strong"] = (frame["alcohol"] > 13).astype(object)
    frame["colour"] = np.where(frame["hue"] > 1, "red", np.where(frame["hue"] > 0.8, "rosé", "white"))
    frame["bottle"] = 2_000_000_000 + 7.0 * draw.integers(-4, 5, len(frame))
    for name in ("alcohol", "magnesium", "proline", "strong", "colour"):
        frame.loc[draw.random(len(frame)) < 0.2, name] = None
    return frame


WINE = {
    "alcohol": {"impute": "mean", "indicator": True},
    "magnesium": {"impute": "median"},
    "proline": {"impute": "most-frequent", "step": 10},
    "strong": {"type": "boolean", "impute": "mean", "indicator": True},
    "colour": {"type": "category", "impute": "most-frequent"},
    "hue": {},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("normalize", "evaluation"),
    [("standard", {}), ("unit", {"validation": 0.2}), ("none", {"client_test": 0.2}), ("standard", {"float64": True})],
)
def test_rows_give_the_features_and_the_accuracy_of_the_run_to_the_bit(
    tmp_path: Path, normalize: Any, evaluation: dict[str, Any]
) -> None:
    columns = {**WINE, "bottle": {}} if evaluation.pop("float64", False) else WINE
    frame, held = wine(), np.arange(178) % 4 == 0
    settings = {"label": "target", "client": "origin", "features": list(columns), "columns": columns}
    settings["normalize"] = normalize
    data = fs.from_dataframe(frame[~held], test=frame[held], **settings)
    experiment = spec(partition="natural", evaluation=evaluation)
    prepared = fs.prepare(experiment, data=data)
    history = fs.run(experiment, data=data, out=tmp_path / "run")
    predictor = fs.load(tmp_path / "run")
    assert prepared.data.shift is None or (prepared.data.shift.dtype == torch.float64) == ("bottle" in columns)
    for rows, split in ((frame[~held], "train"), (frame[held], "test")):
        run = prepared.data.inputs(slice(None), split)  # type: ignore[arg-type]  # a word of two
        assert torch.equal(predictor.inputs(rows), run)
        assert torch.equal(torch.cat([predictor.inputs(rows[k : k + 1]) for k in range(9)]), run[:9])
    right = predictor.predict(frame[held]) == frame["target"][held].to_numpy()
    assert right.mean() == history.final_accuracy
    assert predictor.predict_proba(frame[held]).argmax(1).tolist() == predictor.predict(frame[held]).tolist()


def test_a_rule_for_missing_values_is_kept_where_no_training_row_needed_it(tmp_path: Path) -> None:
    columns = {"a": {"impute": "mean"}, "b": {"impute": "constant", "value": 1e18}}
    frame = {"a": [1.0, 2.0, 6.0, 1.0], "b": [1.0, 2.0, 3.0, 4.0], "y": ["p", "q", "p", "q"], "t": [0, 0, 0, 1]}
    data = fs.from_dataframe(frame, label="y", test="t", columns=columns)
    table = describe_model(fs.prepare(spec(), data=data))["table"]
    assert table["imputed"] == {"a": 3.0, "b": 1e18}
    assert data.scale is not None
    assert data.scale.isfinite().all()


def test_missing_texts_are_imputed_as_in_the_run(tmp_path: Path) -> None:
    frame = {
        "ward": ["ER", "ICU", None, "ER", "ER", None, "ICU", "ER"],
        "shift": ["day", "", "night", "night", "", "day", "night", "night"],
        "age": [40, 50, 60, 70, 45, 55, 65, 75],
        "ill": list("ynynynyn"),
    }
    columns = {"ward": {"impute": "separate-category"}, "shift": {"impute": "most-frequent"}}
    data = fs.from_dataframe(frame, label="ill", test=0.25, columns=columns, normalize="none")
    fs.run(spec(), data=data, out=tmp_path / "run")
    predictor = fs.load(tmp_path / "run")
    assert predictor.schema is not None
    names = ["ward=ER", "ward=ICU", "ward missing", "shift=day", "shift=night", "age"]
    assert predictor.schema.names() == names
    rows = {"ward": [None, "ICU"], "shift": ["day", None], "age": [50, 60]}
    assert predictor.inputs(rows).tolist() == [[0, 0, 1, 1, 0, 50], [0, 1, 0, 0, 1, 60]]
    with pytest.raises(DataError, match=r"column 'ward' = 'missing': is not a category. Use one of 'ER', 'ICU'"):
        predictor.predict({**rows, "ward": ["missing", "ER"]})


def test_imputed_values_come_back_to_the_bit(tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    frame = {"a": (draw.lognormal(size=60) / 3).tolist(), "y": (np.arange(60) % 3).tolist()}
    frame["a"][7] = None
    data = fs.from_dataframe(frame, label="y", columns={"a": {"impute": "mean"}})
    fs.run(spec(), data=data, out=tmp_path / "run")
    prepared, about = fs.prepare(spec(), data=data), json.loads((tmp_path / "run" / "model.json").read_text())
    assert prepared.data.features is not None
    assert about["table"]["imputed"] == prepared.data.features.imputed
    assert len(str(about["table"]["imputed"]["a"])) > 15, "a number that a shorter text would change"


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "category": (
        {"kind": "yy"},
        "line 3, column 'kind' = 'yy': is not a category; did you mean 'y'? Use one of 'x', 'y', 'z'",
    ),
    "text": ({"age": "old"}, "line 3, column 'age' = 'old': is not a finite number. Use numbers from 18 to 100 y"),
    "range": (
        {"age": "40000"},
        "column 'age' = '40000': is out of range. Use numbers from 18 to 100 years. Check the unit, because a thou",
    ),
    "unit": ({"dose": "901"}, "line 3, column 'dose' = '901': is out of range. Use numbers from 0 to 900 mg"),
    "missing": ({"age": "?"}, "line 3, column 'age' = '?': is missing. Add a value, or a rule"),
    "boolean": (
        {"smoker": "maybe"},
        "line 3, column 'smoker' = 'maybe': is neither true nor false. Use one of true, yes",
    ),
    "column": (
        {"age": ...},
        "data.schema.columns.age = 'age': {path} has no such column. Use one of: kind, dose, smok",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", BAD)
def test_a_row_is_refused_as_the_run_refuses_it(trained: Path, case: str) -> None:
    change, message = BAD[case]
    cells = {name: list(values) for name, values in ROWS.items()}
    for name, cell in change.items():
        if cell is ...:
            del cells[name]
        else:
            cells[name][1] = cell
    path = write(trained.parent / "new.csv", cells)
    categories = {**COLUMNS, "kind": {**COLUMNS["kind"], "categories": ["x", "y", "z"]}}
    with pytest.raises(FedstrataError) as by_run:
        fs.Data(str(path), schema={**SCHEMA, "columns": categories}).load()
    with pytest.raises(FedstrataError) as by_predictor:
        fs.load(trained).predict(read_csv(path))
    assert str(by_predictor.value) == str(by_run.value).replace(f"data.name = {str(path)!r}: ", f"{path}, ")
    assert message.format(path=path) in str(by_predictor.value)
    with pytest.raises(FedstrataError, match=r"row 1, column '|has no such column"):
        fs.load(trained).predict(cells)


def test_what_is_no_table(trained: Path) -> None:
    predictor = fs.load(trained)
    with pytest.raises(
        DataError, match=r"x: the columns have different lengths: \{'dose': 1, 'kind': 2\}\. Give one cell"
    ):
        predictor.predict({"dose": [1], "kind": ["x", "y"]})
    with pytest.raises(
        DataError, match=r"x cannot be read as a table: .* Give a data frame, or a mapping from names to"
    ):
        predictor.predict({"dose": 1})
    with pytest.raises(DataError, match="Give a data frame, or a mapping from names to"):
        predictor.predict({"dose": np.int64(3)})
    with pytest.raises(DataError, match="x has no rows"):
        predictor.predict({name: [] for name in COLUMNS})
    with pytest.raises(DataError, match=r"has the shape \(2, 3\), but this model takes samples of shape \(7,\)\."):
        predictor.predict(np.zeros((2, 3)))
    with pytest.raises(SpecError, match=r"table has no such column. Use one of: kind"):
        predictor.predict(table_of({"kind": ["x"]}, "table"))


DAMAGE: dict[str, tuple[dict[str, Any], str]] = {
    "order": ({"features": ["age", "dose"]}, "table.features differs from the features of table.schema"),
    "imputed": ({"imputed": {"dose": 300.0}}, "table.imputed must name exactly the columns of table.schema"),
    "number": ({"imputed": {"dose": "many"}}, "could not convert string to float"),
    "schema": ({"schema": {"label": 5}}, "label = 5: "),
    "open": ({"schema": {"label": "ill", "columns": {"kind": "category"}}}, "does not list the categories of a column"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_table_is_refused(trained: Path, case: str) -> None:
    change, message = DAMAGE[case]
    about = json.loads((trained / "model.json").read_text())
    del about["checksum"]
    about["table"] |= change
    write_json(trained / "model.json", about)
    with pytest.raises(DataError, match=f"model.json is damaged: .*{message}"):
        fs.load(trained)


@pytest.mark.slow
def test_a_model_of_arrays_has_no_schema(tmp_path: Path) -> None:
    fs.run(spec(model="mlp", training={"rounds": 1}), out=tmp_path / "run")
    predictor = fs.load(tmp_path / "run")
    assert predictor.schema is None
    assert json.loads((tmp_path / "run" / "model.json").read_text())["table"] is None
