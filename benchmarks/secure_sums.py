"""Compare the time and the bytes of FedAvg with secure sums and with plain sums, over sites with mutual TLS.

    python benchmarks/secure_sums.py [--sites 10] [--repeats 5] [--rounds 6]

The server and the sites are processes on this machine. Each site has 1,000 samples and trains a model of a million
parameters for one epoch per round. Plain and secure deployments take turns. The value of a deployment is the median
over its rounds without the first one, in which data are loaded and a roster is formed, and without the last one, which
is evaluated. The medians and the ranges over all repetitions are written to ``benchmarks/results/secure_sums.json``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import fedstrata as fs
from fedstrata.base.jsonl import write_json
from fedstrata.sites.federation import Sites
from fedstrata.sites.local_deployment import try_out

RESULTS = Path(__file__).parent / "results" / "secure_sums.json"
PORT = 18543
SAMPLES, FEATURES, CLASSES, TESTS = 1000, 64, 10, 100
HIDDEN = [963, 963]
"""The widths of the hidden layers, with which the model has 1,000,567 parameters."""
Measured = dict[str, float]


def write_data(path: Path, sites: int) -> None:
    """Write random samples, which take as much time as real ones."""
    generator, count = np.random.default_rng(0), SAMPLES * sites
    x = generator.standard_normal((count + TESTS, FEATURES), dtype=np.float32)
    y = generator.integers(CLASSES, size=count + TESTS)
    np.savez(path, x_train=x[:count], y_train=y[:count], x_test=x[count:], y_test=y[count:])


def spec_of(data: Path, sites: int, rounds: int, sums: str) -> fs.Experiment:
    """Return the spec of a run in which all sites answer in each round."""
    training = {"rounds": rounds, "clients_per_round": sites, "local_epochs": 1, "lr": 0.01}
    return fs.Experiment.from_table(
        {
            "data": str(data),
            "partition": {"name": "iid", "clients": sites},
            "model": {"name": "mlp", "hidden": HIDDEN},
            "training": training,
            "evaluation": {"every": 0},
            "privacy": {"sums": sums},
        }
    )


def measure(place: Path, data: Path, sites: int, rounds: int, sums: str) -> Measured:
    """Run a deployment, and return the medians over its rounds."""
    own = {"catalog": [str(data)]}
    table: dict[str, Any] = {"server": {"port": PORT, **own}, "site": {f"s{site:02}": own for site in range(sites)}}
    made = spec_of(data, sites, rounds, sums)
    folder = try_out(made, Sites.model_validate(table), place, base_dir=place.parent, report=lambda line: None)
    history = fs.History.load(folder)
    if not all(record["clients_trained"] == sites for record in history):
        raise RuntimeError("a site did not answer in every round")
    inner = history[1:-1]
    return {
        "seconds": statistics.median(record["seconds"] for record in inner),
        "bytes_up": statistics.median(record["bytes_up"] for record in inner),
        "bytes_down": statistics.median(record["bytes_down"] for record in inner),
        "bytes_up_first": history[0]["bytes_up"],
    }


def summary(values: list[float]) -> Measured:
    """Return the median and the range of the values of all repetitions."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    found: dict[str, list[Measured]] = {"plain": [], "secure": []}
    with tempfile.TemporaryDirectory(prefix="fedstrata-secure-") as folder:
        data = Path(folder) / "data.npz"
        write_data(data, options.sites)
        for repeat in range(options.repeats):
            for sums, measured in found.items():
                place = Path(folder) / f"{sums}-{repeat}"
                measured.append(measure(place, data, options.sites, options.rounds, sums))
                print(repeat, sums, measured[-1], flush=True)
    table: dict[str, Any] = {
        "sites": options.sites,
        "repeats": options.repeats,
        "rounds": options.rounds,
        "parameters": sum(a * b + b for a, b in zip([FEATURES, *HIDDEN], [*HIDDEN, CLASSES], strict=True)),
        "samples": SAMPLES,
        "processors": os.cpu_count(),
    }
    for sums, measured in found.items():
        table[sums] = {key: summary([each[key] for each in measured]) for key in measured[0]}
    for key in ("seconds", "bytes_up", "bytes_down"):
        ratios = [s[key] / p[key] for s, p in zip(found["secure"], found["plain"], strict=True)]
        table[f"{key}_ratio"] = summary(ratios)
        print(f"{key}: secure / plain = {table[f'{key}_ratio']}", flush=True)
    write_json(options.out, table)


if __name__ == "__main__":
    main()
