"""Compare the speed and the memory of fedstrata with those of other libraries (peers): ``make bench``.

    python benchmarks/peers/bench.py [--only fluke,pfl] [--settings cnn,small] [--repetitions 5] [--out PAGE]

Each peer has its own environment under ``--cache``, made once from pinned versions on PyPI. Its script in this folder
does the work that ``work.py`` describes. Repetitions are interleaved, A B C … A B C …, and the result is the median of
the ratios within a repetition, because other work on the machine then affects all peers alike. Peers that use several
threads also run with one thread, and for each measure the better result counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from work import CORES, SETTINGS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


class Peer(NamedTuple):
    """A library that is compared.

    Args:
        name: Its name in the table.
        package: The requirement that pip installs; "" to use this environment.
        script: The script that does the work with the library.
        threads: The numbers of threads with which it runs.
    """

    name: str
    package: str
    script: str
    threads: tuple[int, ...]


PEERS = {
    "fedstrata": Peer("fedstrata", "", "fedstrata_run.py", (1,)),
    "flower": Peer("Flower 1.41.0 (Ray)", "flwr[simulation]==1.41.0", "flower_run.py", (1,)),
    "fluke": Peer("fluke 0.8.1", "fluke-fl==0.8.1", "fluke_run.py", (1, CORES)),
    "pfl": Peer("pfl-research 0.6.0", "pfl==0.6.0", "pfl_run.py", (1, CORES)),
    "plain": Peer("plain PyTorch", "", "plain.py", (1, CORES)),
}


def environment(key: str, cache: Path) -> Path:
    """Return the Python of a peer's environment, which is made if it does not exist.

    It has the version of PyTorch that constraints.txt pins.
    """
    peer = PEERS[key]
    if not peer.package:
        return Path(sys.executable)
    folder = cache / key
    done = folder / "done"
    python = folder / "bin" / "python"
    if not done.exists() or done.read_text() != peer.package:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--constraint", ROOT / "constraints.txt", "torch"], check=True)
        # Only PyTorch has the pinned version; a peer chooses the versions of its other dependencies.
        subprocess.run([*pip, f"torch=={torch.__version__.split('+')[0]}", peer.package], check=True)
        done.write_text(peer.package)
    return python


def measure(key: str, python: Path, setting: str, threads: int, extra: list[str]) -> dict[str, Any]:
    """Run a peer's script in its own process, and return its results."""
    env = {**os.environ, "BENCH_THREADS": str(threads), "BENCH_STARTED": str(time.time()), "PYTHONPATH": str(HERE)}
    command = [str(python), str(HERE / PEERS[key].script), setting, *extra]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    memory = _Memory(process.pid)
    output, errors = process.communicate()
    peak = memory.stop()
    lines = [line for line in output.splitlines() if line.startswith('{"seconds"')]
    if not lines:
        raise SystemExit(f"{key} failed on {setting}:\n{output[-2000:]}\n{errors[-4000:]}")
    return {"peer": key, "setting": setting, "threads": threads, "memory": peak} | json.loads(lines[-1])


class _Memory(threading.Thread):
    """The largest total memory of a process and its descendants; pages that they share count once."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid, self._peak, self._over = pid, 0, threading.Event()
        self.start()

    def run(self) -> None:
        while not self._over.wait(0.3):
            self._peak = max(self._peak, sum(_proportional(pid) for pid in _family(self._pid)))

    def stop(self) -> int:
        self._over.set()
        self.join()
        return self._peak


def _family(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += [int(child) for child in children.read_text().split()]
            except OSError:
                continue
    return found


def _proportional(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return 0


def compare(runs: list[dict[str, Any]]) -> str:
    """Return the tables of all settings."""
    lines: list[str] = []
    for setting in SETTINGS:
        chosen = [run for run in runs if run["setting"] == setting]
        if not chosen:
            continue
        lines += ["", f"### {_title(setting)}", "", _HEAD, "|---|" + "---:|" * 7]
        ours = [run for run in chosen if run["peer"] == "fedstrata"]
        for key in PEERS:
            groups = [[r for r in chosen if (r["peer"], r["threads"]) == (key, t)] for t in PEERS[key].threads]
            if groups := [group for group in groups if group]:
                lines.append(_row(key, groups, ours))
    return "\n".join(lines)


def in_short(runs: list[dict[str, Any]]) -> str:
    """Return a table of ratios only: of speeds per CPU second and, in brackets, per second of elapsed time."""
    peers = [key for key in PEERS if key != "fedstrata"]
    lines = [f"| | {' | '.join(PEERS[key].name for key in peers)} |", "|---|" + "---:|" * len(peers)]
    for setting, s in SETTINGS.items():
        chosen = [run for run in runs if run["setting"] == setting]
        if ours := [run for run in chosen if run["peer"] == "fedstrata"]:
            cells = []
            for key in peers:
                groups = [[r for r in chosen if (r["peer"], r["threads"]) == (key, t)] for t in PEERS[key].threads]
                there = [group for group in groups if group]
                clock, cpu = (_ratio(there, ours, by)[0] if there else 0 for by in ("per_second", "per_cpu_second"))
                cells.append(f"{cpu:.1f} ({clock:.1f})" if there else "–")
            lines.append(
                f"| {s.model} on {s.data}, {s.clients:,} clients of {s.samples} samples | {' | '.join(cells)} |"
            )
    return "\n".join(lines)


_HEAD = (
    "| | samples per second | times as slow as fedstrata, by wall clock | samples per CPU second "
    "| times as slow, by CPU time | first round, s | peak memory, MiB | loss after |"
)


def _title(key: str) -> str:
    s = SETTINGS[key]
    who = f"{s.clients:,} clients × {s.samples} samples, {s.invited} per round"
    return f"{key}: {s.model} on {s.data}, {who}, {s.epochs} epoch(s), batch {s.batch}"


def _row(key: str, groups: list[list[dict[str, Any]]], ours: list[dict[str, Any]]) -> str:
    """Return the row of a peer; each measure is that for the best number of threads."""
    cells = []
    for by in ("per_second", "per_cpu_second"):
        group = max(groups, key=lambda group: _median(group, by))
        threads = f" ({group[0]['threads']})" if len(groups) > 1 else ""
        text = "{:.2f} ({:.2f}–{:.2f})".format(*_ratio(groups, ours, by)) if ours else ""
        cells += [f"{_median(group, by):,.0f}{threads}", "" if key == "fedstrata" else text]
    fastest = max(groups, key=lambda group: _median(group, "per_second"))
    honest = "" if all(run["honest"] for group in groups for run in group) else " **(other work!)**"
    cells += [
        f"{_median(fastest, 'first_round'):.1f}",
        f"{_median(fastest, 'memory') / 2**20:,.0f}",
        f"{_median(fastest, 'loss'):.3f}",
    ]
    return f"| {PEERS[key].name}{honest} | " + " | ".join(cells) + " |"


def _ratio(groups: list[list[dict[str, Any]]], ours: list[dict[str, Any]], by: str) -> tuple[float, float, float]:
    """Return fedstrata's speed relative to the peer's best number of threads: median, smallest and largest ratio."""
    group = max(groups, key=lambda group: _median(group, by))
    paired = [a[by] / b[by] for a, b in zip(ours, group, strict=False)]
    return statistics.median(paired), min(paired), max(paired)


def _median(group: list[dict[str, Any]], key: str) -> float:
    return statistics.median(run[key] for run in group)


def earlier(path: Path) -> list[dict[str, Any]]:
    """Return the runs in a result file, for settings that do not run again."""
    if not path.is_file():
        return []
    found = json.loads(path.read_text())
    return list(found["runs"]) if found["machine"] == machine() else []


def machine() -> str:
    """Return a description of the machine."""
    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":")[1].strip()
            break
    return f"{model}, {CORES} cores; Python {platform.python_version()}, PyTorch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PEERS))
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--rounds", type=int, help="number of rounds to time (default: as in the setting)")
    parser.add_argument("--invited", type=int, help="number of clients per round (default: as in the setting)")
    parser.add_argument("--show", action="store_true", help="print the tables of the result file, without new runs")
    parser.add_argument("--once", default="", help="slow peers, which run only in the first repetition")
    parser.add_argument("--one-thread", action="store_true", help="run every peer with one thread only")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/fedstrata/peers").expanduser())
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "peers.json")
    parser.add_argument("--out", type=Path, help="page whose table to replace")
    options = parser.parse_args()
    keys = [] if options.show else options.only.split(",")
    pythons = {key: environment(key, options.cache) for key in keys}
    changed = {"--rounds": options.rounds, "--invited": options.invited}
    extra = [text for key, value in changed.items() if value for text in (key, str(value))]
    settings = [] if options.show else options.settings.split(",")
    runs = [run for run in earlier(options.json) if run["setting"] not in settings]
    for setting in settings:
        for repetition in range(options.repetitions):
            for key in keys:
                if repetition and key in options.once.split(","):
                    continue
                for threads in PEERS[key].threads[: 1 if options.one_thread else None]:
                    run = measure(key, pythons[key], setting, threads, extra)
                    runs.append({**run, "repetition": repetition, "load": os.getloadavg()[0]})
                    print(json.dumps(runs[-1]), flush=True)
            options.json.write_text(json.dumps({"machine": machine(), "runs": runs}, indent=1) + "\n")
    load = statistics.median(run["load"] for run in runs)
    text = f"{machine()}; load {load:.1f}.\n{compare(runs)}"
    print(text)
    if options.out:
        page = options.out.read_text(encoding="utf-8")
        for mark, part in {"in short": in_short(runs), "bench": text}.items():
            begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
            before, after = page.split(begin)[0], page.split(end)[1]
            page = f"{before}{begin}\n{part}\n{end}{after}"
        options.out.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
