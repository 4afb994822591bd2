"""``python -m tests.mutants``: faults made by hand, one at a time, and whether the tests that must notice do.

``src`` is copied to a temporary folder, which stands before the real one while a mutant's tests run.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.mutants.catalog import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
NOTICED, SURVIVED, STALE, BROKEN = "noticed", "survived", "stale", "broken"
LIMIT = 900
"""Seconds for the tests of one mutant; one that makes them hang is noticed."""


def main() -> int:
    """1 where a mutant survived, or is none any more."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="those whose file or label holds this")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at the same time")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if options.only in f"{mutant.file}: {mutant.label}"]
    with tempfile.TemporaryDirectory(prefix="mutants-") as place, ThreadPoolExecutor(options.jobs) as pool:
        whole = Path(place) / "whole"
        shutil.copytree(ROOT / "src", whole, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(whole, quiet=1)  # once, and not anew for each mutant
        outcomes = []
        for mutant, outcome in zip(chosen, pool.map(partial(tried, whole), chosen), strict=True):
            print(f"{outcome:8}  {mutant.file}: {mutant.label}", flush=True)
            outcomes.append(outcome)
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
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return NOTICED
    return {0: SURVIVED, 1: NOTICED}.get(done.returncode, BROKEN)


if __name__ == "__main__":
    sys.exit(main())
