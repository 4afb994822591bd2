"""Cells by their meaning: numbers, categories, and what is missing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.base.errors import DataError, SpecError
from fedstrata.data.fitting import Unfitted
from fedstrata.data.schema import Schema, Table, held_out, ids, parsed

ROWS = {
    "age": ["63", "41", "", "58"],
    "sex": ["f", "m", "m", "?"],
    "smoker": ["yes", "No", "TRUE", "0"],
    "site": ["b", "a", "b", "b"],
    "sick": ["1", "0", "0", "1"],
}


def table(**columns):
    return Table("t.csv", {**ROWS, **columns}, lines=[2, 3, 4, 6])


def schema(**columns):
    own = {
        "age": {"impute": "mean", "indicator": True, "unit": "years", "range": [0, 120]},
        "sex": {"type": "category", "categories": ["f", "m"], "impute": "most-frequent"},
        "smoker": "boolean",
    }
    return Schema(label="sick", client="site", missing=("?",), columns={**own, **columns})


def encoded(rows, meaning, train):
    cells = torch.from_numpy(parsed(rows, meaning))
    whole = Unfitted("none", cells, cells[:0], meaning)
    return whole.fitted(whole.statistics([np.array(train)]))[0]


def test_by_hand():
    meaning = schema().completed(table())
    x = encoded(table(), meaning, [0, 1, 3])
    assert meaning.names() == ["age", "age missing", "sex=f", "sex=m", "smoker"]
    assert x.tolist() == [[63, 0, 1, 0, 1], [41, 0, 0, 1, 0], [54, 1, 0, 1, 1], [58, 0, 1, 0, 0]]
    assert ids(table(), "site", meaning).tolist() == ["b", "a", "b", "b"]
    assert ids(table(), "sick", meaning).tolist() == [1, 0, 0, 1]


def test_only_training_rows_say_what_stands_in():
    """The mean of 63 and 41, whatever the other row holds."""
    for other in ("58", "119"):
        rows = table(age=["63", "41", "", other])
        assert encoded(rows, schema().completed(rows), [0, 1])[2, 0] == 52


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"impute": "median"}, 41),
        ({"impute": "most-frequent"}, 41),
        ({"impute": "mean"}, (41 + 41 + 50 + 90) / 4),
        ({"impute": "constant", "value": 7}, 7),
    ],
)
def test_rules(rule, expected):
    rows = Table("t", {"a": [90, 41, None, 50, 41], "y": [0, 1, 0, 1, 0]})
    meaning = Schema(label="y", columns={"a": rule})
    assert encoded(rows, meaning, range(5))[2, 0] == expected


@pytest.mark.parametrize(
    ("columns", "meaning", "message"),
    [
        ({}, {"age": {}}, "t.csv, line 4, column 'age' = '': is missing; accepted: a value, or a rule: impute = 'mean"),
        ({"age": ["63", "NaN", "1", "2"]}, {}, "line 3, column 'age' = 'NaN': not a finite number; accepted: numbers"),
        ({"age": ["63", "1", "1", "inf"]}, {}, "line 6, column 'age' = 'inf': not a finite number"),
        ({"age": ["63", "old", "1", "2"]}, {}, "'old': not a finite number; accepted: numbers from 0 to 120 years"),
        ({"age": ["63", "41", "1", "121"]}, {}, "line 6, column 'age' = '121': out of range; accepted: numbers from 0"),
        ({"sex": ["f", "m", "F", "m"]}, {}, "line 4, column 'sex' = 'F': no such category; accepted: f, m; did you"),
        ({"smoker": ["yes", "2", "no", "no"]}, {}, "line 3, column 'smoker' = '2': neither true nor false; accepted:"),
        ({"age": ["", "", "", ""]}, {}, "column 'age': no training row has a value that may be told"),
        ({"age": [[1], "1", "1", "2"]}, {}, "column 'age' = [1]: not a finite number"),
    ],
)  # fmt: skip
def test_a_cell_that_cannot_be(columns, meaning, message):
    rows = table(**columns)
    with pytest.raises(DataError) as error:
        encoded(rows, schema(**meaning).completed(rows), [0, 1, 2, 3])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label": "sik"}, "data.schema.label = 'sik': t.csv has no such column; there are: age, sex, smoker, site, s"),
        ({"client": "clinic"}, "data.schema.client = 'clinic': t.csv has no such column"),
        ({"test": "part"}, "data.schema.test = 'part': t.csv has no such column"),
        ({"ignore": ["nothing"]}, "data.schema.ignore = 'nothing': t.csv has no such column"),
        ({"columns": {"Age": "number"}}, "data.schema.columns.Age = 'Age': t.csv has no such column"),
        ({"columns": {"sick": "number"}}, "data.schema.columns.sick: is the label, which no model may see"),
        ({"columns": {"site": "category"}, "client": "site"}, "data.schema.columns.site: is the client, which no"),
        ({"columns": {}}, "data.schema.columns = ['age', 'sex', 'smoker', 'site', 'sick']: no column is left"),
        ({"ignore": ["age", "sex", "smoker", "site"]}, "data.schema.columns = ['age'"),
    ],
)  # fmt: skip
def test_a_schema_that_does_not_fit_the_table(settings, message):
    with pytest.raises(SpecError) as error:
        Schema(**{"label": "sick", **settings}).completed(table())
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"columns": {"a": {"rnage": [0, 1]}}}, "columns.a.rnage = [0, 1]: unknown key; accepted here: type, unit, ra"),
        ({"columns": {"a": "nombre"}}, "columns.a.type = 'nombre': input should be 'number', 'category' or 'boolean'"),
        ({"columns": {"a": {"range": [3, 1]}}}, "columns.a.range = [3.0, 1.0]: belongs to a number, the least first"),
        ({"columns": {"a": {"type": "boolean", "range": [0, 1]}}}, "columns.a.range = [0.0, 1.0]: belongs to a number"),
        ({"columns": {"a": {"categories": ["x"]}}}, "columns.a.categories = ['x']: belong to type = 'category', each"),
        ({"columns": {"a": {"type": "category", "impute": "mean"}}}, "columns.a.impute = 'mean': of a category: 'most"),
        ({"columns": {"a": {"impute": "constant"}}}, "columns.a.value = None: is what impute = 'constant' puts in"),
        ({"columns": {"a": {"value": 3}}}, "columns.a.value = 3.0: is what impute = 'constant' puts in; give both"),
        (
            {"columns": {"a": {"type": "category", "categories": ["x"], "impute": "constant", "value": "y"}}},
            "columns.a.value = 'y': no such category; accepted: x",
        ),
        ({"columns": {"a": {"range": [0, 1], "impute": "constant", "value": 5}}}, "columns.a.value = 5.0: out of rang"),
        ({"columns": {"a": {"step": 5}}}, "columns.a.step = 5.0: belongs to a number with impute = 'median' or"),
        ({"test": 0.0}, "test = 0.0: a share between 0 and 1, or the name of a column"),
        ({"test": 1.5}, "test = 1.5: a share"),
        ({"delimiter": ";;"}, "delimiter = ';;'"),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be(settings, message):
    with pytest.raises(SpecError) as error:
        Schema(label="y", **settings)
    assert message in str(error.value)


def test_what_is_left_out_is_as_the_table_has_it():
    rows = Table(
        "t", {"n": [1, None, 2.5], "t": ["3", "4", ""], "b": [True, False, None], "c": ["x", "y", "x"], "y": [0, 1, 0]}
    )
    found = Schema(label="y").completed(rows).columns
    assert {name: column.type for name, column in found.items()} == {
        "n": "number", "t": "number", "b": "boolean", "c": "category"
    }  # fmt: skip
    assert found["c"].categories == ("x", "y")


def test_a_number_with_odd_cells_and_a_column_of_names_are_doubted():
    rows = Table("t", {"size": ["1", "2", "NA", "?", "5"] * 6, "name": [f"P{i}" for i in range(30)], "y": [0, 1] * 15})
    with pytest.warns(UserWarning, match="read as a category, of which each value becomes a feature") as seen:
        found = Schema(label="y").completed(rows).columns
    assert {column.type for column in found.values()} == {"category"}
    size, name = (str(warning.message) for warning in seen)
    assert size.startswith("column 'size'")
    assert "numbers: '?', 'NA'. If they stand for no value: missing = ['?', 'NA'], in [data.schema]" in size
    assert name.startswith("column 'name'")
    assert "it has 30 values in 30 rows. To leave it out: ignore = ['name'], in [data.schema]" in name
    mended = Schema(label="y", missing=["NA", "?"], ignore=["name"]).completed(rows).columns  # as they say
    assert {name: column.type for name, column in mended.items()} == {"size": "number"}
    Schema(label="y", columns={"size": "category", "name": "category"}).completed(rows)  # who says so means it


def test_bytes_are_read_as_text():
    rows = Table("t", {"kind": [b"x", "\u00e9".encode(), None], "dose": [b"1", b"2.5", b""], "y": [b"n", b"y", b"n"]})
    meaning = Schema(
        label="y", columns={"dose": {"impute": "median"}, "kind": {"type": "category", "impute": "most-frequent"}}
    )
    meaning = meaning.completed(rows)
    assert meaning.columns["kind"].categories == ("x", "\u00e9")
    assert parsed(rows, meaning)[:2].tolist() == [[1, 0], [2.5, 1]]
    assert ids(rows, "y", meaning).tolist() == ["n", "y", "n"]
    with pytest.raises(
        DataError, match=r"t, row 1, column 'kind' = b'\\xff': holds bytes that are not UTF-8; accepted"
    ):
        Schema(label="y").completed(Table("t", {"kind": ["x", b"\xff"], "y": [0, 1]}))


def test_a_completed_schema_reads_other_rows_as_strictly():
    """As a site's would: a category that the table did not have is refused."""
    meaning = Schema(label="y", columns={"c": "category"}).completed(Table("a", {"c": ["x", "y"], "y": [0, 1]}))
    with pytest.raises(DataError, match="b, row 0, column 'c' = 'z': no such category; accepted: x, y"):
        parsed(Table("b", {"c": ["z"], "y": [0]}), meaning)


@pytest.mark.parametrize("name", ["site", "sick"])
def test_labels_and_clients_are_in_every_row(name):
    rows = table(**{name: ["1", "", "0", "1"]})
    what = {"site": "client", "sick": "label"}[name]
    with pytest.raises(DataError, match=f"line 3, column '{name}' = '': the {what} is missing; accepted: a value"):
        held_out(rows, schema().completed(rows), 0)


def test_classes_are_closed_and_in_their_order():
    meaning = Schema(label="sick", classes=("1", "0"), columns={"age": {"impute": "mean"}}).completed(table())
    assert ids(table(), "sick", meaning).tolist() == ["1", "0", "0", "1"]
    with pytest.raises(DataError, match="line 6, column 'sick' = '2': no such class; accepted: 1, 0"):
        ids(table(sick=["1", "0", "0", "2"]), "sick", meaning)


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2)), min_size=2, max_size=60),
    st.floats(0.05, 0.9),
    st.integers(0, 99),
)
def test_a_share_is_held_out_of_every_client_by_label(rows, share, seed):
    owners, labels = zip(*rows, strict=True)
    cells = Table("t", {"who": owners, "y": labels, "x": [0] * len(rows)})
    meaning = Schema(label="y", client="who", test=share).completed(cells)
    held = held_out(cells, meaning, seed)
    assert np.array_equal(held, held_out(cells, meaning, seed))
    for owner in set(owners):
        mine = np.array(owners) == owner
        size = int(mine.sum())
        assert held[mine].sum() == (0 if size == 1 else min(max(round(share * size), 1), size - 1))
        for label in set(labels):
            of_label = mine & (np.array(labels) == label)
            exact = held[mine].sum() * of_label.sum() / size
            assert abs(held[of_label].sum() - exact) < 1


def test_a_column_may_say_which_rows_are_test_samples():
    rows = Table("t", {"part": ["Test", "train", "true", "0"], "y": [0, 1, 0, 1], "x": [1, 2, 3, 4]})
    meaning = Schema(label="y", test="part").completed(rows)
    assert list(meaning.columns) == ["x"]
    assert held_out(rows, meaning, 0).tolist() == [True, False, True, False]
    wrong = Table("t", {**rows.columns, "part": ["test", "dev", "train", "test"]})
    with pytest.raises(DataError, match="row 1, column 'part' = 'dev': does not say which part it is; accepted: true"):
        held_out(wrong, meaning, 0)
