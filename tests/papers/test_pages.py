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

[published.a]
x = 76.0

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
    assert rows["a"] == "| x | a | 76.00 |  | 75.00 [62.6, 87.4] | 3 |  |  |  |"
    # Differences of 10, 10.2 and 9.9: t with 2 degrees of freedom at 1 − 0.05 / 4 is 6.205.
    assert rows["b"] == "| x | b | 71.25 | −4.8 | 85.03 [72.4, 97.7] | 3 | +10.0 [+9.5, +10.6] | < 0.001 | above a |"
    assert rows["c"] == "| x | c |  |  |  |  |  |  | not run: `fedstrata reproduce rebafl/mine`, 1.5 h |"
    assert "Where this differs from the paper" in text
    # 6.205 / √3.
    assert "With 3 seeds and 2 comparisons, a difference must be 3.6 times as large as its deviation" in text
    assert "The paper's figure lies outside our interval: b with x." in text
    for claim in claims():
        if claim.paper == "rebafl":
            assert text.count(f"| {claim.statement} |") == 1


def test_what_is_compared_beside_the_baseline_has_rows_of_its_own(monkeypatch):
    table = read("rebafl", "mine", TEXT.replace('baseline = "a"', 'baseline = "a"\nagainst = [["b", "c"], ["c", "b"]]'))
    monkeypatch.setattr(pages, "tables", lambda: {"rebafl/mine": table})
    there = results(table)
    first = there[next(cell.hash for cell in table.cells() if cell.row == "b")]
    for cell in table.cells():
        if (cell.row, cell.seed) == ("c", 0):
            there[cell.hash] = {**first, "final": 79.0}
    text = page("rebafl", there)
    assert "| x | b − c | +1.0 (1 seed) |  | too few seeds |" in text
    assert "| x | c − b | −1.0 (1 seed) |  | too few seeds |" in text


def test_an_interval_of_accuracies_ends_at_what_is_possible(table):
    there = results(table)
    for cell in table.cells():
        if cell.row == "a":
            there[cell.hash]["final"] = [10.0, 50.0, 99.0][cell.seed]
    assert "| 53.00 [0.0, 100.0] | 3 |" in page("rebafl", there)


def test_a_page_says_what_an_earlier_version_made_and_how_near_this_one_comes(table):
    there = results(table)
    first, second, *_ = there.values()
    assert "earlier version" not in page("rebafl", there)
    for old in (first, second):
        old["source"] = "old.json"
    taken = "† 2 cells were made by an earlier version with the same spec (`old.json`)"
    assert f"{taken}, and not repeated." in page("rebafl", there)
    assert page("rebafl", there).count(" | 3† | ") == 2, "one of a and one of b"
    first["repeated"] = {"rounds": 10, "points": 0.25}
    assert f"{taken}; the first 10 rounds of 1 of them were repeated, and are at most 0.25" in page("rebafl", there)
    second["repeated"] = {"rounds": 12, "points": 0.5}
    text = page("rebafl", there)
    assert f"{taken}; the first 10 rounds of each were repeated, and are at most 0.5" in text
    assert "more than one point off are left out" in text


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
        assert len([line for line in text.splitlines() if f"| {claim.statement} |" in line]) == 1
    for name in tables():
        assert f"`{name}`" in text
    assert "not yet" in text


@pytest.mark.slow
def test_the_pages_of_the_documentation_are_those_of_the_results_beside_them():
    docs = Path(__file__).parents[2] / "docs" / "results"
    found = known(docs)
    wanted = {"claims.md": first_page(found), "readings.md": pages.page_of_readings()}
    wanted |= {f"{paper}.md": page(paper, found) for paper in PAPERS}
    for name, text in wanted.items():
        assert (docs / name).read_text(encoding="utf-8") == text, "fedstrata reproduce --show --out docs/results"


@pytest.mark.slow
def test_no_page_states_an_order_of_fewer_than_three_seeds():
    found, orders = known(Path(__file__).parents[2] / "docs" / "results"), 0
    for paper in PAPERS:
        for section in page(paper, found).split("\n## "):
            for line in section.splitlines():
                if re.search(r"\| (above|below) [^|]+\|$", line):
                    table = tables()[re.search("`fedstrata reproduce ([^` ]+)`", section)[1]]
                    column, row, than = re.match(r"\| ([^|]+) \| ([^|]+?)(?: − ([^|]+))? \|", line).groups()
                    there = [cell for cell in table.cells() if cell.column == column and cell.hash in found]
                    both = [{cell.seed for cell in there if cell.row == each} for each in (row, than or table.baseline)]
                    assert len(set.intersection(*both)) >= 3, line
                    orders += 1
    assert orders > 0


def test_every_reading_is_on_its_page():
    text = pages.page_of_readings()
    assert all(each.figure in text for each in readings().values())
