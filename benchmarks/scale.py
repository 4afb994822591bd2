"""Measure the memory and the time of a round against the number of clients, of whom always 100 train.

    python benchmarks/scale.py [--data mnist] [--page docs/results/measurements.md]

Each number of clients runs in its own process, so that peak memory is measured separately. Every client has the same
number of samples, which repeat if there are not enough. The work of training is therefore always the same, and the
differences are the cost of clients that are not invited.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from marks import write

CLIENTS = (1_000, 10_000, 100_000)
SAMPLES, INVITED, ROUNDS = 6, 100, 12


def measure(data: str, clients: int) -> dict[str, float]:
    """Run an experiment in this process, and return its times and its peak memory."""
    import numpy as np

    import fedstrata as fs
    from fedstrata.data.partitions.base import Assignment

    class Repeated(fs.Partition):
        """Every client has SAMPLES samples, which repeat beyond the data set's size."""

        def split(self, dataset: fs.Dataset, seed: int) -> Assignment:
            order = np.random.default_rng(seed).permutation(dataset.train_size)
            indices = np.resize(order, self.clients * SAMPLES)
            return Assignment(indices, np.arange(self.clients + 1) * SAMPLES)

        def assign(self, labels: object, domains: object, rng: object) -> list[object]:
            raise NotImplementedError

    spec = fs.Experiment(
        data=data,
        partition=Repeated(clients=clients),
        availability=fs.Bernoulli(p=0.5),
        training=fs.Training(rounds=ROUNDS, clients_per_round=INVITED),
        evaluation=fs.Evaluation(every=0),
    )
    began = time.perf_counter()
    history = fs.run(spec)
    seconds = [record["seconds"] for record in history][1:-1]  # the first round is a warm-up, the last evaluates
    return {
        "clients": clients,
        "ms_a_round": 1000 * statistics.median(seconds),
        "seconds_in_all": time.perf_counter() - began,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--page", type=Path, help="page to write the table to, between the table's marks")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.data, options.one)))
        return
    lines = ["| clients | ms per round | ratio to 1,000 clients | peak memory, MB |", "|---|---|---|---|"]
    first = None
    for clients in CLIENTS:
        command = [sys.executable, __file__, "--data", options.data, "--one", str(clients)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        first = first or found["ms_a_round"]
        ratio = found["ms_a_round"] / first
        lines.append(f"| {clients:,} | {found['ms_a_round']:.1f} | {ratio:.2f} | {found['peak_mb']:.0f} |")
        print(lines[-1], flush=True)
    if options.page:
        write(options.page, "size", lines)


if __name__ == "__main__":
    main()
