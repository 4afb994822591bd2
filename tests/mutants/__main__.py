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
from collections import Counter
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
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if re.search(options.only, f"{mutant.file}: {mutant.label}")]
    waiting = list(enumerate(chosen))[options.first :]
    count, began = Counter[str](), time.monotonic()
    running: list[tuple[int, Mutant, Trial]] = []

    def ended(number: int, mutant: Mutant, outcome: str, seconds: float = 0.0) -> None:
        count[outcome] += 1
        print(f"{number:3} {outcome:8} {seconds:4.0f} s  {mutant.file}: {mutant.label}", flush=True)

    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        whole = Path(place) / "whole"
        shutil.copytree(ROOT / "src", whole, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(whole, quiet=1)  # once, and not anew for each mutant
        while waiting or running:
            while waiting and len(running) < options.jobs:
                number, mutant = waiting.pop(0)
                text = (whole / "fedstrata" / mutant.file).read_text(encoding="utf-8")
                if text.count(mutant.old) != 1:
                    ended(number, mutant, STALE)
                    continue
                running.append((number, mutant, Trial(whole, mutant)))
            for each in [each for each in running if each[2].outcome() is not None]:
                running.remove(each)
                number, mutant, trial = each
                ended(number, mutant, trial.outcome() or BROKEN, time.monotonic() - trial.began)
            time.sleep(0.05)
    kinds = ", ".join(f"{count[kind]} {kind}" for kind in (NOTICED, SURVIVED, STALE, BROKEN))
    print(f"{count.total()} mutants in {(time.monotonic() - began) / 60:.0f} minutes: {kinds}")
    return int(count[NOTICED] < count.total())


class Trial:
    """A mutant's tests, in a process of their own.

    Args:
        whole: The modules without the mutant.
        mutant: Which.
    """

    def __init__(self, whole: Path, mutant: Mutant) -> None:
        self.began = time.monotonic()
        self._copy, self._outcome = Path(tempfile.mkdtemp(dir=whole.parent)), ""
        shutil.copytree(whole, self._copy, dirs_exist_ok=True)
        path = self._copy / "fedstrata" / mutant.file
        path.write_text(path.read_text(encoding="utf-8").replace(mutant.old, mutant.new), encoding="utf-8")
        self._child = os.fork()
        if not self._child:
            os._exit(_tested(self._copy, mutant))

    def outcome(self) -> str | None:
        """What the tests say of the mutant; None while they run."""
        if self._outcome:
            return self._outcome
        child, status = os.waitpid(self._child, os.WNOHANG)
        if not child:
            if time.monotonic() - self.began > PATIENCE:
                os.killpg(self._child, signal.SIGKILL)
            return None
        shutil.rmtree(self._copy, ignore_errors=True)
        # 1: tests have failed; a signal: they hung, or crashed.
        code = os.waitstatus_to_exitcode(status)
        self._outcome = {0: SURVIVED, 1: NOTICED}.get(code, NOTICED if code < 0 else BROKEN)
        return self._outcome


def _tested(source: Path, mutant: Mutant) -> int:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))
    os.chdir(ROOT)
    os.environ.update(PYTHONPATH=str(source), OMP_NUM_THREADS="1")
    sys.path.insert(0, str(source))
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    tests = [str(ROOT / "tests" / path) for path in mutant.tests]
    return int(pytest.main(["-q", "-x", "-n0", "-p", "no:cacheprovider", *tests]))


if __name__ == "__main__":
    sys.exit(main())
