"""Cells by their meaning: numbers, categories, and what is missing."""

from __future__ import annotations

import tomllib
from datetime import date, datetime, time, timedelta

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
        ({}, {"age": {}}, "t.csv, line 4, column 'age' = '': is missing. Add a value, or a rule in [data.sche"),
        ({"age": ["63", "NaN", "1", "2"]}, {}, "line 3, column 'age' = 'NaN': is not a finite number. Use numbers"),
        ({"age": ["63", "1", "1", "inf"]}, {}, "line 6, column 'age' = 'inf': is not a finite number"),
        ({"age": ["63", "old", "1", "2"]}, {}, "'old': is not a finite number. Use numbers from 0 to 120 years"),
        ({"age": ["63", "41", "1", "121"]}, {}, "line 6, column 'age' = '121': is out of range. Use numbers from 0"),
        ({"sex": ["f", "m", "F", "m"]}, {}, "line 4, column 'sex' = 'F': is not a category; did you mean 'f'? Use"),
        ({"smoker": ["yes", "2", "no", "no"]}, {}, "line 3, column 'smoker' = '2': is neither true nor false. Use"),
        ({"age": ["", "", "", ""]}, {}, "column 'age': too few training rows have a value"),
        ({"age": [[1], "1", "1", "2"]}, {}, "column 'age' = [1]: is not a finite number"),
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
        ({"label": "sik"}, "data.schema.label = 'sik': t.csv has no such column; did you mean 'sick'? Use one of"),
        ({"client": "clinic"}, "data.schema.client = 'clinic': t.csv has no such column"),
        ({"test": "part"}, "data.schema.test = 'part': t.csv has no such column"),
        ({"ignore": ["nothing"]}, "data.schema.ignore = 'nothing': t.csv has no such column"),
        ({"columns": {"Age": "number"}}, "data.schema.columns.Age = 'Age': t.csv has no such column"),
        ({"columns": {"sick": "category"}}, "columns.sick: this column is the label, so it cannot be a feature."),
        ({"columns": {"site": "category"}, "client": "site"}, "data.schema.columns.site: this column is data."),
        ({"features": []}, "data.schema.features = ['age', 'sex', 'smoker', 'site', 'sick']: no column is left"),
        ({"features": ["Age"]}, "data.schema.features = 'Age': t.csv has no such column"),
        ({"features": ["sick"]}, "data.schema.features = 'sick': this column is data.schema.label, so it cannot be"),
        ({"ignore": ["age", "sex", "smoker", "site"]}, "data.schema.features = ['age'"),
    ],
)  # fmt: skip
def test_a_schema_that_does_not_fit_the_table(settings, message):
    with pytest.raises(SpecError) as error:
        Schema(**{"label": "sick", **settings}).completed(table())
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"columns": {"a": {"rnage": [0, 1]}}}, "columns.a.rnage = [0, 1]: is not a known key; did you mean 'range'?"),
        ({"columns": {"a": "nombre"}}, "columns.a.type = 'nombre': must be 'number', 'category' or 'boolean'"),
        ({"columns": {"a": {"range": [3, 1]}}}, "columns.a.range = [3.0, 1.0]: must be two numbers, with the sm"),
        ({"columns": {"a": {"type": "boolean", "range": [0, 1]}}}, "columns.a.range = [0.0, 1.0]: must be two"),
        ({"columns": {"a": {"type": "number", "categories": ["x"]}}}, "columns.a.categories = ['x']: must be"),
        ({"columns": {"a": {"type": "category", "impute": "mean"}}}, "columns.a.impute = 'mean': cannot be computed"),
        ({"columns": {"a": {"impute": "constant"}}}, "columns.a.value = None: must be set together with impute"),
        ({"columns": {"a": {"value": 3}}}, "columns.a.value = 3.0: must be set together with impute = 'constant'. Set"),
        (
            {"columns": {"a": {"type": "category", "categories": ["x"], "impute": "constant", "value": "y"}}},
            "columns.a.value = 'y': is not a category. Use one of 'x'",
        ),
        ({"columns": {"a": {"range": [0, 1], "impute": "constant", "value": 5}}}, "columns.a.value = 5.0: is out of"),
        ({"columns": {"a": {"step": 5}}}, "columns.a.step = 5.0: has an effect only for a column of numbers with imp"),
        ({"test": 0.0}, "test = 0.0: must be a fraction between 0 and 1 (both excluded), or the name of a column."),
        ({"test": 1.5}, "test = 1.5: must be a fraction between 0 and 1 (both excluded), or the name of a column."),
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
    with pytest.warns(UserWarning, match="read as a category") as seen:
        found = Schema(label="y").completed(rows).columns
    assert {column.type for column in found.values()} == {"category"}
    size, name = (str(warning.message) for warning in seen)
    assert size.startswith("column 'size'")
    assert "numbers: '?', 'NA'. If these cells mean a missing value, set missing = ['?', 'NA'] in [data.schema]" in size
    assert name.startswith("column 'name'")
    assert "each of its 30 values (in 30 rows) becomes" in name
    assert "To omit the column, set ignore = ['name'] in [data.schema]." in name
    mended = Schema(label="y", missing=["NA", "?"], ignore=["name"]).completed(rows).columns  # as they say
    assert {name: column.type for name, column in mended.items()} == {"size": "number"}
    Schema(label="y", columns={"size": "category", "name": "category"}).completed(rows)  # who says so means it


WARDS = {
    "ward": ["acute, surgery", "ER", "", "ER", "ICU", None],
    "crp": [1.5, None, 3.0, 4.0, 9.0, 2.5],
    "beds": [4, 2, 2, None, 2, 1],
    "insured": ["yes", "no", "", "yes", "yes", "no"],
    "fit": ["true", "", "true", "false", "true", "true"],
    "y": [0, 1, 0, 1, 0, 1],
}


def test_a_rule_for_missing_values_needs_neither_a_type_nor_the_other_columns():
    rows = Table("t", {**WARDS, "insured": list("yyynnn"), "fit": [True] * 6})
    rules = {"beds": {"impute": "most-frequent"}, "crp": {"impute": "mean"}, "ward": {"impute": "most-frequent"}}
    meaning = Schema(label="y", columns=rules).completed(rows)
    types = {"beds": "number", "crp": "number", "ward": "category", "insured": "category", "fit": "boolean"}
    assert {name: column.type for name, column in meaning.columns.items()} == types, "columns with a rule come first"
    x = encoded(rows, meaning, range(6))
    assert x[3, 0] == 2
    assert x[1, 1] == 4
    assert x[:, 2:5].tolist() == [[0, 0, 1], [1, 0, 0], [1, 0, 0], [1, 0, 0], [0, 1, 0], [1, 0, 0]]


def test_missing_values_may_be_a_category_of_their_own():
    rows = Table("t", {"ward": WARDS["ward"], "y": WARDS["y"]})
    meaning = Schema(label="y", columns={"ward": {"impute": "separate-category"}}).completed(rows)
    assert meaning.names() == ["ward=ER", "ward=ICU", "ward=acute, surgery", "ward missing"]
    expected = [[0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]]
    assert encoded(rows, meaning, range(6)).tolist() == expected
    cells = torch.from_numpy(parsed(rows, meaning))
    whole = Unfitted("standard", cells, cells[:0], meaning)
    _, _, shift, scale = whole.fitted(whole.statistics([np.arange(3), np.arange(3, 6)]))
    values = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(shift, values.mean(0).float())
    torch.testing.assert_close(scale, (1 / values.std(0, correction=0)).float())


def test_a_constant_of_a_text_column_needs_no_type_and_may_be_a_category_that_no_row_has():
    rows = Table("t", {"ward": WARDS["ward"], "y": WARDS["y"]})
    meaning = Schema(label="y", columns={"ward": {"impute": "constant", "value": "elsewhere"}}).completed(rows)
    assert meaning.columns["ward"].categories == ("ER", "ICU", "acute, surgery", "elsewhere")
    assert encoded(rows, meaning, range(6))[:, 3].tolist() == [0, 0, 1, 0, 0, 1]
    with pytest.raises(SpecError) as error:
        Schema(label="y", columns={"ward": {"constant": "elsewhere"}})
    expected = "columns.ward.constant = 'elsewhere': is not a known key. Set 'value' and impute = 'constant'."
    assert str(error.value) == expected


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("crp", "crp = { impute = 'median' }"),
        ("beds", "beds = { impute = 'median' }"),
        ("ward", "ward = { impute = 'most-frequent' }, or ward = { impute = 'separate-category' }, which makes"),
        ("insured", "insured = { impute = 'most-frequent' }, or insured = { impute = 'separate-category' }, which"),
        ("fit", "fit = { impute = 'most-frequent' }"),
        ("ward name", "\"ward name\" = { impute = 'most-frequent' }, or"),
    ],
)
def test_a_missing_value_names_a_rule_that_works_for_the_type_of_its_column(name, rule):
    rows = Table("t", {**WARDS, "ward name": WARDS["ward"]})
    with pytest.raises(DataError) as error:
        parsed(rows, Schema(label="y", features=[name]).completed(rows))
    assert f"is missing. Add a value, or a rule in [data.schema.columns]: {rule}" in str(error.value)
    taken = tomllib.loads(rule.partition("}")[0] + "}")
    parsed(rows, Schema(label="y", features=[name], columns=taken).completed(rows))


def test_all_columns_with_missing_values_are_named_at_once_but_not_to_others():
    meaning = Schema(label="y", features=["beds", "ward", "crp", "fit"], columns={"crp": {"impute": "mean"}})
    rows = Table("t", WARDS)
    with pytest.raises(DataError) as error:
        parsed(rows, meaning.completed(rows))
    assert str(error.value).startswith("t, row 3, column 'beds': is missing. ")
    assert str(error.value).endswith(". Other columns with missing values: 'ward', 'fit'.")
    assert "ward" not in error.value.public


def test_columns_are_chosen_by_features_or_ignore_and_described_by_columns():
    rows = Table("t", {"a": [1, 2], "b": [3, 4], "c": [5, 6], "y": [0, 1]})
    scaled = {"b": {"unit": "mg"}}
    assert Schema(label="y", columns=scaled).completed(rows).names() == ["b", "a", "c"]
    assert Schema(label="y", columns=scaled, ignore=["c"]).completed(rows).names() == ["b", "a"]
    chosen = Schema(label="y", columns=scaled, features=["c", "b"]).completed(rows)
    assert chosen.names() == ["c", "b"]
    assert chosen.columns["b"].unit == "mg"
    for settings, message in (
        ({"features": ["a"], "ignore": ["c"]}, "ignore = ['c']: has no effect, because 'features' is set. Remove"),
        (
            {"features": ["a"], "columns": scaled},
            "columns.b: describes a column that the key 'features' excludes. Change one of the two keys.",
        ),
        (
            {"ignore": ["b"], "columns": scaled},
            "columns.b: describes a column that the key 'ignore' excludes. Change one of the two keys.",
        ),
    ):
        with pytest.raises(SpecError) as error:
            Schema(label="y", **settings)
        assert message in str(error.value)


@pytest.mark.parametrize(
    "cells",
    [
        ["2026-01-02", "2026-1-31", "", "unknown"],
        ["2026-01-02 10:30:00", "2026-01-31T23:59:59.5+01:00", "2026-02-01 00:00", ""],
        ["31.01.2026", "1/2/26", "28-02-2026", "01.02.2026 9:30"],
        ["10:30", "9:05:59", "23:59:59.125", ""],
        [date(2026, 1, 2), datetime(2026, 1, 2, 3), None, date(2026, 1, 3)],
        [time(10, 30), timedelta(days=3), timedelta(seconds=2), None],
    ],
)
def test_dates_are_refused_with_advice(cells):
    rows = Table("t", {"admitted": cells, "age": [1, 2, 3, 4], "y": [0, 1, 0, 1]})
    with pytest.raises(DataError) as error:
        Schema(label="y").completed(rows)
    assert "t, row 0, column 'admitted' = " in str(error.value)
    assert (
        "Derive a number from it, such as days since admission, or leave the column out with ignore = ['admitted'] in "
        in (str(error.value))
    )
    assert "admitted = 'category' in [data.schema.columns]" in str(error.value)
    assert Schema(label="y", ignore=["admitted"]).completed(rows).names() == ["age"]
    declared = Schema(label="y", columns={"admitted": "category"}, missing=["unknown"]).completed(rows)
    assert len(declared.columns["admitted"].categories) == len(
        {cell for cell in cells if cell not in ("", None, "unknown")}
    )


@pytest.mark.parametrize("cells", [["10-19", "20-29"], ["1.5.2.1", "3-4"], ["A10.1", "2026"], ["12:3", "a"]])
def test_texts_that_are_no_dates_are_categories(cells):
    rows = Table("t", {"band": cells, "y": [0, 1]})
    assert Schema(label="y").completed(rows).columns["band"].categories == tuple(sorted(cells))


@pytest.mark.parametrize("columns", [None, {"code": "category"}])
def test_a_category_with_many_values_is_doubted_once(columns):
    rows = Table("t", {"code": [f"E{row % 101}" for row in range(150)], "y": [0, 1] * 75})
    with pytest.warns(UserWarning, match="column 'code'") as seen:
        Schema(label="y", columns=columns).completed(rows)
    expected = (
        "column 'code' has 101 categories, each of which becomes a feature. Merge rare values, or leave the column "
    )
    expected += "out with "
    assert [str(warning.message) for warning in seen] == [expected + "ignore = ['code'] in [data.schema]."]
    fewer = Table("t", {"code": [f"E{row % 100}" for row in range(1500)], "y": [0, 1] * 750})
    Schema(label="y", columns=columns).completed(fewer)  # warnings are errors here


def test_real_sites_read_what_is_described_and_guess_nothing():
    described = Schema(label="y", classes=["0", "1"], columns={"a": {}, "b": {"categories": ["x"]}}).closed()
    rows = Table("t", {"note": ["free text", "more"], "a": [3, 4], "b": ["x", "x"], "y": [0, 1]})
    assert described.completed(rows).names() == ["a", "b=x"]
    rows = Table("t", {**rows.columns, "a": ["3", "old"]})
    with pytest.raises(DataError, match="row 1, column 'a' = 'old': is not a finite number"):
        parsed(rows, described.completed(rows))


def test_bytes_are_read_as_text():
    rows = Table("t", {"kind": [b"x", "\u00e9".encode(), None], "dose": [b"1", b"2.5", b""], "y": [b"n", b"y", b"n"]})
    meaning = Schema(label="y", columns={"dose": {"impute": "median"}, "kind": {"impute": "most-frequent"}})
    meaning = meaning.completed(rows)
    assert meaning.columns["kind"].categories == ("x", "\u00e9")
    assert parsed(rows, meaning)[:2].tolist() == [[1, 0], [2.5, 1]]
    assert ids(rows, "y", meaning).tolist() == ["n", "y", "n"]
    with pytest.raises(
        DataError,
        match=r"t, row 1, column 'kind' = b'\\xff': contains bytes that are not UTF-8\. Use strings, numbers or",
    ):
        Schema(label="y").completed(Table("t", {"kind": ["x", b"\xff"], "y": [0, 1]}))


def test_a_completed_schema_reads_other_rows_as_strictly():
    """As a site's would: a category that the table did not have is refused."""
    meaning = Schema(label="y", columns={"c": "category"}).completed(Table("a", {"c": ["x", "y"], "y": [0, 1]}))
    with pytest.raises(DataError, match=r"b, row 0, column 'c' = 'z': is not a category. Use one of 'x', 'y'"):
        parsed(Table("b", {"c": ["z"], "y": [0]}), meaning)


@pytest.mark.parametrize("name", ["site", "sick"])
def test_labels_and_clients_are_in_every_row(name):
    rows = table(**{name: ["1", "", "0", "1"]})
    what = {"site": "client", "sick": "label"}[name]
    with pytest.raises(DataError, match=f"line 3, column '{name}' = '': the {what} is missing. Give a value"):
        held_out(rows, schema().completed(rows), 0)


def test_classes_are_closed_and_in_their_order():
    meaning = Schema(label="sick", classes=("1", "0"), columns={"age": {"impute": "mean"}}).completed(table())
    assert ids(table(), "sick", meaning).tolist() == ["1", "0", "0", "1"]
    with pytest.raises(DataError, match=r"line 6, column 'sick' = '2': is not a class. Use one of '1', '0'"):
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
    with pytest.raises(
        DataError,
        match=r"row 1, column 'part' = 'dev': does not say whether the row is for training or testing\. Use one of:",
    ):
        held_out(wrong, meaning, 0)
