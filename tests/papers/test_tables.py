from __future__ import annotations

from pathlib import Path

import pytest

from fedstrata.base.errors import SpecError
from fedstrata.papers import tables as module
from fedstrata.papers.judging import claims
from fedstrata.papers.tables import METRICS, PAPERS, chosen, experiment_of, read, tables

TEXT = """
title = "Two methods"
source = "Table 9"
metric = "final"
seeds = [3, 4]
baseline = "a"

[spec.training]
rounds = 2
workers = 1

[columns.x]
training = { lr = 0.5 }

[columns.y]
partition = { name = "iid", clients = 5 }

[rows.a]
method = { name = "fedavg" }

[rows.b]
method = { name = "fedprox", mu = 0.5 }

[only]
y = ["a"]

[quick]
training = { rounds = 1 }
"""


@pytest.fixture
def table():
    return read("rebafl", "mine", TEXT)


def test_a_cell_is_the_spec_with_its_column_and_its_row_on_top(table):
    cells = {cell.key: cell for cell in table.cells()}
    assert list(cells) == ["a/x/seed-3", "b/x/seed-3", "a/x/seed-4", "b/x/seed-4", "a/y/seed-3", "a/y/seed-4"]
    assert cells["b/x/seed-4"].spec == {
        "seed": 4,
        "training": {"rounds": 2, "workers": 1, "lr": 0.5},
        "method": {"name": "fedprox", "mu": 0.5},
    }
    assert [cell.spec["training"]["rounds"] for cell in table.cells(quick=True)] == [1, 1, 1]
    assert table.comparisons() == [("x", "b", "a")]


def test_two_tables_share_a_cell_of_one_spec_whatever_it_is_called(table):
    other = read("rebafl", "other", TEXT.replace("rows.a", "rows.plain").replace('"a"', '"plain"'))
    assert next(other.cells()).hash == next(table.cells()).hash
    spread = read("rebafl", "mine", TEXT.replace("workers = 1", "workers = 2"))
    assert next(spread.cells()).hash == next(table.cells()).hash
    longer = read("rebafl", "mine", TEXT.replace("rounds = 2", "rounds = 3"))
    assert next(longer.cells()).hash != next(table.cells()).hash


def test_results_of_another_version_are_others(table):
    moved = read("rebafl", "mine", f"version = {table.version + 1}\n{TEXT}")
    assert next(moved.cells()).hash != next(table.cells()).hash


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("metric = ", 'metrics = "best"\nmetric = '), "'metrics' is not a known key"),
        (('"final"', '"last"'), "is not a metric. Use one of: final, last10, best, mean"),
        (('baseline = "a"', 'baseline = "c"'), "is not a row. Use one of: a, b"),
        (('y = ["a"]', 'z = ["a"]'), "is not a column. Use one of: x, y"),
        (("[only]", "[published.a]\nz = 1.0\n\n[only]"), "is not a column. Use one of: x, y"),
    ],
)
def test_what_is_no_table_is_refused(change, message):
    with pytest.raises(SpecError, match=message):
        read("rebafl", "mine", TEXT.replace(*change))


@pytest.mark.slow
def test_every_cell_of_every_table_is_an_experiment():
    found = tables()
    assert {table.paper for table in found.values()} == set(PAPERS)
    hashes: dict[str, dict] = {}
    for table in found.values():
        assert table.metric in METRICS
        keys = [cell.folder for cell in table.cells()]
        assert len(set(keys)) == len(keys)  # no two cells in one folder
        for quick in (False, True):
            for cell in table.cells(quick=quick):
                if cell.hash not in hashes:  # the same spec is read once
                    assert experiment_of(cell).training.rounds >= 1
                    hashes[cell.hash] = dict(cell.spec)


def test_an_order_needs_three_seeds_and_a_table_of_fewer_says_so():
    for name, table in tables().items():
        assert len(table.seeds) >= 3 or "Because there is only one seed, no ranking is shown." in " ".join(
            table.notes.split()
        ), name


def test_tables_are_chosen_by_paper_and_by_name():
    assert set(chosen(["fedssar"])) == {name for name in tables() if name.startswith("fedssar/")}
    assert list(chosen(["rebafl/fashion20"])) == ["rebafl/fashion20"]
    assert chosen([]) == tables()
    with pytest.raises(SpecError, match="did you mean 'rebafl/fashion20'"):
        chosen(["rebafl/fashion2"])


def test_every_paper_has_its_claims_and_says_where_it_differs():
    package = Path(module.__file__).parent
    for paper in PAPERS:
        assert (package / paper / "differs.md").read_text(encoding="utf-8").startswith("## Differences from the paper")
        assert any(claim.paper == paper for claim in claims())
