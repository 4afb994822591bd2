"""Check that the threads, the memory and the time of exchanges of a deployment do not grow while it runs.

    python benchmarks/soak.py [--minutes 40] [--rate R] [--warm 10] [--out DIR]

A server and three sites, which are processes with mutual TLS, exchange small messages as fast as they can, or R times a
second. The program prints a table of slopes with their 95 % intervals, and writes it to ``DIR/table.md`` and all
samples to ``DIR/soak.json``. The sites import this module.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
from scipy import stats

import fedstrata as fs
from fedstrata.base.records import record
from fedstrata.federation.allowed import Agreed, Allowed
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Weights
from fedstrata.methods.base import Method
from fedstrata.sampling.client_sizes import SizeReport
from fedstrata.sites.federation import Sites
from fedstrata.sites.local_deployment import try_out

HERE = Path(__file__).parent
BLOCK = 5.0
"""The length of a round in seconds."""
EVERY = 5.0
"""The seconds between two measurements of the processes."""
FEWEST = 5
"""The smallest number of measurements from which a slope is computed."""
WARM = 600.0
"""The seconds at the beginning that are left out by default, while the memory still grows to its usual size."""


@record("bench/Nothing")
class Nothing:
    """The state of the method: only the model."""

    weights: Weights


class Soak(Method):
    """A method that asks all clients for almost no work, for ``BLOCK`` seconds per round."""

    paper: ClassVar[str] = "none"
    rate: float = 0.0
    """The largest number of exchanges per second; 0 for no limit."""

    def allowed(self, agreed: Agreed) -> list[Allowed]:
        """Allow the request for sizes any number of times."""
        return [Allowed(SizeReport, where={"bound": 0}, times=None)]

    def init(self, federation: Federation, weights: Weights) -> Nothing:
        """Return the initial model, which never changes."""
        return Nothing(weights)

    def run_round(self, federation: Federation, state: Nothing) -> tuple[Nothing, dict[str, Any]]:
        """Exchange messages for ``BLOCK`` seconds."""
        clients = range(federation.config.clients)
        times, missing, ends = list[float](), 0, time.perf_counter() + BLOCK
        while (began := time.perf_counter()) < ends:
            replies = federation.ask(clients, SizeReport(federation.round, 0, 1.0))
            times.append(time.perf_counter() - began)
            missing += len(clients) - len(replies)
            if self.rate:
                time.sleep(max(0.0, 1 / self.rate - times[-1]))
        found = {"ask_ms": 1e3 * sum(times) / len(times), "slowest_ms": 1e3 * max(times), "missing": missing}
        return state, {**found, "exchanges": len(times), "at": time.time()}


class Looks:
    """Measurements of all processes of a deployment, every few seconds.

    Args:
        kits: The folder of the deployment.
    """

    def __init__(self, kits: Path) -> None:
        self.kits = kits
        self.found: list[dict[str, Any]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Looks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._ended.wait(EVERY):
            for process in psutil.Process().children(recursive=True):
                try:
                    words = process.cmdline()
                    with process.oneshot():
                        sample = process.num_threads(), anonymous(process.pid)
                except (psutil.Error, OSError, KeyError):  # the process has ended
                    continue
                if role := self._role(words):
                    self.found.append({"role": role, "at": time.time(), "threads": sample[0], "mib": sample[1]})

    def _role(self, words: list[str]) -> str:
        """Return the party of a process and ``parent`` or ``job``; empty for other processes."""
        line = " ".join(words)
        for module, what in (("runner_process", "job"), ("worker_process", "job"), ("server_train", "parent"),
                             ("client_train", "parent")):  # fmt: skip
            if f"{module} " in f"{line} " and "fedstrata.sites.processes" not in line and "bash" not in words[0]:
                party = next((path.name for path in self.kits.iterdir() if f"{path}" in line.split()), "")
                return f"{party} {what}" if party else ""
        return ""


def anonymous(pid: int) -> float:
    """Return the anonymous memory of a process in MiB, resident or swapped out.

    Memory that is mapped from files does not count, because the kernel loads and drops it at any time.
    """
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    found = {key: value.split()[0] for key, _, value in (line.partition(":") for line in lines) if value.strip()}
    return (int(found["RssAnon"]) + int(found["VmSwap"])) / 1024


def slope(at: list[float], values: list[float], together: int = 1) -> tuple[float, float, float]:
    """Return the slope per hour, and the lower and the upper end of its confidence interval.

    The slope is computed from the means of twenty blocks, because neighbouring measurements are not independent.

    Args:
        at: The times of the measurements in seconds.
        values: The measured values.
        together: The number of intervals that must hold simultaneously with 95 % confidence (Bonferroni).
    """
    blocks = min(20, len(at))
    x = np.array([part.mean() for part in np.array_split(np.array(at) / 3600, blocks)])
    y = np.array([part.mean() for part in np.array_split(np.array(values), blocks)])
    if not y.std():
        return 0.0, 0.0, 0.0
    fit = stats.linregress(x, y)
    half = fit.stderr * stats.t.ppf(1 - 0.025 / together, blocks - 2)
    return fit.slope, fit.slope - half, fit.slope + half


def table(samples: list[dict[str, Any]], rounds: list[dict[str, Any]], warm: float = WARM) -> list[str]:
    """Return a table with the mean and the slope of each measured quantity.

    The last column says whether the slope may be zero; if not, the largest change per hour relative to the mean.
    """
    begun, over = rounds[0]["at"] - BLOCK, rounds[-1]["at"]
    series: dict[str, list[tuple[float, float]]] = {}
    for sample in samples:
        for key, unit in (("threads", "threads"), ("mib", "MiB")):
            series.setdefault(f"{sample['role']}, {unit}", []).append((sample["at"], sample[key]))
    series["an exchange, ms"] = [(one["at"], one["ask_ms"]) for one in rounds]
    # One in twenty 95 % intervals misses a slope of zero, so the decision uses intervals that hold simultaneously.
    lines = ["| what | mean | change an hour | 95 %, this one | 95 %, all together | flat |", f"|{'---|' * 6}"]
    for what, pairs in sorted(series.items()):
        later = [pair for pair in pairs if begun + warm < pair[0] <= over]
        if len(later) < FEWEST:
            lines.append(f"| {what} | | only {len(later)} looks after the first {warm:.0f} s | | | |")
            continue
        at, values = zip(*later, strict=True)
        middle, *alone = slope(list(at), list(values))
        _, *together = slope(list(at), list(values), len(series))
        share = max(map(abs, together)) / np.mean(values)
        moves = f"{'rises' if middle > 0 else 'falls'}, at most {share:.1%}"
        flat = "yes" if together[0] <= 0 <= together[1] else moves
        intervals = " | ".join(f"{low:+.2f} … {high:+.2f}" for low, high in (alone, together))
        lines.append(f"| {what} | {np.mean(values):.1f} | {middle:+.2f} | {intervals} | {flat} |")
    count, slowest = sum(one["exchanges"] for one in rounds), max(one["slowest_ms"] for one in rounds)
    lines.append(f"\n{count} exchanges in {(over - begun) / 60:.1f} minutes; the slowest took {slowest:.0f} ms")
    lines.append(f"{sum(one['missing'] for one in rounds)} answers are missing")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument(
        "--rate", type=float, default=0.0, help="maximum number of exchanges per second (default: not limited)"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--warm", type=float, default=WARM / 60, help="number of initial minutes to leave out of the results"
    )
    parser.add_argument("--again", action="store_true", help="only write the table of an earlier DIR/soak.json again")
    options = parser.parse_args()
    if options.again:
        kept = json.loads((options.out / "soak.json").read_text())
        write(kept["samples"], kept["rounds"], options)
        return
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, str(HERE))
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    own = {"allow": ["soak"]}
    sites = Sites.model_validate({"server": {"port": port, **own}, "least": 3, "site": {"a": own, "b": own, "c": own}})
    spec = fs.Experiment.from_table(
        {
            "method": {"name": "soak:Soak", "rate": options.rate},
            "data": {"name": "digits", "limit": 90},
            "partition": {"name": "iid", "clients": 3},
            "model": {"name": "mlp", "hidden": [8]},
            "training": {"rounds": round(60 * options.minutes / BLOCK), "execution": "per-client"},
            "evaluation": {"every": 0},
        }
    )
    with tempfile.TemporaryDirectory() as place:
        kits = Path(place) / "fed"
        with Looks(kits) as looks:
            folder = try_out(spec, sites, kits, base_dir=HERE)
        rounds = list(fs.History.load(folder))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "soak.json").write_text(json.dumps({"samples": looks.found, "rounds": rounds}))
    write(looks.found, rounds, options)


def write(samples: list[dict[str, Any]], rounds: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print the table, and write it and the samples to files if ``--out`` is given."""
    text = "\n".join(table(samples, rounds, 60 * options.warm))
    if options.out:
        (options.out / "table.md").write_text(text + "\n")
    print(text, flush=True)


if __name__ == "__main__":
    main()
