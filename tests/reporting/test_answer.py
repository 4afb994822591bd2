"""The answer in words: by hand for few runs, and its agreement with the intervals for generated ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.base.style import AHEAD, BEHIND, NO_ORDER
from fedstrata.evaluation.history import History
from fedstrata.reporting.answer import answer, verdict
from fedstrata.reporting.contrasts import contrast


def runs_of(*, megabytes: float = 1.0, lower: bool = False, **finals: list[float]) -> dict[str, list[History]]:
    """Labels whose seeds end with these accuracies; each label sends ``megabytes`` more than the one before."""

    def one(value: float, seed: int, n: int) -> History:
        record = {"round": 1, "bytes_up": n * megabytes * 1e6, "bytes_down": 0}
        if lower:
            return History([record | {"test": {"rmse": value}}], seed=seed, primary="rmse", lower=frozenset({"rmse"}))
        return History([record | {"accuracy": value}], seed=seed)

    return {
        label: [one(value, seed, n) for seed, value in enumerate(values)]
        for n, (label, values) in enumerate(finals.items(), 1)
    }


def said(runs: dict[str, list[History]]) -> tuple[str, str, int | None]:
    found = answer(runs, contrast(runs))
    return found.headline, found.best, found.seeds


def test_a_method_that_is_ahead() -> None:
    runs = runs_of(fedavg=[0.50, 0.60, 0.55], scaffold=[0.62, 0.70, 0.69])  # +0.12, +0.10 and +0.14
    headline, best, seeds = said(runs)
    assert headline == "scaffold is ahead of fedavg."
    # 4.303 · 0.02 / √3 = 0.0497
    assert best == (
        "Highest final accuracy: scaffold, 67.0 % (+12.0 points; 95 % interval +7.0 to +17.0), "
        "for 2 times the bytes in total."
    )
    assert seeds is None


def test_no_order_and_the_seeds_that_would_show_one() -> None:
    headline, best, seeds = said(runs_of(fedavg=[0.4, 0.4, 0.4], moon=[0.3, 0.5, 0.7], megabytes=0))
    assert headline == "No method is shown to be ahead of fedavg."
    assert best == "Highest final accuracy: moon, 50.0 % (+10.0 points; 95 % interval −39.7 to +59.7)."
    assert seeds == 18


def test_methods_behind_and_many_names() -> None:
    steps = [0.5, 0.6, 0.7]
    ahead = {f"m{n}": [value + 0.1 + n * step / 1000 for step, value in enumerate(steps)] for n in range(1, 7)}
    below = [value - 0.2 + step / 1000 for step, value in enumerate(steps)]
    headline, _, _ = said(runs_of(base=steps, **ahead, low=below))
    assert headline == "m6, m5, m4 and 3 others are ahead of base. low is behind."


def test_where_lower_is_better_the_lowest_is_best() -> None:
    headline, best, _ = said(runs_of(fedavg=[2.0, 2.1, 2.2], other=[1.0, 1.11, 1.19], lower=True, megabytes=0))
    assert headline == "other is ahead of fedavg."
    assert best.startswith("Lowest final rmse: other, 1.100 (−1.000; 95 % interval −1.0")


def test_few_seeds_one_label_and_no_result() -> None:
    assert said(runs_of(a=[0.5], b=[0.75], megabytes=0)) == (
        "1 seed is too few to rank the methods.", "Highest final accuracy: b, 75.0 % (+25.0 points).", None,
    )  # fmt: skip
    two = said(runs_of(a=[0.5, 0.6], b=[0.75, 0.95], megabytes=0))
    assert (two[0], two[2]) == ("2 seeds are too few to rank the methods.", 3)
    assert said(runs_of(a=[0.5, 0.7])) == ("a: final accuracy 60.0 %, mean of 2 seeds.", "", None)
    assert said({"a": [History([], seed=0)]})[0] == "None of the runs has a result."


def test_equal_results_have_no_order() -> None:
    headline, best, seeds = said(runs_of(a=[0.5, 0.6, 0.7], same=[0.5, 0.6, 0.7], megabytes=0))
    assert headline == "No method is shown to be ahead of a."
    assert best == "Highest final accuracy: a, 60.0 %."
    assert seeds is None


finals = st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=5), min_size=2, max_size=5)


@pytest.mark.slow
@given(finals, st.booleans())
def test_verdict_interval_and_sentence_agree(values: list[list[float]], lower: bool) -> None:
    runs = runs_of(lower=lower, **{f"m{n}": each for n, each in enumerate(values)})
    comparison = contrast(runs)
    [key] = [each for each in comparison.measures if each.startswith("final")]
    headline = answer(runs, comparison).headline
    for row in comparison.groups[key]:
        shown = verdict(row, comparison.directions[key])
        interval = None if row.difference is None else row.difference.interval
        if shown is NO_ORDER:
            assert interval is None or interval[0] <= 0 <= interval[1]
        else:
            assert interval is not None
            better = interval[1] < 0 if lower else interval[0] > 0
            assert (shown is AHEAD) == better
            assert (shown is BEHIND) == (not better)
            assert "No method" not in headline or shown is BEHIND
        if interval is not None and not lower:
            assert -1 <= interval[0] <= interval[1] <= 1
