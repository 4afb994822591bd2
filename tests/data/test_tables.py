"""CSV, Parquet and data frames: the same rows, the same data set; and what is wrong with a file, by its line."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from lazy import Lazy

import fedstrata as fs
from fedstrata.base.errors import DataError, ExtraMissingError, SpecError
from fedstrata.data.sources import Data

pandas = Lazy("pandas")

COLUMNS = {
    "age": {"impute": "median", "indicator": True},
    "sex": {"type": "category", "categories": ["f", "m"]},
    "smoker": "boolean",
}
SCHEMA = {"label": "sick", "client": "site", "columns": COLUMNS, "test": 0.25}


def rows(count=40):
    draw = np.random.default_rng(0)
    return {
        "age": [float(age) if age > 30 else None for age in draw.integers(20, 80, count)],
        "sex": draw.choice(["f", "m"], count).tolist(),
        "smoker": draw.choice([True, False], count).tolist(),
        "site": draw.choice(["north", "south", "west"], count).tolist(),
        "sick": draw.choice(["no", "yes"], count).tolist(),
    }


def write(path, columns=None, delimiter=","):
    columns = rows() if columns is None else columns
    lines = [columns.keys(), *zip(*columns.values(), strict=True)]
    text = "".join(delimiter.join("" if cell is None else str(cell) for cell in line) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")
    return str(path)


def same(first, second):
    assert first.class_names == second.class_names
    assert first.client_names == second.client_names
    for name in ("x_train", "y_train", "x_test", "y_test", "client_train", "client_test", "shift", "scale"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


def test_a_csv_file(tmp_path):
    data = Data(write(tmp_path / "a.csv"), schema=SCHEMA).load()
    assert data.shape == (5,)
    assert data.train_size + len(data.y_test) == 40
    assert data.class_names == ("no", "yes")
    assert data.client_names == ("north", "south", "west")
    assert len(data.client_test) == len(data.y_test) > 0
    median = np.percentile(data.x_train[data.x_train[:, 1] == 0, 0], 50, method="inverted_cdf")
    assert set(data.x_train[data.x_train[:, 1] == 1, 0].tolist()) == {median}
    torch.testing.assert_close(data.inputs(slice(None)).mean(0), torch.zeros(5), atol=1e-5, rtol=0)


def test_another_delimiter_a_mark_of_utf_8_and_lines_within_cells(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('﻿a;y\n"1\n";0\n2;1\n\n3;0\n4;1\n5;x\n', encoding="utf-8")
    schema = {"label": "y", "delimiter": ";", "classes": ["0", "1"]}
    with pytest.raises(DataError, match=r"a\.csv': line 8, column 'y' = 'x': is not a class"):
        Data(str(path), schema=schema).load()
    path.write_text(path.read_text(encoding="utf-8").replace("x", "1"), encoding="utf-8")
    data = Data(str(path), schema=schema, normalize="none").load()
    assert sorted([*data.x_train.flatten().tolist(), *data.x_test.flatten().tolist()]) == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_parquet_and_data_frames_are_the_same_data_set(tmp_path):
    csv = Data(write(tmp_path / "a.csv"), schema=SCHEMA).load(seed=3)
    frame = pandas.DataFrame(rows())
    frame.to_parquet(tmp_path / "a.parquet")
    same(Data(str(tmp_path / "a.parquet"), schema=SCHEMA).load(seed=3), csv)
    same(fs.from_dataframe(frame, seed=3, **SCHEMA), csv)
    same(fs.from_dataframe(frame.convert_dtypes(), seed=3, **SCHEMA), csv)  # with pandas' own values for missing ones


@pytest.mark.slow
def test_a_frame_of_its_own_holds_the_test_samples():
    frame = pandas.DataFrame({"a": [1.0, 2.0, None], "site": [7, 7, 9], "y": ["x", "z", "x"]})
    other = pandas.DataFrame({"y": ["z", "x"], "a": [None, 100.0], "site": [9, 8]})
    data = fs.from_dataframe(
        frame, label="y", client="site", test=other, columns={"a": {"impute": "mean"}}, normalize="none"
    )
    assert data.x_train.flatten().tolist() == [1, 2, 1.5]
    assert data.x_test.flatten().tolist() == [1.5, 100]
    assert (data.y_test.tolist(), data.client_names, data.client_test.tolist()) == ([1, 0], ("7", "8", "9"), [2, 1])
    with pytest.raises(SpecError, match=r"test = 'site': table \(test\) has no such column"):
        fs.from_dataframe(frame, label="y", test=other.drop(columns="site"))
    with pytest.raises(DataError, match=r"row 2, column 'a': is missing. Add a value, or a rule"):
        fs.from_dataframe(frame, label="y")


def test_a_mapping_is_read_as_a_frame_is():
    columns = {
        "a": np.array([1, 2, 4]),
        "b": ["x", None, "y"],
        "y": ("no", "yes", "no"),
        "site": torch.tensor([7, 8, 7]),
        "test": [0, 0, 1],
    }
    schema = {
        "label": "y",
        "client": "site",
        "test": "test",
        "columns": {"a": {}, "b": {"type": "category", "impute": "most-frequent"}},
    }
    frame = pandas.DataFrame({name: list(cells) for name, cells in columns.items()} | {"site": [7, 8, 7]})
    same(fs.from_dataframe(columns, **schema), fs.from_dataframe(frame, **schema))
    with pytest.raises(
        DataError, match=r"table: the columns have different lengths: \{'a': 3, 'b': 2, 'y': 3, 'site': 3,"
    ):
        fs.from_dataframe({**columns, "b": ["x", "y"]}, **schema)


@pytest.mark.parametrize("frame", [[1, 2], np.zeros((3, 2)), {"a": 1}, {"a": np.float64(1)}])
def test_what_is_no_data_frame(frame):
    with pytest.raises(
        DataError, match=r"table cannot be read as a table: .* Give a data frame, or a mapping from names to"
    ):
        fs.from_dataframe(frame, label="y")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no rows below the line with the names"),
        ("a,y\n", "has no rows below the line with the names of the columns"),
        ("a,a,y\n1,2,0\n", "line 1: the column 'a' occurs twice"),
        ("a,y\n1,0\n2\n", "line 3: the row has 1 cells, but line 1 has 2"),
        ("a,y\n1,0\n2,1,5\n", "line 3: the row has 3 cells, but line 1 has 2"),
        ('a,y\n1,0\n"2,1\n', "cannot be read: unexpected end of data"),
        (
            "a,y\n1,0\nNaN,1\n",
            "line 3, column 'a' = 'NaN': is not a finite number. Use numbers. If this entry means a missing value",
        ),
        ("a,y\n1,0\n,1\n", "line 3, column 'a' = '': is missing. Add a value, or a rule"),
        ("a,y\n1,0\n2,\n", "line 3, column 'y' = '': the label is missing"),
    ],
)
def test_a_file_that_is_wrong(tmp_path, text, message):
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    with pytest.raises(DataError) as error:
        Data(str(tmp_path / "a.csv"), schema="y").load()
    assert message in str(error.value)


def test_files_that_are_none(tmp_path):
    (tmp_path / "latin.csv").write_bytes(b"a,y\n\xff,1\n")
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "no.parquet").write_bytes(b"PAR1nothing")
    for name, message in {
        "gone.csv": "there is no file",
        "latin.csv": "cannot be read: 'utf-8' codec",
        "folder.csv": "is not a file",
        "no.parquet": "is not a Parquet file, or is damaged",
    }.items():
        with pytest.raises(DataError, match=message):
            Data(str(tmp_path / name), schema="y").load()


def test_parquet_without_its_extra(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ExtraMissingError, match=r"pip install 'fedstrata\[tables\]'"):
        Data(str(tmp_path / "a.parquet"), schema="y").load()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "a.csv"}, r"data.schema: is required for a table, but not set. Add \[data.schema\] with"),
        ({"name": "digits", "schema": "y"}, "data.schema: .*, but data.name is 'digits'"),
        ({"name": "a.csv", "schema": "y", "client": "c"}, "data.client = 'c': has an effect only for a data set from"),
        ({"name": "a.npz", "client": "c"}, "only for a data set from Hugging Face. For a .npz file, store cl"),
    ],
)  # fmt: skip
def test_settings_that_go_with_other_data(settings, message):
    with pytest.raises(SpecError, match=message):
        Data(**settings).load()


@pytest.mark.slow
def test_a_schema_in_a_spec_is_read_back_and_decides_the_data(tmp_path):
    table = {"data": {"name": write(tmp_path / "a.csv"), "schema": SCHEMA}, "partition": "natural", "model": "tabular"}
    spec = fs.Experiment.from_table(table)
    (tmp_path / "spec.toml").write_text(spec.to_toml())
    again = fs.Experiment.from_toml(tmp_path / "spec.toml")
    assert again == spec
    assert fs.prepare(again).identity == fs.prepare(spec).identity
    with pytest.raises(SpecError) as error:
        fs.Experiment.from_table({"data": {"name": "a.csv", "schema": {"label": "y", "columns": {"a": {"typ": "x"}}}}})
    assert error.value.key == "data.schema.columns.a.typ"


def test_a_limit_keeps_whose_the_samples_are(tmp_path):
    whole = Data(write(tmp_path / "a.csv"), schema=SCHEMA, normalize="none").load()
    cut = Data(write(tmp_path / "a.csv"), schema=SCHEMA, normalize="none", limit=12).load()
    known = {tuple(x): owner for x, owner in zip(whole.x_train.tolist(), whole.client_train.tolist(), strict=True)}
    assert len(cut.client_train) == 12
    pairs = zip(cut.x_train.tolist(), cut.client_train.tolist(), strict=True)
    assert sum(known[tuple(x)] == owner for x, owner in pairs) >= 10  # some rows are alike


@pytest.mark.parametrize("cell", ["1_0", "\u0663", "1\u0660"])
def test_only_what_is_written_as_a_number_is_one(cell):
    rows = {"x": ["1", cell, "3", "4"], "y": ["a", "b", "a", "b"]}
    with pytest.raises(DataError, match=r"column 'x' = .*: is not a finite number"):
        fs.from_dataframe(rows, label="y", test=0.5, columns={"x": "number"})


def test_whole_numbers_that_a_feature_would_round_are_refused():
    def frame(*cells):
        return fs.from_dataframe({"x": cells, "y": list("abab")}, label="y", test=0.5, columns={"x": "number"})

    assert len(frame(2**53, 2.0**70, "1e30", 3).y_train) == 2
    for cell in (2**53 + 1, str(2**60 + 1)):
        with pytest.raises(DataError, match=r"too large to be stored exactly"):
            frame(1, 2, cell, 3)


@pytest.mark.parametrize(
    ("rows", "given"),
    [
        ("1,a\n", "there are too few rows (1 for training, 0 for testing) for 1 label(s)"),
        ("1,a\n2,b\n", "there are too few rows (1 for training, 1 for testing) for 2 label(s)"),
        ("1,a\n2,b\n3,c\n", "there are too few rows (2 for training, 1 for testing) for 3 label(s)"),
    ],
)
def test_a_table_with_too_few_rows_says_how_many_are_needed(tmp_path, rows, given):
    (tmp_path / "a.csv").write_text(f"x,y\n{rows}", encoding="utf-8")
    with pytest.raises(DataError) as error:
        Data(str(tmp_path / "a.csv"), schema="y").load()
    expected = f"{given}. Add rows, so that training rows and test rows have a label in common."
    assert str(error.value).endswith(expected)
    (tmp_path / "a.csv").write_text("x,y\n1,a\n2,a\n", encoding="utf-8")
    assert len(Data(str(tmp_path / "a.csv"), schema="y").load().y_train) == 1


def test_parquet_with_bytes_is_read_as_text(tmp_path):
    columns = {"kind": ["x", "\u00e9"] * 6, "site": ["n", "n", "s"] * 4, "y": ["no", "yes", "yes", "no"] * 3}
    pandas.DataFrame({name: [cell.encode() for cell in cells] for name, cells in columns.items()}).to_parquet(
        tmp_path / "bytes.parquet"
    )
    data = Data(str(tmp_path / "bytes.parquet"), schema={"label": "y", "client": "site"}).load()
    assert (data.class_names, data.client_names) == (("no", "yes"), ("n", "s"))
    same(data, fs.from_dataframe(columns, label="y", client="site"))


@pytest.mark.parametrize("unit", ["D", "s", "ns"])
def test_dates_of_numpy_are_refused_as_dates(unit):
    days = np.arange(4).astype(f"datetime64[{unit}]")
    with pytest.raises(DataError, match=r"is a date or a time, which a model cannot use directly. Derive a number"):
        fs.from_dataframe({"day": days, "y": list("abab")}, label="y", test=0.5)


def test_labels_that_numpy_would_merge_are_refused():
    with pytest.raises(DataError, match="ends with a NUL character, which NumPy cuts off"):
        fs.from_dataframe({"x": [1, 2, 3, 4], "y": ["a", "a\0", "a", "b"]}, label="y", test=0.5)
    with pytest.raises(DataError, match="y_train: a string ends with a NUL character, which NumPy cuts off"):
        fs.from_arrays([[1.0], [2.0]], ["a", "a\0"], [[1.0], [2.0]], ["a", "a"])


def test_a_file_with_another_delimiter_is_told_how_to_set_it(tmp_path):
    (tmp_path / "a.csv").write_text("age;sick\n50;0\n60;1\n", encoding="utf-8")
    problem = r"a\.csv has no such column, because its only column is 'age;sick'\. Set data\.schema\.delimiter = ';'\."
    with pytest.raises(SpecError, match=problem):
        Data(str(tmp_path / "a.csv"), schema={"label": "sick"}).load()
