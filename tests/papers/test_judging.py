"""What may be said of results: intervals and corrections by hand, and no order from too little."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fedstrata.papers import judging
from fedstrata.papers.comparing import Comparison, compared, difference_text, predicted
from fedstrata.papers.judging import Claim, judged
from fedstrata.papers.tables import read
from fedstrata.reporting.statistics import paired_difference

pytestmark = pytest.mark.xdist_group("readings")  # they take seconds to compute, once per process

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


def raised(*steps: float) -> list[float]:
    """Figures that are so much above ``BASE``, in each seed."""
    return [value + step for value, step in zip(BASE, steps, strict=True)]


def test_the_family_of_a_claim_is_its_own_comparisons(table):
    """The table compares six pairs, and this claim two of them."""
    figures = {("a", "x"): BASE, ("a", "y"): BASE, ("b", "x"): raised(1.0, 1.5, 1.0), ("b", "y"): FAR, ("c", "x"): FAR}
    claim = Claim("rebafl", "", "", "above", {"table": "mine", "row": "b", "than": "a"})
    found = judged(claim, results(table, figures))
    # Differences of 1, 1.5 and 1: mean 7/6, standard error 1/6. Student's t with 2 degrees of freedom: 4.303 at
    # 1 - 0.05 / 2, for one comparison; 6.205 at 1 - 0.05 / 4, for two.
    (comparison, decisive), _ = found.decisive
    assert comparison.alone.interval == pytest.approx((7 / 6 - 4.3027 / 6, 7 / 6 + 4.3027 / 6), abs=1e-4)
    assert comparison.together.interval == pytest.approx((7 / 6 - 6.2053 / 6, 7 / 6 + 6.2053 / 6), abs=1e-4)
    assert decisive == comparison.together
    assert found.verdict == "partly"


# Of these differences, t is 7 (mean 7/6, standard error 1/6) and 6 (mean 1.2, standard error 0.2). One comparison needs
# 4.303 at 5 %, and each of two that are corrected needs 6.205.
CLEAR, WEAK = (1.0, 1.5, 1.0), (1.0, 1.6, 1.0)


@pytest.mark.parametrize(
    ("x", "y", "verdict"),
    [
        (WEAK, WEAK, "confirmed"),  # an intersection–union test: each comparison at 5 %
        (WEAK, (0.0, 19.0, -15.0), "inconclusive"),  # a statement about one of two is corrected
        (CLEAR, (0.0, 19.0, -15.0), "partly"),
        ([-step for step in WEAK], (0.0, 19.0, -15.0), "inconclusive"),
        ([-step for step in CLEAR], (0.0, 19.0, -15.0), "contradicted"),
        ([-step for step in CLEAR], WEAK, "contradicted"),  # the support does not survive the correction
        (CLEAR, [-step for step in CLEAR], "partly"),
    ],
)
def test_a_claim_about_all_comparisons_tests_each_at_five_percent(table, x, y, verdict):
    figures = {("a", "x"): BASE, ("a", "y"): BASE, ("b", "x"): raised(*x), ("b", "y"): raised(*y)}
    claim = Claim("rebafl", "", "", "above", {"table": "mine", "row": "b", "than": "a"})
    assert judged(claim, results(table, figures)).verdict == verdict


def test_a_claim_of_one_comparison_is_not_corrected_for_the_rest_of_the_table(table):
    figures = {("a", "x"): BASE, ("b", "x"): raised(*WEAK), ("c", "x"): FAR}
    claim = Claim("rebafl", "", "", "above", {"table": "mine", "row": "b", "than": "a", "columns": ["x"]})
    found = judged(claim, results(table, figures))
    # 1.2 ± 4.303 · 0.2.
    assert (found.verdict, found.evidence) == ("confirmed", "+1.2 [+0.3, +2.1] points")


@pytest.mark.long
def test_a_claim_is_confirmed_wrongly_in_at_most_five_percent():
    """If one of its comparisons is truly zero, which is the worst case, whatever the other one is."""
    generator, wrong, trials = np.random.default_rng(0), 0, 2000
    for _ in range(trials):
        noise = generator.normal(scale=100.0, size=(2, 3))
        differences = [noise[0], noise[1] + 1e5]
        zero = dict.fromkeys(range(3), 0.0)
        found = [[compared(dict(enumerate(d)), zero, together=n, unit="rounds") for n in (1, 2)] for d in differences]
        wrong += judging._verdict([Comparison("x", "a", *each) for each in found]) == "confirmed"
    # A two-sided interval of 95 % lies above zero in 2.5 % of the trials, here with a standard error of 0.35 %.
    assert 0.015 < wrong / trials < 0.035


@pytest.mark.parametrize(
    ("published", "steps", "verdict"),
    [
        # Prediction: 1.2 ± 4.3027 · 0.34641 · √(4/3): from −0.52 to 2.92. Mean: 1.2 ± 0.86, which leaves out 0.
        ([2.9], WEAK, "confirmed"),
        ([3.0], WEAK, "contradicted"),
        # Prediction: from −34.7 to 37.3, and the mean is 1.3 ± 25.5.
        ([2.9], (-6.0, 12.0, -2.0), "inconclusive"),
        ([3.0, -0.5], WEAK, "inconclusive"),  # two readings of one number
        # 1.1667 ± 4.3027 · 0.28868 · √(4/3) = from −0.268 to 2.601; ten points more: from 9.73 to 12.60.
        ([12.5], [step + 10 for step in CLEAR], "confirmed"),
        ([12.7], [step + 10 for step in CLEAR], "contradicted"),
        ([12.5], [], "not tested"),
    ],
)
def test_a_published_margin_lies_in_the_prediction_interval(table, published, steps, verdict):
    figures = {("a", "x"): BASE, ("b", "x"): raised(*steps) if steps else []}
    about = {"table": "mine", "row": "b", "than": "a", "columns": ["x"], "published": published}
    found = judged(Claim("rebafl", "", "", "margin", about), results(table, figures))
    assert found.verdict == verdict


@pytest.mark.slow
def test_a_prediction_interval_misses_one_number_in_twenty():
    generator, trials = np.random.default_rng(0), 4000
    numbers = generator.normal(size=(trials, 6))
    missed = 0
    for *five, one_more in numbers:
        low, high = predicted(float(np.mean(five)), float(np.std(five, ddof=1)), 5)
        missed += not low <= one_more <= high
    assert 0.04 < missed / trials < 0.06  # a standard error of 0.0034


@pytest.mark.parametrize(("more", "verdict"), [(CLEAR, "confirmed"), ((0.0, 19.0, -15.0), "inconclusive")])
def test_a_row_that_gains_more_in_one_column_than_in_another(table, more, verdict):
    """The row gains 5 points in y, and ``more`` besides in x."""
    figures = {("a", "x"): BASE, ("a", "y"): FAR, ("b", "y"): [value + 5 for value in FAR]}
    figures["b", "x"] = raised(*(5 + step for step in more))
    about = {"table": "mine", "row": "b", "than": "a"}
    claim = Claim("rebafl", "", "", "gains", {**about, "columns": ["x", "y"]})
    found = judged(claim, results(table, figures))
    assert found.verdict == verdict
    assert found.measure == "The gain of `b` over `a` changes by"
    opposite = judged(Claim("rebafl", "", "", "gains", {**about, "columns": ["y", "x"]}), results(table, figures))
    assert opposite.verdict == ("contradicted" if verdict == "confirmed" else "inconclusive")


@pytest.mark.parametrize(("wanted", "verdict"), [("below", "confirmed"), ("above", "contradicted")])
def test_a_number_that_changes_by_some_percent(table, wanted, verdict):
    """The losses of b are 10, 11 and 9 % below those of a; their first round does not count."""
    found = results(table, {("a", "x"): BASE, ("b", "x"): BASE})
    for cell in table.cells():
        if cell.hash in found:
            factor = (0.90, 0.89, 0.91)[cell.seed] if cell.row == "b" else 1.0
            found[cell.hash]["train_loss"] = [99.0] + [factor * (2.0 + cell.seed)] * 10
    about = {"table": "mine", "row": "b", "than": "a", "columns": ["x"], "metric": "train_loss", "wanted": wanted}
    judgement = judged(Claim("rebafl", "", "", "change", about), found)
    assert judgement.verdict == verdict
    # −10 ± 4.3027 · 1 / √3 = from −12.5 to −7.5.
    assert judgement.evidence == "−10.0 [−12.5, −7.5] %"


def test_a_verdict_that_depends_on_the_metric_says_so(table):
    found = results(table, {("a", "x"): BASE, ("b", "x"): raised(*CLEAR)})
    claim = Claim("rebafl", "", "", "above", {"table": "mine", "row": "b", "than": "a", "columns": ["x"]})
    for result in found.values():
        result["last10"] = result["final"]
    assert "verdict would be" not in judged(claim, found).evidence
    for cell in table.cells():
        if cell.row == "b" and cell.hash in found:
            found[cell.hash]["last10"] = BASE[cell.seed] - CLEAR[cell.seed]
    evidence = judged(claim, found).evidence
    assert evidence.endswith(
        "This verdict is based on the accuracy after the last round. Based on the mean accuracy of the last 10 "
        "rounds, the verdict would be *contradicted*: −1.2 [−1.9, −0.4] points"
    )


def test_an_order_is_stated_from_three_seeds_on_and_where_the_interval_leaves_out_zero():
    base, above = dict(enumerate(BASE)), dict(enumerate(UP))
    for seeds, order in ((0, "not run"), (1, "too few seeds"), (2, "too few seeds"), (3, "above")):
        some = {seed: above[seed] for seed in range(seeds)}
        assert compared(some, base).order() == order
    assert compared(base, above).order() == "below"


def test_an_interval_of_too_few_seeds_is_not_shown():
    assert difference_text(compared({0: 71.0, 1: 90.0}, {0: 70.0, 1: 80.0})) == "+5.5 (2 seeds)"
    assert paired_difference({0: 1.0}, {0: 2.0}, resolution=0.01).interval is None


def test_differences_that_are_equal_by_rounding_state_no_order():
    base = dict(enumerate(BASE))
    for step, order in ((0.01, "not significant"), (1.0, "above")):
        assert compared({seed: value + step for seed, value in base.items()}, base).order() == order
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
        (UP, UP, "confirmed"),
        (UP, FAR, "partly"),
        (FAR, FAR, "inconclusive"),
        (DOWN, FAR, "contradicted"),
        (UP, UP[:2], "not tested"),
        (FAR, [], "not tested"),
        ([], [], "not tested"),
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
    assert (found.verdict, found.evidence) == (
        "confirmed",
        "+10.0 [+9.7, +10.4] points with `x` and +10.0 [+9.7, +10.4] points with `y`",
    )


def test_a_row_that_the_table_does_not_have_is_an_error(table):
    for row, than in (("d", "a"), ("a", "d"), ("a", ["b", "d"])):
        with pytest.raises(Exception, match="this claim compares rows that have no results in a common column"):
            judged(Claim("rebafl", "d before b", "", "above", {"table": "mine", "row": row, "than": than}), {})


@pytest.mark.parametrize(
    ("x", "verdict"),
    [([69.9, 79.8, 74.9], "confirmed"), ([65.0, 75.2, 69.9], "contradicted"), ([69.9, 79.8], "not tested")],
)
def test_a_row_in_one_column_no_worse_than_in_another(table, x, verdict):
    about = {"table": "mine", "row": "b", "reference": "y", "within": 1.0}
    found = judged(Claim("rebafl", "", "", "near", about), results(table, {("b", "x"): x, ("b", "y"): BASE}))
    assert found.verdict == verdict
    support = "A comparison supports the claim if its whole interval is above −1 points. "
    support += "The accuracy of `b` changes by"
    assert found.measure == (support if verdict != "not tested" else "The claim is")


def test_a_mean_within_the_tolerance_is_not_enough(table):
    """The mean difference is 0, but its interval reaches below −1."""
    about = {"table": "mine", "row": "b", "reference": "y", "within": 1.0}
    found = judged(
        Claim("rebafl", "", "", "near", about), results(table, {("b", "x"): raised(-3, 0, 3), ("b", "y"): BASE})
    )
    assert (found.verdict, found.evidence) == ("inconclusive", "0.0 [−7.5, +7.5] points from `y` to `x`")
    assert "if its whole interval is above −1 points" in found.measure


def test_one_missing_comparison_is_in_the_singular(table):
    figures = {("a", "x"): BASE, ("a", "y"): BASE, ("b", "x"): UP}
    found = judged(
        Claim("rebafl", "", "", "above", {"table": "mine", "row": "b", "than": "a"}), results(table, figures)
    )
    assert found.evidence.endswith(". Of 2 comparisons, 1 is not tested yet")


def test_a_row_no_more_than_some_points_below_another(table):
    about = {"table": "mine", "row": "b", "than": "a", "within": 2.0}
    near = [69.9, 79.9, 74.95]
    figures = {("a", "x"): BASE, ("a", "y"): BASE, ("b", "x"): near, ("b", "y"): near}
    assert judged(Claim("rebafl", "", "", "above", about), results(table, figures)).verdict == "confirmed"
    figures["b", "y"] = FAR
    assert judged(Claim("rebafl", "", "", "above", about), results(table, figures)).verdict == "partly"


def sooner(table, curves: dict[str, list[list[float]]]) -> judging.Judgement:
    """The judgement that row b needs fewer rounds than row a in column x, from the curve of each seed."""
    there = results(table, {(row, "x"): BASE for row in "ab"})
    for cell in table.cells():
        if cell.hash in there:
            there[cell.hash]["curve"] = curves[cell.row][cell.seed]
    return judged(
        Claim("rebafl", "", "", "sooner", {"table": "mine", "row": "b", "than": "a", "columns": ["x"]}), there
    )


def test_rounds_are_counted_to_an_accuracy_that_both_runs_reach(table):
    """A run that never reaches the other's best has no number of rounds, and its length says nothing of its speed."""
    found = sooner(table, {"a": [[10.0, 50.0, 60.0]] * 3, "b": [[50.0, 40.0, 30.0]] * 3})
    # Both reach 50: b in round 1, and a in round 2. Student's t is 4.303, times 1 / √6 / √3.
    assert found.evidence == "−1.0 [−2.0, 0.0] rounds"
    found = sooner(table, {"a": [[50.0, 40.0, 30.0]] * 3, "b": [[10.0, 20.0, 30.0, 40.0, 55.0]] * 3})
    assert (found.verdict, found.evidence) == ("contradicted", "+4.0 [+3.0, +5.0] rounds")


@pytest.mark.slow
def test_two_equal_methods_seldom_differ_in_their_rounds(table):
    """The best of a noisy curve is high by chance, so another run would need more rounds to reach it."""
    generator, verdicts = np.random.default_rng(0), list[str]()
    rise = 80.0 * (1 - np.exp(-np.arange(1, 51) / 10))
    for _ in range(300):
        curves = rise + generator.normal(scale=2.0, size=(2, 3, 50))
        verdicts.append(sooner(table, dict(zip("ab", curves.tolist(), strict=True))).verdict)
    # Each side of an interval of 95 % is wrong in 2.5 % of the trials, with a standard error of 0.9 %.
    assert verdicts.count("contradicted") / 300 < 0.05
    assert verdicts.count("confirmed") / 300 < 0.05


def test_rounds_to_the_best_of_another(table):
    there = results(table, {("a", "x"): BASE, ("a", "y"): BASE, ("b", "x"): BASE, ("b", "y"): BASE})
    for cell in table.cells():
        if cell.row == "b":
            there[cell.hash]["curve"] = [99.0, 10.0]  # at once what takes the other both rounds
    claim = Claim("rebafl", "", "", "sooner", {"table": "mine", "row": "b", "than": "a"})
    found = judged(claim, there)
    # All differences are −1, which rounds cannot tell from 0: t with 2 degrees of freedom at 1 − 0.05 / 4 is 6.205.
    assert found.verdict == "inconclusive"
    assert "−1.0 [−2.5, +0.5] rounds with `x`" in found.evidence
    for cell in table.cells():
        if cell.row == "a":
            there[cell.hash]["curve"] = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert judged(claim, there).verdict == "confirmed"
    both = Claim("rebafl", "", "", "sooner", {"table": "mine", "row": "b", "than": ["a", "c"]})
    assert judged(both, there).verdict == "not tested"
    other = Claim("rebafl", "", "", "sooner", {"table": "mine", "row": "a", "than": "b"})
    assert judged(other, there).verdict == "contradicted"


def test_a_curve_that_deviates_less_over_its_last_rounds(table):
    there = results(table, {(row, column): BASE for row in "abc" for column in "xy"})
    for cell in table.cells():
        wide = 10.0 if cell.row == "a" else 1.0
        there[cell.hash]["curve"] = [0.0, 50.0, 50.0 + wide, 50.0 - wide]  # a deviation of `wide` over the last three
    about = {"table": "mine", "row": "b", "than": "a", "rounds": 3}
    found = judged(Claim("rebafl", "", "", "steadier", about), there)
    # Differences of −9 of each seed: t with 2 degrees of freedom at 1 − 0.05 / 2 is 4.303, times 0.01 / √6 / √3.
    assert found.verdict == "confirmed"
    deviation = "the standard deviation of the accuracy over the last 3 rounds"
    assert found.measure == f"With `b` instead of `a`, {deviation} changes by"
    assert found.evidence == "−9.0 [−9.0, −9.0] points with `x` and −9.0 [−9.0, −9.0] points with `y`"
    assert judged(Claim("rebafl", "", "", "steadier", {**about, "than": ["a", "c"]}), there).verdict == "partly"
    assert (
        judged(Claim("rebafl", "", "", "steadier", {**about, "row": "a", "than": "b"}), there).verdict == "contradicted"
    )
    assert judged(Claim("rebafl", "", "", "steadier", about), {}).verdict == "not tested"


def test_a_ratio_that_no_chance_decides(table):
    about = {"table": "mine", "row": "b", "than": "a", "metric": "bytes_up", "most": 1.0}
    claim = Claim("rebafl", "", "", "ratio", about)
    assert judged(claim, {}).verdict == "not tested"
    there = results(table, {("a", "x"): [1.0], ("b", "x"): [1.0]})
    assert judged(claim, there).verdict == "not tested"  # of the other column nothing is known
    there = results(table, {(row, column): [1.0] for row in "ab" for column in "xy"})
    assert judged(claim, there).verdict == "confirmed"
    assert judged(Claim("rebafl", "", "", "ratio", {**about, "most": 0.9}), there).verdict == "contradicted"
    about["least"] = about.pop("most") + 1
    assert judged(claim, there).verdict == "contradicted"


def ideal(claim: Claim) -> dict[str, dict]:
    """What a claim's table would hold if the claim were as true as can be, the same for all seeds."""
    table = judging.tables()[f"{claim.paper}/{claim.about['table']}"]
    found = {}
    for cell in table.cells():
        rounds, best = cell.spec["training"]["rounds"], cell.row == claim.about["row"]
        # At the best accuracy from the first round on; or there in the last one, up and down before.
        curve = [90.0] * rounds if best else [float(10 + 10 * (i % 2)) for i in range(rounds - 1)] + [30.0]
        reached = curve[-1]
        if claim.kind == "margin" and best:
            # Two readings of a number hold if the differences spread so far that another one could be either.
            ends = claim.about["published"]
            steps = np.linspace(min(ends), max(ends), len(table.seeds))
            reached = 30.0 + float(steps[list(table.seeds).index(cell.seed)])
        if claim.kind == "gains" and cell.column != claim.about["columns"][0]:
            reached = 30.0
        figures = dict.fromkeys(("final", "last10", "best", "mean"), reached)
        many = 1000.0 if best and "least" in claim.about else 1.0
        changed = {"below": 0.5, "above": 2.0}.get(claim.about.get("wanted"), 1.0) if best else 1.0
        measures = {"train_loss": [changed] * rounds, "diversity": changed}
        found[cell.hash] = {**figures, **measures, "curve": curve, "bytes_up": many, "bytes_down": many}
    return found


@pytest.mark.parametrize(
    "claim", [each for each in judging.claims() if "table" in each.about], ids=lambda claim: claim.statement[:60]
)
def test_every_claim_can_hold(claim):
    """With so few seeds, rounds or cells that nothing could show it, it would stand there for ever as not shown."""
    assert judged(claim, ideal(claim)).verdict == "confirmed"


def test_an_interval_is_cut_at_what_is_possible():
    assert compared({0: 100.0, 1: 0.0, 2: 50.0}, {0: 0.0, 1: 100.0, 2: 50.0}).interval == (-100.0, 100.0)


@pytest.mark.slow
def test_nothing_is_stated_before_anything_is_run():
    for claim in judging.claims():
        verdict = judged(claim, {}).verdict
        if claim.kind not in ("reading", "page", "untestable"):
            assert verdict == "not tested", claim.statement
