from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedstrata.papers import pages
from fedstrata.papers.judging import claims
from fedstrata.papers.pages import first_page, overview, page, speeds
from fedstrata.papers.readings import readings
from fedstrata.papers.running import known
from fedstrata.papers.tables import PAPERS, read, tables

TEXT = """
title = "Two methods"
source = "Table 9"
metric = "final"
seeds = [0, 1, 2]
baseline = "a"

[spec.training]
rounds = 360

[columns.x]

[rows.a]
method = { name = "fedavg" }

[rows.b]
method = { name = "fedprox" }

[rows.c]
method = { name = "scaffold" }

[published.b]
x = 71.25

[seconds]
c = 5
"""


@pytest.fixture
def table(monkeypatch):
    table = read("rebafl", "mine", TEXT)
    monkeypatch.setattr(pages, "tables", lambda: {"rebafl/mine": table})
    return table


def results(table) -> dict[str, dict]:
    values = {"a": [70.0, 80.0, 75.0], "b": [80.0, 90.2, 84.9]}
    return {
        cell.hash: {"final": values[cell.row][cell.seed], "seconds": 720.0, "rounds": 360}
        for cell in table.cells()
        if cell.row in values
    }


def test_a_table_has_the_papers_figure_ours_the_difference_and_what_may_be_said(table):
    text = page("rebafl", results(table))
    rows = {line.split(" | ")[1]: line for line in text.splitlines() if line.startswith("| x |")}
    assert rows["a"] == "| x | a |  | 75.00 [62.6, 87.4] | 3 |  |  |  |"
    # Differences of 10, 10.2 and 9.9: t with 2 degrees of freedom at 1 − 0.05 / 4 is 6.205.
    assert rows["b"] == "| x | b | 71.25 | 85.03 [72.4, 97.7] | 3 | +10.0 [+9.5, +10.6] | < 0.001 | above a |"
    assert rows["c"] == "| x | c |  |  |  |  |  | not run: `fedstrata reproduce rebafl/mine`, 1.5 h |"
    assert "Where this differs from the paper" in text


def test_a_page_says_what_an_earlier_version_made_and_how_near_this_one_comes(table):
    there = results(table)
    first, second, *_ = there.values()
    assert "taken over" not in page("rebafl", there)
    for old in (first, second):
        old["source"] = "old.json"
    taken = "2 cells are taken over from `old.json`, made with the same spec by an earlier version"
    assert f"{taken}." in page("rebafl", there)
    first["repeated"] = {"rounds": 10, "points": 0.25}
    assert f"{taken}; the first 10 rounds of 1 of them were repeated, and are at most 0.25" in page("rebafl", there)
    second["repeated"] = {"rounds": 12, "points": 0.5}
    assert f"{taken}; the first 10 rounds of each were repeated, and are at most 0.5" in page("rebafl", there)


def test_hours_are_those_of_the_rows_that_are_done(table):
    assert speeds(table, results(table)) == {("a", "x"): 2.0, ("b", "x"): 2.0, ("c", "x"): 5.0}
    assert speeds(table, {}) == {("c", "x"): 5.0}
    assert overview([table], results(table)).splitlines()[-1] == "| `rebafl/mine` | 9 | 6 | 1.5 h |"
    assert overview([table], {}).splitlines()[-1] == "| `rebafl/mine` | 9 | 0 | 1.5 h and more |"


def test_a_setting_that_nobody_timed_takes_as_long_as_its_epochs_and_clients(monkeypatch):
    text = TEXT.replace(
        "[columns.x]", "clients_per_round = 10\n\n[columns.x]\n[columns.y]\ntraining = { local_epochs = 5 }"
    )
    table = read("rebafl", "mine", text)
    there = {
        cell.hash: {"seconds": 720.0, "rounds": 360} for cell in table.cells() if (cell.row, cell.column) == ("a", "x")
    }
    found = speeds(table, there)
    assert (found["a", "x"], found["a", "y"], found["b", "y"], found["c", "y"]) == pytest.approx((2.0, 10.0, 10.0, 5.0))


def test_the_first_page_has_every_claim_in_one_line():
    text = first_page({})
    for claim in claims():
        assert len([line for line in text.splitlines() if f"| {claim.says} |" in line]) == 1
    for name in tables():
        assert f"`{name}`" in text
    assert "not yet" in text


def test_the_pages_of_the_documentation_are_those_of_the_results_beside_them():
    docs = Path(__file__).parents[2] / "docs" / "results"
    found = known(docs)
    wanted = {"claims.md": first_page(found), "readings.md": pages.page_of_readings()}
    wanted |= {f"{paper}.md": page(paper, found) for paper in PAPERS}
    for name, text in wanted.items():
        assert (docs / name).read_text(encoding="utf-8") == text, "fedstrata reproduce --show --out docs/results"


def test_no_page_states_an_order_of_fewer_than_three_seeds():
    docs = Path(__file__).parents[2] / "docs" / "results"
    for paper in PAPERS:
        for line in page(paper, known(docs)).splitlines():
            if re.search(r"\| (above|below) [^|]+\|$", line):
                assert re.search(r"\| ([3-9]|\d\d) \|", line), line


def test_every_reading_is_on_its_page():
    text = pages.page_of_readings()
    assert all(each.figure in text for each in readings().values())
