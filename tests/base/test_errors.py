from __future__ import annotations

import pickle

import pytest

from fedstrata.base.errors import LONGEST, ExtraMissingError, SpecError


@pytest.mark.parametrize(
    "error", [SpecError("a.b", "is wrong", 3), SpecError("a", "x"), ExtraMissingError("this", "he")]
)
def test_errors_cross_from_worker_processes(error):
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is type(error)
    assert str(twin) == str(error)


def nested(levels):
    table = {}
    for _ in range(levels):
        table = {"a": table}
    return table


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (nested(100_000), "a = (dict too large to show): is wrong"),
        (10**5000, "a = (int too large to show): is wrong"),
        ("x" * 5000, f"a = '{'x' * (LONGEST - 1)}…: is wrong"),
        ([1, 2], "a = [1, 2]: is wrong"),
        (..., "a: is wrong"),
    ],
    ids=["deep", "digits", "long", "plain", "none"],
)
def test_any_value_can_be_shown(value, shown):
    assert str(SpecError("a", "is wrong", value)) == shown


def test_what_is_about_no_key_is_the_problem_alone():
    assert str(SpecError("", "these exclude each other")) == "these exclude each other"
