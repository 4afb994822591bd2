"""``python -m tests.fuzz``: inputs that nobody should give, until time is up; a table of what came of them.

Every case is a function of its family, a seed and a number. What ended as no case may is kept under ``--out``, and
``--case`` tries it again. Cases run in a process that is watched, so that one that hangs or crashes costs no more than
itself, and as many such processes as there are processors work at a time. What was tried is counted in ``--out`` too:
the same command goes on from there while the code is the same.

Thirty minutes on two idle processors are enough for 10,000 specs that reach a round, 10,000 data files and messages
that can be read, 500 checkpoints and run folders, 100 runs that are killed, and 20 comparisons.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.fuzz.cases import DIFFERENT, HANG, RAN, REFUSED, ROOT, TRACEBACK
from tests.fuzz.worker import FAMILIES, outcome_of

CRASH = "crash"
COLUMNS = (RAN, REFUSED, TRACEBACK, CRASH, HANG, DIFFERENT)
PARTS = {
    "specs": 18,
    "data": 4,
    "messages": 6,
    "choices": 6,
    "questions": 3,
    "checkpoints": 5,
    "folders": 5,
    "kills": 4,
    "compares": 12,
}
"""Of the time."""
LANE = 10**8
"""Numbers of cases that belong to one lane of a family: a process follows a lane, and two never try the same case."""
SLICE = 180.0
"""Seconds of one process; then its turn is over."""
STARTING = 120.0
"""Seconds that a process may take before its first case."""


class Tally:
    """What was tried, in a file that the next call finds; several threads share it.

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
            self.families.setdefault(name, {"lanes": [], "seconds": 0.0, "counts": dict.fromkeys(COLUMNS, 0)})
        self._lock, self._busy = threading.Lock(), set[tuple[str, int]]()
        self._promised: Counter[str] = Counter()
        out.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def turn(self, names: list[str], seconds: float) -> Iterator[tuple[str, int]]:
        """The family that has had, or was promised, least of its part of the time, and a lane that nobody is on."""
        with self._lock:
            name = min(names, key=lambda name: (self.families[name]["seconds"] + self._promised[name]) / PARTS[name])
            lanes = self.families[name]["lanes"]
            lane = next(lane for lane in range(len(lanes) + 1) if (name, lane) not in self._busy)
            if lane == len(lanes):
                lanes.append(lane * LANE)
            self._busy.add((name, lane))
            self._promised[name] += seconds
        began = time.monotonic()
        try:
            yield name, lane
        finally:
            with self._lock:
                self._busy.remove((name, lane))
                self._promised[name] -= seconds
                self.families[name]["seconds"] += time.monotonic() - began
                self._save()

    def first(self, name: str, lane: int) -> int:
        """The number of the lane's next case."""
        return int(self.families[name]["lanes"][lane])

    def count(self, name: str, lane: int, kind: str) -> None:
        """The lane's next case ended so."""
        with self._lock:
            self.families[name]["lanes"][lane] += 1
            self.families[name]["counts"][kind] += 1

    def _save(self) -> None:
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
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="of this call, for all families and processes together"
    )
    parser.add_argument("--family", choices=list(FAMILIES), action="append", help="only this one; may be repeated")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
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
    slice = min(SLICE, 60 * options.minutes * options.jobs / len(names))

    def take_turns() -> None:
        while (left := until - time.monotonic()) > 0:
            with tally.turn(names, min(slice, left)) as (name, lane):
                follow(name, lane, options.seed, min(slice, left), options.out, tally)

    with ThreadPoolExecutor(options.jobs) as threads:
        turns = [threads.submit(take_turns) for _ in range(options.jobs)]
        try:
            for each in turns:
                each.result()
        except BaseException:  # an interrupt, or a fault of the fuzzer: nobody goes on
            until = 0.0
            for child in list(RUNNING):
                child.kill()
            raise
    tally.print()
    return int(tally.faults > 0)


RUNNING: set[subprocess.Popen[str]] = set()


def follow(name: str, lane: int, seed: int, seconds: float, out: Path, tally: Tally) -> None:
    """Cases of a lane in one process, up to its end or to a case that hangs or crashes."""
    with tempfile.TemporaryDirectory(prefix="fuzz-", ignore_cleanup_errors=True) as scratch:
        place, first = Path(scratch), tally.first(name, lane)
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.worker", name, str(seed), str(first), str(seconds), str(place)],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "OMP_NUM_THREADS": "1",
                "PYTHONDONTWRITEBYTECODE": "",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        RUNNING.add(child)
        try:
            for number, kind, text in _watched(child, FAMILIES[name].seconds, first):
                tally.count(name, lane, kind)
                if kind not in (RAN, REFUSED):
                    keep(out, name, seed, number, kind, text, place)
        finally:
            child.kill()
            child.wait()
            RUNNING.remove(child)


def _watched(child: subprocess.Popen[str], limit: float, first: int) -> Iterator[tuple[int, str, str]]:
    """The number of each case of a process, how it ended, and more about it where it should not have ended so."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    number, begun, patience = first, False, STARTING
    while True:
        try:
            line = lines.get(timeout=patience)
        except queue.Empty:
            yield number, HANG, f"no end after {patience:g} s"
            return
        if not line:
            if begun:
                yield number, CRASH, f"the process ended with {child.wait()}"
            elif child.wait():
                raise RuntimeError("the process ended between two cases: try python -m tests.fuzz.worker")
            return
        told = json.loads(line)
        number, begun = told["number"], "kind" not in told
        patience = limit if begun else STARTING
        if not begun:
            yield number, told["kind"], told["text"]
            number += 1


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
