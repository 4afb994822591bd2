"""``python -m tests.fuzz``: inputs that nobody should give, until time is up; a table of what came of them.

Every case is a function of its family, a seed and a number. What ended as no case may is kept under ``--out``, and
``--case`` tries it again. Cases run in a process that is watched, so that one that hangs or crashes costs no more than
itself. What was tried is counted in ``--out`` too: the same command goes on from there while the code is the same.
"""

from __future__ import annotations

import argparse
import hashlib
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
from pathlib import Path
from typing import Any

from tests.fuzz.cases import DIFFERENT, HANG, RAN, REFUSED, ROOT, TRACEBACK
from tests.fuzz.worker import FAMILIES, outcome_of

CRASH = "crash"
COLUMNS = (RAN, REFUSED, TRACEBACK, CRASH, HANG, DIFFERENT)
PARTS = {"specs": 6, "kills": 2, "compares": 2}
"""Of the time; 1 for the others, which take less for a case."""
SLICE = 120.0
"""Seconds of one process; then the family's turn is over."""
STARTING = 120.0
"""Seconds that a process may take before its first case."""


class Tally:
    """What was tried, in a file that the next call finds.

    Args:
        out: The folder.
        seed: Of the cases: those of another one are counted anew, and so are those of other code.
    """

    def __init__(self, out: Path, seed: int) -> None:
        self.path, self.about = out / "tally.json", {"seed": seed, "code": code()}
        self.families: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            before = json.loads(self.path.read_text())
            if before["about"] == self.about:
                self.families = before["families"]
        for name in FAMILIES:
            self.families.setdefault(name, {"next": 0, "seconds": 0.0, "counts": dict.fromkeys(COLUMNS, 0)})
        out.mkdir(parents=True, exist_ok=True)

    def behind(self, names: list[str]) -> str:
        """The family that has had least of its part of the time."""
        return min(names, key=lambda name: self.families[name]["seconds"] / PARTS.get(name, 1))

    def save(self) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({"about": self.about, "families": self.families}, indent=1))
        part.replace(self.path)

    def print(self) -> None:
        print(f"| {'family':12} | seconds |   tried | {' | '.join(COLUMNS)} |")
        print(f"|{'-' * 14}|--------:|--------:|{'|'.join('-' * (len(column) + 1) + ':' for column in COLUMNS)}|")
        for name, family in self.families.items():
            counts = family["counts"]
            cells = " | ".join(f"{counts[column]:{len(column)}}" for column in COLUMNS)
            print(f"| {name:12} | {family['seconds']:7.0f} | {sum(counts.values()):7} | {cells} |")

    @property
    def faults(self) -> int:
        return sum(family["counts"][kind] for family in self.families.values() for kind in COLUMNS[2:])


def code() -> str:
    """A digest of what is tried and of what tries it."""
    found = hashlib.sha256()
    for folder in (ROOT / "src", Path(__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()[:16]


def main() -> int:
    """1 where something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of this call, for all families together")
    parser.add_argument("--family", choices=list(FAMILIES), action="append", help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="try this case of the family and show what comes of it")
    parser.add_argument("--out", type=Path, default=Path("fuzz-findings"), help="where findings and counts are kept")
    options = parser.parse_args()
    names = options.family or list(FAMILIES)
    if options.case is not None:
        place = options.out / f"{names[0]}-{options.seed}-{options.case}"
        print(*outcome_of(FAMILIES[names[0]], options.seed, options.case, place), sep="\n")
        return 0
    tally = Tally(options.out, options.seed)
    until = time.monotonic() + 60 * options.minutes
    slice = min(SLICE, 60 * options.minutes / len(names))
    while (left := until - time.monotonic()) > 0:
        turn(tally.behind(names), options.seed, min(slice, left), options.out, tally)
    tally.print()
    return int(tally.faults > 0)


def turn(name: str, seed: int, seconds: float, out: Path, tally: Tally) -> None:
    """Cases of a family in one process, up to its end or to a case that hangs or crashes."""
    family, began = tally.families[name], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-", ignore_cleanup_errors=True) as scratch:
        counts: Counter[str] = Counter(family["counts"])
        family["next"] = _watch(name, seed, family["next"], seconds, Path(scratch), out, counts)
        family["counts"] = {column: counts[column] for column in COLUMNS}
    family["seconds"] += time.monotonic() - began
    tally.save()


def _watch(name: str, seed: int, first: int, seconds: float, place: Path, out: Path, counts: Counter[str]) -> int:
    """One process, up to its end; the number of the case that comes next."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.fuzz.worker", name, str(seed), str(first), str(seconds), str(place)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    number, begun, patience = first, False, STARTING
    try:
        while True:
            try:
                line = lines.get(timeout=patience)
            except queue.Empty:
                counts[HANG] += 1
                keep(out, name, seed, number, HANG, f"no end after {patience:g} s", place)
                return number + 1
            if not line:
                if begun:
                    counts[CRASH] += 1
                    keep(out, name, seed, number, CRASH, f"the process ended with {child.wait()}", place)
                    return number + 1
                if child.wait():
                    raise RuntimeError("the process ended between two cases: try python -m tests.fuzz.worker")
                return number
            told = json.loads(line)
            number, begun = told["number"], "kind" not in told
            patience = FAMILIES[name].seconds if begun else STARTING
            if begun:
                continue
            counts[told["kind"]] += 1
            if told["kind"] not in (RAN, REFUSED):
                keep(out, name, seed, number, told["kind"], told["text"], place)
            number += 1
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
