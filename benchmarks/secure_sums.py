"""Compare the time and the bytes of secure sums with those of plain sums.

    python benchmarks/secure_sums.py [CASE ...] [--repeats 5] [--out FILE] [--small]

The cases are:

- ``fedavg-sites``: rounds of FedAvg over ten sites with mutual TLS, which are processes on this machine. Each site has
  1,000 samples and trains a model of a million parameters for one epoch per round.
- ``stratify-sites``: epochs of Stratify with PowerSGD on MNIST over ten such sites.
- ``fedavg-simulation`` and ``stratify-simulation``: the same rounds in a simulation without masks.

Plain and secure runs take turns. The value of a run is the median over its rounds without the first one, in which data
are loaded and a roster is formed, and without the last one, which is evaluated. Each run is written to FILE as soon as
it has ended. A program that was stopped goes on with the next run. FILE also has the medians and the ranges of the
ratios over all pairs of runs.
"""

from __future__ import annotations

import argparse
import json
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
"""The widths of the hidden layers of FedAvg's model, with which it has 1,000,567 parameters."""
SUMS = ("plain", "secure")
Measured = dict[str, float]


def write_data(path: Path, sites: int) -> None:
    """Write random samples, which take as much time as real ones."""
    generator, count = np.random.default_rng(0), SAMPLES * sites
    x = generator.standard_normal((count + TESTS, FEATURES), dtype=np.float32)
    y = generator.integers(CLASSES, size=count + TESTS)
    np.savez(path, x_train=x[:count], y_train=y[:count], x_test=x[count:], y_test=y[count:])


def spec_of(method: str, data: Path, sums: str, small: bool) -> fs.Experiment:
    """Return the spec of a run in which all sites answer in each round."""
    sites = 3 if small else 10
    table: dict[str, Any] = {
        "method": method,
        "partition": {"name": "iid", "clients": sites},
        "training": {"rounds": 4, "clients_per_round": sites, "local_epochs": 1, "lr": 0.01},
        "evaluation": {"every": 0},
        "privacy": {"sums": sums},
    }
    if method == "fedavg":
        table |= {"data": str(data), "model": {"name": "mlp", "hidden": HIDDEN}}
    else:
        table |= {"data": {"name": "mnist", "limit": 3000} if small else "mnist", "model": "mlp"}
        table["communication"] = {"up": {"name": "powersgd", "rank": 2}}
        table["training"] |= {"rounds": 3, "batch_size": 1000}
    return fs.Experiment.from_table(table)


def measure(case: str, place: Path, data: Path, sums: str, small: bool) -> Measured:
    """Do a run, and return the medians over its rounds."""
    method, where = case.split("-")
    made = spec_of(method, data, sums, small)
    if where == "simulation":
        history = fs.run(made)
    else:
        own = {"catalog": [str(data)]} if method == "fedavg" else {"catalog": ["mnist"]}
        names = [f"s{site:02}" for site in range(made.training.clients_per_round or 0)]
        table: dict[str, Any] = {"server": {"port": PORT, **own}, "site": dict.fromkeys(names, own)}
        folder = try_out(made, Sites.model_validate(table), place, base_dir=place.parent, report=lambda line: None)
        history = fs.History.load(folder)
    if any(record["clients_failed"] or record["clients_dropped"] for record in history):
        raise RuntimeError("a site did not answer in every round")
    inner = history[1:-1]
    return {
        "seconds": statistics.median(record["seconds"] for record in inner),
        "bytes_up": statistics.median(record["bytes_up"] for record in inner),
        "bytes_down": statistics.median(record["bytes_down"] for record in inner),
        "exchanges": statistics.median(record["exchanges"] for record in inner),
        "bytes_up_first": history[0]["bytes_up"],
    }


def summary(values: list[float]) -> Measured:
    """Return the median and the range of the values of all repetitions."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def ratios_of(runs: dict[str, list[Measured]]) -> dict[str, Measured]:
    """Return the ratio of secure to plain runs for the time and for the bytes; empty before the first pair."""
    pairs = list(zip(runs["secure"], runs["plain"], strict=False))
    keys = ("seconds", "bytes_up", "bytes_down") if pairs else ()
    return {key: summary([secure[key] / plain[key] for secure, plain in pairs]) for key in keys}


CASES = ("fedavg-sites", "stratify-sites", "fedavg-simulation", "stratify-simulation")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", default=list(CASES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--small", action="store_true", help="use three sites and few samples, to test the program itself"
    )
    options = parser.parse_args()
    table: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    with tempfile.TemporaryDirectory(prefix="fedstrata-secure-") as folder:
        data = Path(folder) / "data.npz"
        write_data(data, 10)
        for case in options.cases:
            entry = table.setdefault(case, {"processors": os.cpu_count(), "runs": {sums: [] for sums in SUMS}})
            runs = entry["runs"]
            for repeat in range(options.repeats):
                for sums in SUMS:
                    if len(runs[sums]) > repeat:
                        continue
                    place = Path(folder) / f"{case}-{sums}-{repeat}"
                    runs[sums].append(measure(case, place, data, sums, options.small))
                    entry["secure / plain"] = ratios_of(runs)
                    write_json(options.out, table)
                    print(case, repeat, sums, runs[sums][-1], flush=True)
            print(case, "secure / plain:", entry["secure / plain"], flush=True)


if __name__ == "__main__":
    main()
