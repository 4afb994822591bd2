"""``python -m tests.mutants``: faults made by hand, one at a time, and whether the tests that must notice do.

``src`` is copied to a temporary folder, which stands before the real one while a mutant's tests run.
"""

from __future__ import annotations

import argparse
import compileall
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch  # noqa: F401  # what takes longest to import is there already in each process that is forked
from tests.mutants.catalog import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
NOTICED, SURVIVED, STALE, BROKEN = "noticed", "survived", "stale", "broken"
LIMIT = 120
"""Seconds of the processor for the tests of one mutant: one that makes them run for ever is noticed."""
PATIENCE = 900
"""Seconds for a mutant that makes them wait for ever."""


def main() -> int:
    """1 where a mutant survived, or is none any more."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="a regular expression of files and labels")
    parser.add_argument("--first", type=int, default=0, help="go on from here")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if re.search(options.only, f"{mutant.file}: {mutant.label}")][
        options.first :
    ]
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        whole = Path(place) / "whole"
        shutil.copytree(ROOT / "src", whole, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(whole, quiet=1)  # once, and not anew for each mutant
        for number, mutant in enumerate(chosen, start=options.first):
            outcomes.append(tried(whole, mutant))
            print(f"{number:3} {outcomes[-1]:8}  {mutant.file}: {mutant.label}", flush=True)
    count = {kind: outcomes.count(kind) for kind in (NOTICED, SURVIVED, STALE, BROKEN)}
    print(f"{len(chosen)} mutants: {', '.join(f'{number} {kind}' for kind, number in count.items())}")
    return int(count[NOTICED] < len(chosen))


def tried(whole: Path, mutant: Mutant) -> str:
    """What the tests say of a mutant."""
    text = (ROOT / "src" / "fedstrata" / mutant.file).read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        return STALE
    copy = Path(tempfile.mkdtemp(dir=whole.parent))
    try:
        shutil.copytree(whole, copy, dirs_exist_ok=True)
        (copy / "fedstrata" / mutant.file).write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        return _tested(copy, mutant)
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _tested(source: Path, mutant: Mutant) -> str:
    tests = [str(ROOT / "tests" / path) for path in mutant.tests]
    child = os.fork()
    if not child:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))
        os.chdir(ROOT)
        os.environ.update(PYTHONPATH=str(source), OMP_NUM_THREADS="1")
        sys.path.insert(0, str(source))
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        os._exit(pytest.main(["-q", "-x", "-n0", "-p", "no:cacheprovider", *tests]))
    until = time.monotonic() + PATIENCE
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > until:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.05)
    # 1: tests have failed; a signal: they hung, or crashed.
    return {0: SURVIVED, 1: NOTICED}.get(
        os.waitstatus_to_exitcode(ended[1]), NOTICED if os.WIFSIGNALED(ended[1]) else BROKEN
    )


if __name__ == "__main__":
    sys.exit(main())
