"""What a case of the fuzzer may end as."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("src", "tests/support", "tests/sites/support")]

RAN, REFUSED = "ran", "refused"
"""How a case may end."""
TRACEBACK, HANG, DIFFERENT = "traceback", "hang", "silent difference"
"""How none may."""


class SilentDifferenceError(AssertionError):
    """Something ended well with another result than it should have, and said nothing."""


@dataclass(frozen=True)
class Family:
    """A kind of input.

    Args:
        name: What it is called.
        try_one: Makes and tries the case of a number, with its randomness, in an empty folder of its own, where it
            leaves what somebody needs to try it again. Returns whether it ``RAN`` or was ``REFUSED``, and raises what
            is neither.
        seconds: After so long it counts as stuck; generous, for the machine may be loaded.
    """

    name: str
    try_one: Callable[[int, random.Random, Path], str]
    seconds: float = 180.0


def chance_of(family: str, seed: int, number: int) -> random.Random:
    """The randomness of one case: it does not depend on those before it."""
    return random.Random(f"{family}|{seed}|{number}")


def damaged(data: bytes, chance: random.Random) -> bytes:
    """The same bytes with something done to them; never the very same."""
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
