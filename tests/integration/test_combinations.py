"""No choice without effect: what goes together runs and is seen to act, and what does not is refused with a reason."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import combinations as c
import pytest
from combinations import Row, Seen
from limits import within

from fedstrata.methods.base import METHODS

pytestmark = pytest.mark.slow

DRAWN = 200_000
"""Random combinations to check. There are more than two million, and checking all takes half an hour."""
LIMIT = 120.0
"""Seconds that two rounds of a tiny run, compared with others, may take; they take a fraction of one."""


def remembering() -> Callable[[Mapping[str, str], int], Seen]:
    """``observe``, each row and seed once."""
    known: dict[Any, Seen] = {}

    def seen(row: Mapping[str, str], seed: int) -> Seen:
        key = (*sorted(row.items()), seed)
        if key not in known:
            known[key] = c.observe(row, seed)
        return known[key]

    return seen


def silent(row: Row, space: Any, factors: Any, seen: Any) -> list[str]:
    """The factors of a row whose level is not seen to act."""
    return [factor for factor in factors if within(LIMIT, partial(c.acts, row, space, factor, seen)) is False]


def one_at_a_time() -> list[tuple[Any, Row, str]]:
    """A method's own choices with one of them replaced."""
    cases = []
    for space, method in ((c.RECIPES, "fedavg"), (c.RELAYS, "sfl"), (c.SCHEDULES, "stratify")):
        for factor, levels in space.items():
            for level in levels:
                row = c.plain(space, method=method, **({factor: level} if factor != "method" else {}))
                if factor == "aggregator" and level == "horvitz-thompson":
                    row["client_sampler"] = "uniform again"
                if factor == "norm" and level == "local" and method != "fedavg":
                    continue  # refused
                if c.told(row, factor) and c.here(row):
                    cases.append((space, row, factor))
    return cases


def test_each_choice_acts_in_the_plainest_method():
    seen = remembering()
    cases = one_at_a_time()
    allowed = [case for case in cases if c.refusal(case[1]) is None]
    assert len(allowed) > 75
    assert [(row, factor) for space, row, factor in allowed if silent(row, space, [factor], seen)] == []


@pytest.mark.parametrize("method", [name for name in METHODS if name != "fedavg"])
def test_each_method_is_not_fedavg(method):
    space = next(space for space in c.SPACES if method in space["method"])
    norm = "average" if method == "fedtan" else "none"
    own, other = (
        c.observe(c.plain(at, method=name, norm=norm)) for at, name in ((space, method), (c.RECIPES, "fedavg"))
    )
    if method in ("ditto", "ccvr"):  # clients answer more, and the global model before calibration is FedAvg's
        assert own.answers != other.answers
        assert own.after == other.after
    else:
        assert own.after != other.after


def test_a_few_of_the_combinations_act():
    """The same check as below, of a few rows by chance and one choice of each."""
    chance, seen = random.Random(5), remembering()
    for space in (c.RECIPES, c.RECIPES, c.RECIPES, c.RELAYS, c.SCHEDULES):
        row = c.allowed_by_chance(space, chance)
        factors = [factor for factor in space if c.told(row, factor)]
        if c.here(row) and factors:
            assert silent(row, space, [chance.choice(factors)], seen) == [], row


@pytest.mark.long
@pytest.mark.parametrize("place", range(len(c.SPACES)))
def test_every_pair_acts_or_is_refused(place):
    """Every pair of levels that is not refused, in some 400 rows; each choice against another, all else equal."""
    space = c.SPACES[place]
    rows, refused = c.pairwise(space)
    covered = {pair for row in rows for pair in c.pairs_of(row)}
    pairs = [
        (a, x, b, y) for a, b in itertools.combinations(space, 2) for x, y in itertools.product(space[a], space[b])
    ]
    assert covered | refused.keys() == set(pairs)
    assert all(refused.values())
    count: Counter[Any] = Counter()
    for row in filter(c.here, rows):
        seen = remembering()
        for factor in (factor for factor in space if c.told(row, factor)):
            count[within(LIMIT, partial(c.acts, row, space, factor, seen))] += 1
            assert not count[False], (factor, row)
    print(
        f"{len(pairs)} pairs, {len(refused)} refused, {len(rows)} rows; seen to act {count[True]}, alone {count[None]}"
    )


@pytest.mark.long
def test_combinations_of_all_choices_are_refused_with_a_reason_or_allowed():
    """Random ones, before anything runs; availability refuses nothing that masking or a choice does not."""
    space, rng = c.EVERYTHING, random.Random(0)
    agreed = list(itertools.product(space["norm"], space["effort"]))
    choices = ["method", "client_sampler", "data_sampler", "objective", "aggregator", "masking"]
    count: Counter[bool] = Counter()
    reasons = set()
    for _ in range(DRAWN):
        row = {factor: rng.choice(space[factor]) for factor in choices}
        for reason in c.refusals(row, agreed):
            count[reason is None] += 1
            reasons.add(reason)
    assert count.total() == DRAWN * len(agreed)
    assert count[True] > 0
    assert all(reason is None or ":" in reason for reason in reasons)
    print(f"{count.total()} combinations: {count[False]} refused for {len(reasons) - 1} reasons, {count[True]} allowed")


def test_what_stands_in_no_array_is_refused():
    """Two rows that the arrays hold as refused pairs: with the key and what is accepted."""
    private = c.plain(c.RECIPES, method="fedavg", client_sampler="weighted", data_sampler="fedstas private")
    assert "method.client_sampler: needs the clients' numbers of samples" in str(c.refusal(private))
    drawn_once = c.plain(c.RECIPES, method="fedavg", client_sampler="weighted once", aggregator="horvitz-thompson")
    assert "Set replacement = true" in str(c.refusal(drawn_once))
