"""A short and ever the same part of ``python -m tests.fuzz``: it finds nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from limits import within

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.fuzz.cases import RAN, REFUSED
from tests.fuzz.worker import FAMILIES, outcome_of

pytestmark = pytest.mark.slow

CASES = {"specs": 104, "data": 80, "messages": 60, "choices": 2, "questions": 3, "checkpoints": 3, "folders": 4}
"""The corpus, where a family has one, and a few more. Kills are no part of it: chance decides when they come."""

LIMIT = 300.0
"""Seconds for all of a family: only an endless case is meant."""


@pytest.mark.parametrize("name", [name for name in FAMILIES if name in CASES])
def test_nothing_is_found(name, tmp_path):
    family = FAMILIES[name]

    def all_of_them() -> list[tuple[str, str]]:
        return [outcome_of(family, 0, number, tmp_path / str(number)) for number in range(CASES[name])]

    outcomes = within(LIMIT, all_of_them)
    found = {number: outcome for number, outcome in enumerate(outcomes) if outcome[0] not in (RAN, REFUSED)}
    assert found == {}, f"python -m tests.fuzz --family {name} --case {min(found)}"
    assert sum(outcome[0] == RAN for outcome in outcomes) > 0
