"""What may be said of results: intervals and corrections by hand, and no order from too little."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from fedstrata.papers import judging
from fedstrata.papers.judging import Claim, cells_of, compared, difference_text, judged
from fedstrata.papers.tables import read
from fedstrata.reporting.statistics import paired_difference

TEXT = """
title = "Three methods"
source = "Table 9"
metric = "final"
seeds = [0, 1, 2]
baseline = "a"
against = [["c", "b"]]

[spec.training]
rounds = 2

[columns.x]
training = { lr = 0.5 }

[columns.y]
training = { lr = 0.1 }

[rows.a]
method = { name = "fedavg" }

[rows.b]
method = { name = "fedprox" }

[rows.c]
method = { name = "scaffold" }
"""


@pytest.fixture
def table(monkeypatch):
    table = read("rebafl", "mine", TEXT)
    monkeypatch.setattr(judging, "tables", lambda: {"rebafl/mine": table})
    return table


def results(table, figures: dict[tuple[str, str], list[float]]) -> dict[str, dict]:
    """Finals of the first seeds, and a curve that ends there."""
    found = {}
    for cell in table.cells():
        values = figures.get((cell.row, cell.column), [])
        if cell.seed < len(values):
            final = values[cell.seed]
            found[cell.hash] = {"final": final, "curve": [final / 2, final], "bytes_up": 100.0}
    return found


def test_differences_are_paired_and_corrected_over_all_that_the_table_compares(table):
    figures = {("a", "x"): [70.0, 80.0, 75.0], ("b", "x"): [71.0, 81.5, 76.0], ("c", "x"): [60.0, 90.0, 75.0]}
    found = {
        (each.column, each.row, each.than): each.difference
        for each in compared(table, cells_of(table, results(table, figures)))
    }
    assert len(found) == 6  # b and c beside a, and c beside b, in both columns: run or not
    each = found["x", "b", "a"]
    # Differences of 1, 1.5 and 1: mean 7/6, sd 0.2887; t with 2 degrees of freedom at 1 − 0.05 / 12.
    reach = stats.t.ppf(1 - 0.05 / 12, 2) * math.sqrt(1 / 12) / math.sqrt(3)
    assert each.mean == pytest.approx(7 / 6)
    assert each.interval == pytest.approx((7 / 6 - reach, 7 / 6 + reach))
    # Holm: the smallest of six p-values, of which three are those of cells that are not run.
    assert each.corrected == pytest.approx(6 * stats.ttest_1samp([1.0, 1.5, 1.0], 0.0).pvalue)
    assert (each.order(), found["x", "c", "b"].order(), found["y", "b", "a"].order()) == (
        "no order shown",
        "no order shown",
        "not run",
    )
    assert difference_text(found["y", "b", "a"]) == "not run"


def test_an_order_is_stated_from_three_seeds_on_and_where_the_interval_leaves_out_zero(table):
    base = [70.0, 80.0, 75.0]
    above = [value + step for value, step in zip(base, [10.0, 10.2, 9.9], strict=True)]
    for seeds, order in ((0, "not run"), (1, "too few seeds"), (2, "too few seeds"), (3, "above")):
        there = results(table, {("a", "x"): base[:seeds], ("b", "x"): above[:seeds]})
        assert compared(table, cells_of(table, there))[0].difference.order() == order
    there = results(table, {("b", "x"): base, ("a", "x"): above})
    assert compared(table, cells_of(table, there))[0].difference.order() == "below"


def test_an_interval_of_too_few_seeds_is_not_shown(table):
    there = results(table, {("a", "x"): [70.0, 80.0], ("b", "x"): [71.0, 90.0]})
    assert difference_text(compared(table, cells_of(table, there))[0].difference) == "+5.5 (2 seeds)"
    assert paired_difference({0: 1.0}, {0: 2.0}, resolution=0.01).interval is None


def test_a_p_of_two_seeds_does_not_help_the_others_of_the_table(table):
    """It is not stated, and the third seed may raise it."""
    three = {("a", "x"): [70.0, 80.0, 75.0], ("b", "x"): [71.0, 81.5, 76.0]}
    two = {("a", "y"): [70.0, 80.0], ("b", "y"): [80.0, 90.001]}
    alone = compared(table, cells_of(table, results(table, three)))[0].difference.corrected
    assert compared(table, cells_of(table, results(table, three | two)))[0].difference.corrected == alone


def test_differences_that_are_equal_by_rounding_state_no_order(table):
    for step, order in ((0.01, "no order shown"), (1.0, "above")):
        above = [value + step for value in BASE]
        there = results(table, {("a", "x"): BASE, ("b", "x"): above})
        assert compared(table, cells_of(table, there))[0].difference.order() == order
    # Two rounded numbers have a variance of 1/12 each.
    reach = stats.t.ppf(0.975, 2) * math.sqrt(1 / 6) / math.sqrt(3)
    same = {0: 1.0, 1: 1.0, 2: 1.0}
    found = paired_difference(same, dict.fromkeys(same, 4.0), resolution=1.0)
    assert found.interval == pytest.approx((-3 - reach, -3 + reach))


BASE = [70.0, 80.0, 75.0]
UP = [80.0, 90.2, 84.9]
FAR = [70.0, 99.0, 60.0]
DOWN = [60.0, 69.8, 65.1]


@pytest.mark.parametrize(
    ("x", "y", "verdict"),
    [
        (UP, UP, "holds"),
        (UP, FAR, "in part"),
        (FAR, FAR, "not shown"),
        (DOWN, FAR, "not"),
        (UP, UP[:2], "not yet"),
        (FAR, [], "not yet"),
        ([], [], "not yet"),
    ],
)
def test_a_row_above_another(table, x, y, verdict):
    claim = Claim("rebafl", "", "", "above", {"table": "mine", "row": "b", "than": "a"})
    found = judged(claim, results(table, {("a", "x"): BASE, ("a", "y"): BASE, ("b", "x"): x, ("b", "y"): y}))
    assert found.verdict == verdict
    assert found.command == "fedstrata reproduce rebafl/mine"


def test_the_same_comparison_from_the_other_side(table):
    there = results(table, {("a", "x"): UP, ("a", "y"): UP, ("b", "x"): BASE, ("b", "y"): BASE})
    claim = Claim("rebafl", "", "", "above", {"table": "mine", "row": "a", "than": ["b"]})
    found = judged(claim, there)
    assert (found.verdict, found.evidence) == ("holds", "a − b: x: +10.0 [+9.1, +11.0]; y: +10.0 [+9.1, +11.0]")


def test_a_comparison_that_the_table_does_not_make_is_an_error(monkeypatch):
    without = read("rebafl", "mine", TEXT.replace('against = [["c", "b"]]\n', ""))
    monkeypatch.setattr(judging, "tables", lambda: {"rebafl/mine": without})
    with pytest.raises(Exception, match="mine does not compare them all"):
        judged(Claim("rebafl", "c before b", "", "above", {"table": "mine", "row": "c", "than": "b"}), {})


@pytest.mark.parametrize(
    ("x", "verdict"),
    [([69.9, 79.8, 74.9], "holds"), ([65.0, 75.2, 69.9], "not"), ([69.9, 79.8], "not yet")],
)
def test_a_row_in_one_column_no_worse_than_in_another(table, x, verdict):
    about = {"table": "mine", "row": "b", "reference": "y", "within": 1.0}
    found = judged(Claim("rebafl", "", "", "near", about), results(table, {("b", "x"): x, ("b", "y"): BASE}))
    assert found.verdict == verdict
    assert "as good: at most 1 below" in found.evidence


def test_a_row_no_more_than_some_points_below_another(table):
    about = {"table": "mine", "row": "b", "than": "a", "within": 2.0}
    near = [69.9, 79.9, 74.95]
    figures = {("a", "x"): BASE, ("a", "y"): BASE, ("b", "x"): near, ("b", "y"): near}
    assert judged(Claim("rebafl", "", "", "margin", about), results(table, figures)).verdict == "holds"
    figures["b", "y"] = FAR
    assert judged(Claim("rebafl", "", "", "margin", about), results(table, figures)).verdict == "in part"


def test_rounds_to_the_best_of_another(table):
    there = results(table, {("a", "x"): BASE, ("a", "y"): BASE, ("b", "x"): BASE, ("b", "y"): BASE})
    for cell in table.cells():
        if cell.row == "b":
            there[cell.hash]["curve"] = [99.0, 10.0]  # at once what takes the other both rounds
    claim = Claim("rebafl", "", "", "sooner", {"table": "mine", "row": "b", "than": "a"})
    found = judged(claim, there)
    # All differences are −1, which rounds cannot tell from 0: t with 2 degrees of freedom at 1 − 0.05 / 4 is 6.205.
    assert found.verdict == "not shown"
    assert "x: −1.0 [−2.5, +0.5]" in found.evidence
    for cell in table.cells():
        if cell.row == "a":
            there[cell.hash]["curve"] = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert judged(claim, there).verdict == "holds"
    both = Claim("rebafl", "", "", "sooner", {"table": "mine", "row": "b", "than": ["a", "c"]})
    assert judged(both, there).verdict == "not yet"
    other = Claim("rebafl", "", "", "sooner", {"table": "mine", "row": "a", "than": "b"})
    assert judged(other, there).verdict == "not"


def test_a_curve_that_deviates_less_over_its_last_rounds(table):
    there = results(table, {(row, column): BASE for row in "abc" for column in "xy"})
    for cell in table.cells():
        wide = 10.0 if cell.row == "a" else 1.0
        there[cell.hash]["curve"] = [0.0, 50.0, 50.0 + wide, 50.0 - wide]  # a deviation of `wide` over the last three
    about = {"table": "mine", "row": "b", "than": "a", "rounds": 3}
    found = judged(Claim("rebafl", "", "", "steadier", about), there)
    # Differences of −9 of each seed: t with 2 degrees of freedom at 1 − 0.05 / 4 is 6.205, times 0.01 / √6 / √3.
    assert found.verdict == "holds"
    text = "deviation over the last 3 rounds, b − a: x: −9.0 [−9.0, −9.0]; y: −9.0 [−9.0, −9.0]"
    assert found.evidence == text
    assert judged(Claim("rebafl", "", "", "steadier", {**about, "than": ["a", "c"]}), there).verdict == "in part"
    assert judged(Claim("rebafl", "", "", "steadier", {**about, "row": "a", "than": "b"}), there).verdict == "not"
    assert judged(Claim("rebafl", "", "", "steadier", about), {}).verdict == "not yet"


def test_a_ratio_that_no_chance_decides(table):
    about = {"table": "mine", "row": "b", "than": "a", "metric": "bytes_up", "most": 1.0}
    claim = Claim("rebafl", "", "", "ratio", about)
    assert judged(claim, {}).verdict == "not yet"
    there = results(table, {("a", "x"): [1.0], ("b", "x"): [1.0]})
    assert judged(claim, there).verdict == "not yet"  # of the other column nothing is known
    there = results(table, {(row, column): [1.0] for row in "ab" for column in "xy"})
    assert judged(claim, there).verdict == "holds"
    assert judged(Claim("rebafl", "", "", "ratio", {**about, "most": 0.9}), there).verdict == "not"
    about["least"] = about.pop("most") + 1
    assert judged(claim, there).verdict == "not"


def ideal(claim: Claim) -> dict[str, dict]:
    """What a claim's table would hold if the claim were as true as can be, the same for all seeds."""
    table = judging.tables()[f"{claim.paper}/{claim.about['table']}"]
    found = {}
    for cell in table.cells():
        rounds, best = cell.spec["training"]["rounds"], cell.row == claim.about["row"]
        # At the best accuracy from the first round on; or there in the last one, up and down before.
        curve = [90.0] * rounds if best else [float(10 + 10 * (i % 2)) for i in range(rounds - 1)] + [30.0]
        figures = dict.fromkeys(("final", "last10", "best", "mean"), curve[-1])
        many = 1000.0 if best and "least" in claim.about else 1.0
        found[cell.hash] = {**figures, "curve": curve, "bytes_up": many, "bytes_down": many}
    return found


@pytest.mark.parametrize(
    "claim", [each for each in judging.claims() if "table" in each.about], ids=lambda claim: claim.statement[:60]
)
def test_every_claim_can_hold(claim):
    """With so few seeds, rounds or cells that nothing could show it, it would stand there for ever as not shown."""
    assert judged(claim, ideal(claim)).verdict == "holds"


def test_rounds_are_pooled_over_settings_where_runs_have_few(table):
    there = results(table, {("a", "x"): BASE, ("a", "y"): BASE, ("b", "x"): BASE, ("b", "y"): BASE})
    for cell in table.cells():
        if cell.row == "b":  # by two rounds sooner in x, at the same time in y
            there[cell.hash]["curve"] = [99.0, 0.0, 0.0] if cell.column == "x" else [0.0, 0.0, 99.0]
        elif cell.row == "a":
            there[cell.hash]["curve"] = [1.0, 2.0, 3.0]
    about = {"table": "mine", "row": "b", "than": "a", "pooled": True}
    found = judged(Claim("rebafl", "", "", "sooner", about), there)
    # All seeds have −1, one comparison: t with 2 degrees of freedom at 0.975 is 4.303, times 1 / √6 / √3.
    assert found.evidence == "rounds to the best accuracy of a, b − a: −1.0 [−2.0, 0.0]; mean over x, y"
    one = judged(Claim("rebafl", "", "", "sooner", {**about, "columns": ["x"]}), there)
    assert (one.verdict, one.evidence.partition(": ")[2]) == ("holds", "−2.0 [−3.0, −1.0]; mean over x")
    without = {key: value for key, value in there.items() if value["curve"] != [0.0, 0.0, 99.0]}
    assert judged(Claim("rebafl", "", "", "sooner", about), without).verdict == "not yet"


def test_an_interval_is_cut_at_what_is_possible(table):
    there = results(table, {("a", "x"): [0.0, 100.0, 50.0], ("b", "x"): [100.0, 0.0, 50.0]})
    assert compared(table, cells_of(table, there))[0].difference.interval == (-100.0, 100.0)


@pytest.mark.slow
def test_nothing_is_stated_before_anything_is_run():
    for claim in judging.claims():
        verdict = judged(claim, {}).verdict
        if claim.kind not in ("reading", "page", "untestable"):
            assert verdict == "not yet", claim.statement
