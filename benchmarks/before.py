"""Compare the speed of this working tree with the speed of an earlier commit.

    make bench-before COMMIT=HEAD~1
    python benchmarks/before.py HEAD~1 [--pairs 15] [--work cnn mlp small alone scaffold stratify single]

Each version trains the same models in its own process, through the public interface. The two versions take turns. The
program prints both median times, and the earlier version's time divided by this tree's time, with a 95 % interval. If
this ratio is below 1, this tree is slower. Images are random, because their content does not influence the speed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

WORK: dict[str, dict[str, Any]] = {
    "cnn": {"clients": 20, "samples": 300, "model": "cnn", "training": {"batch_size": 50, "rounds": 3}},
    "mlp": {"clients": 100, "samples": 300, "model": "mlp", "training": {"batch_size": 50, "rounds": 9}},
    "small": {"clients": 1000, "samples": 60, "model": "mlp", "training": {"clients_per_round": 100, "rounds": 9}},
    "alone": {
        "clients": 1000,
        "samples": 60,
        "model": "mlp",
        "training": {"clients_per_round": 100, "rounds": 9, "workers": 1},
    },
    "scaffold": {"clients": 100, "samples": 300, "model": "mlp", "method": "scaffold", "training": {"rounds": 6}},
    "stratify": {"clients": 100, "samples": 60, "model": "mlp", "method": "stratify", "training": {"rounds": 5}},
    "single": {
        "clients": 100,
        "samples": 30,
        "model": "mlp",
        "method": {"name": "stratify", "mode": "single"},
        "training": {"rounds": 4},
    },
}
"""The specs to time. The default method is FedAvg with one local epoch. The first round is a warm-up and is not timed.
``alone`` is ``small`` without worker processes, so other processes of the machine disturb it less."""


def serve() -> None:
    """Read names of specs from standard input; run each, and print the seconds of its rounds."""
    import numpy as np

    import fedstrata as fs

    warnings.simplefilter("ignore")
    draw = np.random.default_rng(0)
    y = np.arange(60_000) % 10
    x = (draw.integers(0, 200, size=(60_000, 28, 28)) + 5 * y[:, None, None]).astype(np.uint8)

    def once(name: str) -> float:
        work = WORK[name]
        total = work["clients"] * work["samples"]
        data = fs.from_arrays(x[:total], y[:total], x[:100], y[:100], normalize="unit")
        ends: list[float] = []
        spec = {
            "partition": {"name": "iid", "clients": work["clients"]},
            "method": work.get("method", "fedavg"),
            "model": work["model"],
            "training": {"clients_per_round": 10, "local_epochs": 1, "batch_size": 20, "lr": 0.05, **work["training"]},
            "evaluation": {"every": 0},
        }
        fs.run(spec, data=data, callbacks=[lambda record: ends.append(time.perf_counter())])
        return ends[-1] - ends[0]

    for line in sys.stdin:
        print(json.dumps(once(line.strip())), flush=True)


class Version:
    """A process that runs specs with the sources of one version."""

    def __init__(self, source: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(source)}
        command = [sys.executable, __file__, "--serve"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )

    def seconds(self, name: str) -> float:
        """Run a spec, and return the seconds of its rounds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        return float(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", nargs="?", default="HEAD")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--work", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    from paired import in_turns, ratio_of

    here = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory(prefix="fedstrata-before-") as place:
        archive = subprocess.run(["git", "archive", options.commit, "src"], cwd=here, capture_output=True, check=True)
        subprocess.run(["tar", "x", "-C", place], input=archive.stdout, check=True)
        before, now = Version(Path(place) / "src"), Version(here / "src")
        print(f"{'work':10}{'before, s':>12}{'now, s':>12}   before / now (95 % interval)")
        for name in options.work:
            first, second = in_turns(
                lambda name=name: before.seconds(name), lambda name=name: now.seconds(name), options.pairs
            )
            middle = [sorted(seconds)[len(seconds) // 2] for seconds in (first, second)]
            print(f"{name:10}{middle[0]:12.3f}{middle[1]:12.3f}   {ratio_of(first, second)}", flush=True)
        before.close()
        now.close()


if __name__ == "__main__":
    main()
