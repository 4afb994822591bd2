"""A family of cases with three random choices in one spec: it must be refused, or each choice must have an effect."""

from __future__ import annotations

import json
import random
from pathlib import Path

import combinations as c
from tests.fuzz.cases import RAN, REFUSED, Family, SilentDifferenceError


def try_one(number: int, chance: random.Random, place: Path) -> str:
    """Draw three levels, and compare a run with them with runs in which one of them differs."""
    space = chance.choices(c.SPACES, weights=(4, 1, 1))[0]
    triple = {factor: chance.choice(space[factor]) for factor in chance.sample(list(space), 3)}
    method = {} if "method" in triple else {"method": chance.choice(space["method"])}
    row = c.plain(space, **triple, **method)
    (place / "row.json").write_text(json.dumps(row))
    if (reason := c.refusal(row)) is not None:
        if ": " not in reason:
            raise SilentDifferenceError(f"refused without a key: {reason}")
        return REFUSED
    if not c.here(row):
        return REFUSED
    c.observe(row)
    for factor in triple:
        if c.told(row, factor) and c.acts(row, space, factor) is False:
            raise SilentDifferenceError(f"{factor} = {row[factor]} is not seen to act: {row}")
    return RAN


FAMILY = Family("choices", try_one)
