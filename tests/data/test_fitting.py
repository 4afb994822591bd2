"""Statistics of training samples: they add up over clients, and say what stands in and what is normal."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.base import records
from fedstrata.base.errors import DataError
from fedstrata.data.fitting import Unfitted
from fedstrata.data.normalisation import shift_and_scale
from fedstrata.data.schema import Column, Schema

COLUMNS = {
    "mean": {"impute": "mean"},
    "median": {"impute": "median", "indicator": True},
    "frequent": {"impute": "most-frequent"},
    "kind": {"type": "category", "categories": ["x", "y", "z"], "impute": "most-frequent"},
}


def of(cells, normalize="standard", columns=None):
    schema = None if columns is None else Schema(label="label", columns=columns)
    cells = torch.as_tensor(cells)
    return Unfitted(normalize, cells if schema is None else cells.double(), cells[:0], schema)


def known(draw, rows):
    """Cells of ``COLUMNS``, some of them missing, whose large means are far apart."""
    cells = np.stack([*(draw.integers(0, 5, rows) + 10.0 ** (3 * k) for k in range(3)), draw.integers(0, 3, rows)], 1)
    cells[draw.random(cells.shape) < 0.2] = math.nan
    return cells


def close(first, second):
    assert first.samples == second.samples
    for name in ("count", "mean", "squares", "low", "high"):
        torch.testing.assert_close(getattr(first, name), getattr(second, name), rtol=1e-9, atol=1e-9)
    assert first.counts.keys() == second.counts.keys()
    assert all(torch.equal(first.counts[name], second.counts[name]) for name in first.counts)


@pytest.mark.slow
@given(st.integers(0, 999), st.lists(st.integers(0, 40), min_size=2, max_size=4), st.sampled_from(["unit", "standard"]))
def test_statistics_of_clients_add_up(seed, cuts, normalize):
    whole = of(known(np.random.default_rng(seed), 40), normalize, COLUMNS)
    bounds = [0, *sorted(cuts), 40]
    close(whole.statistics([np.arange(a, b) for a, b in pairwise(bounds)]), whole.statistics([np.arange(40)]))


def test_by_hand():
    cells = [[1.0, 7, 3, 0], [math.nan, 8, 3, 0], [3.0, math.nan, 5, math.nan]]
    whole = of(cells, "standard", COLUMNS)
    found = whole.statistics([np.array([0, 1]), np.array([2])])
    assert found.samples == 3
    assert found.count.tolist() == [2, 2, 3, 2]
    assert found.mean[:3].tolist() == pytest.approx([2, 7.5, 11 / 3])
    assert found.squares[:3].tolist() == pytest.approx([2, 0.5, 8 / 3])
    assert {name: table.tolist() for name, table in found.counts.items()} == {
        "median": [[7, 1], [8, 1]], "frequent": [[3, 2], [5, 1]], "kind": [[0, 2]]
    }  # fmt: skip
    x, _, shift, scale = whole.fitted(found)
    assert x.tolist() == [[1, 7, 0, 3, 1, 0, 0], [2, 8, 0, 3, 1, 0, 0], [3, 7, 1, 5, 1, 0, 0]]
    assert shift.tolist() == pytest.approx(x.mean(0).tolist())
    spread = x.std(0, unbiased=False)
    assert scale.tolist() == pytest.approx(torch.where(spread > 0, 1 / spread, 1.0).tolist())


@pytest.mark.slow
@given(st.integers(0, 999), st.sampled_from(["unit", "standard"]))
def test_what_is_normal_by_statistics_alone_is_what_the_features_say(seed, normalize):
    draw = np.random.default_rng(seed)
    whole = of(known(draw, 40), normalize, COLUMNS)
    train = np.sort(draw.choice(40, 25, replace=False))
    x, _, shift, scale = whole.fitted(whole.statistics([train[:9], train[9:]]))
    expected = shift_and_scale(x[train].double(), normalize)
    torch.testing.assert_close(shift.double(), expected[0].double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scale.double(), expected[1].double(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@given(st.integers(0, 999), st.sampled_from([torch.uint8, torch.float32, torch.float64]))
def test_images_by_channel(seed, dtype):
    images = torch.from_numpy(np.random.default_rng(seed).integers(0, 255, (12, 4, 5, 3))).to(dtype)
    whole = of(images)
    _, _, shift, scale = whole.fitted(whole.statistics([np.arange(5), np.arange(5, 12)]))
    for found, expected in zip((shift, scale), shift_and_scale(images, "standard"), strict=True):
        torch.testing.assert_close(found.float(), expected.float())


def test_a_large_mean_does_not_swallow_a_small_deviation():
    values = np.array([[1.7e9 + k] for k in (0.0, 1, 2, 3)])
    found = of(values).statistics([np.array([0, 1]), np.array([2]), np.array([3])])
    assert found.squares.tolist() == [5.0]


@pytest.mark.slow
@given(st.lists(st.integers(0, 300), min_size=1, max_size=30), st.sampled_from([0.5, 1, 10, 64]))
def test_a_median_of_steps_is_within_half_a_step(values, step):
    column = Column(impute="median", step=step)
    whole = of(np.array(values, dtype=float)[:, None], columns={"a": column})
    found = whole.statistics([np.array([n]) for n in range(len(values))])
    exact = np.percentile(values, 50, method="inverted_cdf")
    assert abs(found.imputed("a", column, 0) - exact) <= step / 2
    assert all(value % step == 0 for value in found.counts["a"][:, 0].tolist())


def test_statistics_travel():
    found = of(known(np.random.default_rng(0), 9), "unit", COLUMNS).statistics([np.arange(9)])
    again = records.decode(records.encode(found))
    close(again, found)
    found.refuse_unlike(again)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"mean": torch.zeros(3, dtype=torch.float64)}, "shape .3., but must have shape .4."),
        ({"count": torch.zeros(4, dtype=torch.int64)}, "statistics have shape"),
        ({"mean": torch.full((4,), math.nan, dtype=torch.float64)}, "contain NaN or infinity"),
        ({"count": torch.full((4,), -1.0, dtype=torch.float64)}, "is negative"),
        ({"samples": -1}, "is negative"),
        ({"samples": 2**62}, f"statistics cover {2**62} samples, but the limit"),
        ({"counts": {}}, "counts for the columns"),
        ({"squares": torch.full((4,), -1.0, dtype=torch.float64)}, "is negative"),
        ({"count": torch.full((4,), 10.0, dtype=torch.float64)}, "10 values, but there are 9 samples"),
        ({"low": torch.full((4,), math.nan, dtype=torch.float64)}, "the minimum of a column"),
        ({"low": torch.full((4,), -math.inf, dtype=torch.float64)}, "the minimum of a column"),
        ({"high": torch.full((4,), -1e9, dtype=torch.float64)}, "the minimum of a column"),
        (
            {"counts": dict.fromkeys(["median", "frequent", "kind"], torch.ones(3, 2, dtype=torch.complex64))},
            "counts for the columns",
        ),
        (
            {"counts": dict.fromkeys(["median", "frequent", "kind"], torch.full((3, 2), 9.0, dtype=torch.float64))},
            "add up to more than the",
        ),
        ({"counts": dict.fromkeys(["median", "frequent", "kind"], torch.zeros(3))}, "counts for the columns"),
        (
            {"counts": dict.fromkeys(["median", "frequent", "kind"], torch.zeros(0, 2, dtype=torch.float64))},
            "column 'median': .* values were reported, but the counts of the values add up to 0",
        ),
    ],
)
def test_statistics_of_something_else_are_refused(change, problem):
    rows = of(known(np.random.default_rng(0), 9), "unit" if {"low", "high"} & change.keys() else "standard", COLUMNS)
    found = rows.statistics([np.arange(9)])
    rows.refuse_unlike(found)
    with pytest.raises(DataError, match=problem):
        rows.refuse_unlike(type(found)(**{**vars(found), **change}))


def test_a_column_of_few_values_at_a_client_is_left_out_of_its_sums():
    """Two clients: the second has one value of ``ca``, which its mean would tell."""
    nan, columns = math.nan, {"age": {}, "ca": {"impute": "mean"}}
    rows = [[10.0, 2.0], [20.0, 4.0], [30.0, nan], [40.0, 9.0], [50.0, nan]]
    whole, groups = of(rows, columns=columns), [np.array([0, 1]), np.array([2, 3, 4])]
    found = whole.statistics(groups, least=2)
    assert (found.samples, found.count.tolist(), found.mean.tolist()) == (5, [5.0, 2.0], [30.0, 3.0])
    assert found.squares.tolist() == [1000.0, 2.0]
    alone = whole.statistics(groups[1:], least=2)
    assert (alone.count.tolist(), alone.mean.tolist(), alone.squares.tolist()) == (
        [3.0, 0.0],
        [40.0, 0.0],
        [200.0, 0.0],
    )
    x, _, shift, scale = whole.fitted(found)
    # It takes the mean 3 and the deviation √(2/5) of what the others told, and its own value is a value all the same.
    assert x[:, 1].tolist() == [2.0, 4.0, 3.0, 9.0, 3.0]
    assert shift.tolist() == [30.0, 3.0]
    assert scale.tolist() == pytest.approx([1 / math.sqrt(200), 1 / math.sqrt(2 / 5)])
    assert whole.statistics(groups).count.tolist() == [5.0, 3.0], "nothing is left out unless it is asked for"


def test_what_is_left_out_says_neither_ends_nor_counts():
    columns = {"age": {}, "step": {"impute": "median", "step": 1}, "kind": {**COLUMNS["kind"]}}
    rows = [[1.0, 7.0, 2.0], [2.0, math.nan, math.nan], [3.0, math.nan, math.nan]]
    found = of(rows, "unit", columns).statistics([np.arange(3)], least=2)
    assert found.low.tolist() == [1.0, math.inf, math.inf]
    assert found.high.tolist() == [3.0, -math.inf, -math.inf]
    assert [len(table) for table in found.counts.values()] == [0, 0]
    of(rows, "unit", columns).refuse_unlike(found)


def test_a_column_without_gaps_is_as_it_was():
    """A client of so few samples that nothing of it may be told takes no part; a simulation counts it all the same."""
    whole = of([[1.0], [2.0], [3.0]], columns={"age": {}})
    close(whole.statistics([np.arange(3)], least=5), whole.statistics([np.arange(3)]))
