"""The families of the fuzzer, and the outcomes of its cases."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("src", "tests/support", "tests/sites/support")]

RAN, REFUSED = "ran", "refused"
"""The allowed outcomes of a case."""
TRACEBACK, HANG, DIFFERENT = "traceback", "hang", "silent difference"
"""The outcomes that must not happen."""


class SilentDifferenceError(AssertionError):
    """A case ended without an error, but with a wrong result."""


@dataclass(frozen=True)
class Family:
    """A kind of input.

    Args:
        name: The name of the family.
        try_one: A function that makes and tries a case, given its number, its random generator and an empty folder,
            in which it leaves the files that are needed to repeat the case. It returns ``RAN`` or ``REFUSED``. Any
            error that it raises is an outcome that must not happen.
        seconds: The seconds after which a case counts as hanging; many, because the machine may be busy.
    """

    name: str
    try_one: Callable[[int, random.Random, Path], str]
    seconds: float = 180.0


def chance_of(family: str, seed: int, number: int) -> random.Random:
    """Return the random generator of one case, which does not depend on earlier cases."""
    return random.Random(f"{family}|{seed}|{number}")


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Return the bytes with random damage; the result always differs from ``data``."""
    kind = chance.randrange(8)
    body = bytearray(data)
    place = chance.randrange(len(body)) if body else 0
    if not body or kind == 0:
        return bytes(body) + chance.randbytes(chance.randint(1, 40))
    if kind == 1:
        return bytes(body[:place])
    if kind == 2:
        return b""
    if kind == 3:
        length = chance.randint(1, 64)
        return bytes(body[:place] + body[place + length :])
    if kind == 4:
        changed = bytes(body[:place] + bytes(min(len(body) - place, chance.randint(1, 4096))))
        changed += bytes(body[len(changed) :])
        return changed if changed != data else data[:-1]
    if kind == 5:
        return bytes(body[:place] + chance.randbytes(chance.randint(1, 16)) + body[place:])
    if kind == 6:
        other = chance.randrange(len(body))
        body[place : place + 16], body[other : other + 16] = body[other : other + 16], body[place : place + 16]
        return bytes(body) if bytes(body) != data else data[1:]
    for _ in range(chance.choice([1, 1, 1, 8])):
        body[chance.randrange(len(body))] ^= 1 << chance.randrange(8)
    return bytes(body) if bytes(body) != data else data[:-1]
