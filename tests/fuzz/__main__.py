"""The fuzzer: ``python -m tests.fuzz`` tries random wrong inputs until time is up, and prints a table of the outcomes.

A family, a seed and a number determine a case. A case with an outcome that must not happen is stored under ``--out``,
and ``--case`` repeats it. Cases run in child processes, one per processor, so that a case that hangs or crashes does
not affect the others. The number of finished cases is stored under ``--out`` too: the same command continues from
there, as long as the code is the same.

Thirty minutes on two idle processors are enough for 10,000 specs that reach a round, 10,000 readable data files and
messages, 500 checkpoints and run folders, 100 runs that are killed, and 20 comparisons.
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
"""The share of each family in the time."""
LANE = 10**8
"""The size of a lane, a range of case numbers. Each process uses its own lane, so that no two try the same case."""
SLICE = 180.0
"""The seconds after which a process ends, and the next one starts."""
STARTING = 120.0
"""The seconds that a process may take before its first case."""


class Tally:
    """The number of cases that were tried, in a file, so that the next call continues; several threads share it.

    Args:
        out: The folder of the file.
        seed: The seed of the cases. With another seed or other code, counting starts again.
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
        """Reserve time for the family that has had the smallest part of its share; yield it and an unused lane."""
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
        """Return the number of the lane's next case."""
        return int(self.families[name]["lanes"][lane])

    def count(self, name: str, lane: int, kind: str) -> None:
        """Count the outcome ``kind`` of the lane's next case."""
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
    """Return a hash of the source code of the package and of the fuzzer."""
    found = hashlib.sha256()
    for folder in (ROOT / "src", Path(__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()[:16]


def main() -> int:
    """Run the fuzzer; return 1 if a case had an outcome that must not happen."""
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
        except BaseException:  # after an interrupt or an error of the fuzzer, stop all processes
            until = 0.0
            for child in list(RUNNING):
                child.kill()
            raise
    tally.print()
    return int(tally.faults > 0)


RUNNING: set[subprocess.Popen[str]] = set()


def follow(name: str, lane: int, seed: int, seconds: float, out: Path, tally: Tally) -> None:
    """Run cases of a lane in one process, until its time is up or a case hangs or crashes."""
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
    """Yield for each case of a process its number, its outcome and, if this must not happen, an explanation."""
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
    """Store a case with an outcome that must not happen: its files, and the command that repeats it."""
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
