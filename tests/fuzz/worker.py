"""Try cases of one family, one after another, in a process that its parent watches and may kill."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import shutil
import sys
import time
import traceback
from pathlib import Path

import torch
from tests.fuzz import choices, files, folders, kills, specs, wire
from tests.fuzz.cases import DIFFERENT, TRACEBACK, Family, SilentDifferenceError, chance_of

from fedstrata.base import outer

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        specs.FAMILY,
        files.FAMILY,
        wire.FAMILY,
        choices.FAMILY,
        folders.CHECKPOINTS,
        folders.FOLDERS,
        kills.RUNS,
        kills.COMPARES,
    )
}

if "sites" in outer.installed():
    from tests.sites import questions

    FAMILIES[questions.FAMILY.name] = questions.FAMILY

MEMORY = 12 << 30
"""The limit of the address space in bytes, so that a case that needs more gets a ``MemoryError``."""


def outcome_of(family: Family, seed: int, number: int, place: Path) -> tuple[str, str]:
    """Try a case, and return its outcome and, if this must not happen, an explanation; its files then stay."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    try:
        outcome = family.try_one(number, chance_of(family.name, seed, number), place)
    except SilentDifferenceError as error:
        return DIFFERENT, str(error)
    except Exception:
        return TRACEBACK, traceback.format_exc()
    shutil.rmtree(place, ignore_errors=True)
    return outcome, ""


def main() -> None:
    """Try cases until time is up, and print a line before and after each case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("family")
    parser.add_argument("seed", type=int)
    parser.add_argument("first", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("place", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    until = time.monotonic() + options.seconds
    # The parent reads this file. Standard output, to which libraries may print, is sent to the null device.
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    for number in itertools.count(options.first):
        if time.monotonic() > until:
            return
        print(json.dumps({"number": number}), file=lines, flush=True)
        kind, text = outcome_of(FAMILIES[options.family], options.seed, number, options.place / str(number))
        print(json.dumps({"number": number, "kind": kind, "text": text}), file=lines, flush=True)


if __name__ == "__main__":
    main()
