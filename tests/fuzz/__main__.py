"""``python -m tests.fuzz``: inputs that nobody should give, until time is up; a table of what came of them.

Every case is a function of its family, a seed and a number. What ended as no case may end is kept under ``--out``, and
``--case`` tries it again. Cases run in a process of their own that is watched, so that one that hangs or crashes
costs no more than itself.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.fuzz.cases import DIFFERENT, HANG, RAN, REFUSED, TRACEBACK  # noqa: E402
from tests.fuzz.worker import FAMILIES, outcome_of  # noqa: E402

CRASH = "crash"
PARTS = {"specs": 4, "kills": 2}
"""Of the time; 1 for the others, which take less for a case."""
STARTING = 120.0
"""Seconds that a process may take before its first case."""


def main() -> int:
    """1 where something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all families together")
    parser.add_argument("--family", choices=list(FAMILIES), action="append", help="only this one; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="families at the same time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="try this case of the family and show what comes of it")
    parser.add_argument("--out", type=Path, default=Path("fuzz-findings"), help="where findings are kept")
    options = parser.parse_args()
    names = options.family or list(FAMILIES)
    if options.case is not None:
        place = options.out / f"{names[0]}-{options.seed}-{options.case}"
        print(*outcome_of(FAMILIES[names[0]], options.seed, options.case, place), sep="\n")
        print(f"its files are in {place}")
        return 0
    parts = {name: PARTS.get(name, 1) * 60 * options.minutes * options.jobs / _all(names) for name in names}
    with ThreadPoolExecutor(options.jobs) as pool:
        tried = {name: pool.submit(watched, name, options.seed, parts[name], options.out) for name in names}
        counts = {name: each.result() for name, each in tried.items()}
    print_table(counts)
    return int(any(count[kind] for count in counts.values() for kind in (TRACEBACK, HANG, CRASH, DIFFERENT)))


def _all(names: list[str]) -> float:
    return sum(PARTS.get(name, 1) for name in names)


def print_table(counts: dict[str, Counter[str]]) -> None:
    """What was tried, and what came of it."""
    columns = ("tried", RAN, REFUSED, TRACEBACK, CRASH, HANG, DIFFERENT)
    print(f"| {'family':12} | {' | '.join(columns)} |")
    print(f"|{'-' * 14}|{'|'.join('-' * (len(column) + 1) + ':' for column in columns)}|")
    for name, count in counts.items():
        cells = (sum(count.values()), *(count[column] for column in columns[1:]))
        print(f"| {name:12} | {' | '.join(f'{cell:{len(c)}}' for cell, c in zip(cells, columns, strict=True))} |")


def watched(name: str, seed: int, seconds: float, out: Path) -> Counter[str]:
    """The cases of a family, in a process that is started anew when it hangs or crashes."""
    counts: Counter[str] = Counter()
    until, number = time.monotonic() + seconds, 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        place = Path(scratch)
        while (left := until - time.monotonic()) > 0:
            number = _watch(name, seed, number, left, place, out, counts)
    return counts


def _watch(name: str, seed: int, first: int, seconds: float, place: Path, out: Path, counts: Counter[str]) -> int:
    """One process, up to its end; the number of the case that comes next."""
    arguments = [name, str(seed), str(first), str(seconds), str(place)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.fuzz.worker", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    number, open_case, patience = first, False, STARTING
    try:
        while True:
            try:
                line = lines.get(timeout=patience)
            except queue.Empty:
                counts[HANG] += 1
                keep(out, name, seed, number, HANG, f"no end after {patience:g} s", place)
                return number + 1
            if not line:
                if open_case:
                    counts[CRASH] += 1
                    keep(out, name, seed, number, CRASH, f"the process ended with {child.wait()}", place)
                    return number + 1
                return number
            told = json.loads(line)
            if "begun" in told:
                number, open_case, patience = told["begun"], True, FAMILIES[name].seconds
                continue
            counts[told["kind"]] += 1
            open_case, number, patience = False, told["ended"] + 1, STARTING
            if told["kind"] not in (RAN, REFUSED):
                keep(out, name, seed, told["ended"], told["kind"], told["text"], place)
    finally:
        child.kill()
        child.wait()


def keep(out: Path, name: str, seed: int, number: int, kind: str, text: str, place: Path) -> None:
    """A finding, with its files and what tries it again."""
    folder = out / f"{name}-{seed}-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if (place / str(number)).exists():
        shutil.move(place / str(number), folder / "case")
    again = f"python -m tests.fuzz --family {name} --seed {seed} --case {number}"
    (folder / "finding.txt").write_text(f"{kind}\n{again}\n\n{text}\n")
    print(f"{name} {number}: {kind}: {text.strip().splitlines()[-1] if text.strip() else ''}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
