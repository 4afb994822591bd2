"""FedSSAR on MNIST: shards of one label, 2 or 1 a client, or IID; 100 and 1,000 clients (FedSSAR, Tables 1 and 2).

    python benchmarks/fedssar_mnist.py run --out DIR [--seeds 0,1,2]
    python benchmarks/fedssar_mnist.py table --out DIR [--results benchmarks/results]

``run`` is resumable. Settings of the paper: an MLP 200-100, 50 rounds, 10 % of the clients a round, η = 0.1 / (1 + t),
weight decay 0.001, μ = 0.001 for FedProx. The paper gives SCAFFOLD K = 12 and 1 local steps at 100 and 1,000 clients:
one pass over 600 and 60 samples in batches of 50, which all methods get here. α is μ, so that only the sampling
differs between FedProx and FedSSAR. ``fedssar-updates`` clusters by w_k − w_t instead of w_k.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import fedstrata as fs

METHODS: dict[str, dict[str, object]] = {
    "fedavg": {"name": "fedavg"},
    "fedprox": {"name": "fedprox", "mu": 0.001},
    "scaffold": {"name": "scaffold"},
    "fedssar": {"name": "fedssar", "alpha": 0.001},
    "fedssar-updates": {"name": "fedssar", "alpha": 0.001, "features": "updates"},
}
IID = ("fedavg", "fedssar")
SETTINGS = [(clients, shards) for clients in (100, 1000) for shards in (2, 1, 0)]
"""Clients, and shards of each; 0 for IID data, where FedSSAR should see one cluster."""


def experiments(clients: int, shards: int, rounds: int) -> dict[str, fs.Experiment]:
    """By label."""
    return {
        label: fs.Experiment(
            data="mnist",
            partition=fs.Shards(clients=clients, per_client=shards) if shards else fs.IID(clients=clients),
            method=method,
            model={"name": "mlp", "hidden": [200, 100]},
            training={
                "rounds": rounds,
                "clients_per_round": clients // 10,
                "local_epochs": 1,
                "batch_size": 50,
                "lr": 0.1,
                "schedule": "inverse",
                "weight_decay": 1e-3,
            },
            evaluation=fs.Evaluation(checkpoint_every=25, targets=[0.5, 0.7]),
        )
        for label, method in METHODS.items()
        if shards or label in IID
    }


def place(out: Path, clients: int, shards: int) -> Path:
    return out / f"{clients}-clients-{shards}-shards"


def collect(out: Path) -> list[dict[str, object]]:
    """What is finished."""
    rows = []
    for clients, shards in SETTINGS:
        for label in METHODS:
            found = sorted((place(out, clients, shards) / label).glob("seed-*/summary.json"))
            if not found:
                continue
            runs = [fs.History.load(path.parent) for path in found]
            curves = [[record["accuracy"] for record in run] for run in runs]
            clusters = [[len(record["strata_sizes"]) for record in run if "strata_sizes" in record] for run in runs]
            rows.append(
                {
                    "clients": clients,
                    "shards": shards,
                    "method": label,
                    "seeds": len(runs),
                    "mean": [round(100 * statistics.mean(curve), 2) for curve in curves],
                    "final": [round(100 * curve[-1], 2) for curve in curves],
                    "best": [round(100 * max(curve), 2) for curve in curves],
                    "clusters_first": [each[0] for each in clusters if each],
                    "clusters_last": [each[-1] for each in clusters if each],
                }
            )
    return rows


def spread(values: list[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{deviation}"


def markdown(rows: list[dict[str, object]]) -> str:
    lines = [
        "| clients | labels each | method | seeds | mean over the rounds, % | final, % | best, % "
        "| clusters, first and last round |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        counts = f"{row['clusters_first']} → {row['clusters_last']}" if row["clusters_first"] else "–"
        lines.append(
            f"| {row['clients']} | {row['shards'] or 'IID'} | {row['method']} | {row['seeds']} | {spread(row['mean'])} "
            f"| {spread(row['final'])} | {spread(row['best'])} | {counts} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", choices=["run", "table"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--results", type=Path, help="also write fedssar_mnist.json and .md there")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    if options.work == "run":
        for clients, shards in SETTINGS:
            began = time.time()
            wanted = experiments(clients, shards, options.rounds)
            fs.compare(wanted, seeds=seeds, out=place(options.out, clients, shards), jobs=1)
            print(f"{clients} clients, {shards} shards: {time.time() - began:.0f} s", file=sys.stderr, flush=True)
    rows = collect(options.out)
    print(markdown(rows))
    if options.results:
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / "fedssar_mnist.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        (options.results / "fedssar_mnist.md").write_text(markdown(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
