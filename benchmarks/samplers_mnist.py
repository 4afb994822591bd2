"""MNIST with extreme label skew: the samplers of FedSTaS's experiment side by side (FedSTaS, sections 3.1 and 3.2).

    python benchmarks/samplers_mnist.py run --out DIR [--alphas 0.01,0.001] [--balances client,class] [--seeds 0,1,2]
        [--methods fedavg,fedsts,…]
    python benchmarks/samplers_mnist.py table --out DIR [--results benchmarks/results]

``run`` is resumable: it goes on where it was stopped and repeats nothing. ``table`` prints what is there.

The paper's settings: 100 clients, H = m = 10, q = 0.1, 3 local steps, η = 0.01, B = 128, d' = 9, K = 2,048, M = 100,
ε = 3, 99 rounds. Its text leaves open what a Dirichlet draw is over, so both readings are run. "class" cuts the samples
of each class among the clients: at α = 0.01 about 90 of 100 clients then hold a handful of samples or one. "client"
gives every client 600 samples of a mix of its own, nearly always one class. FedSampling wants as many samples a round
as FedSTaS requests on average, q · m/N of all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import fedstrata as fs

ROUNDS = 99
METHODS: dict[str, dict[str, object]] = {
    "fedavg": {"name": "fedavg"},
    "clustered": {"name": "clustered", "algorithm": 2},
    "fedsampling": {"name": "fedsampling", "samples": 600},
    "fedsts": {"name": "fedsts"},
    "fedstas": {"name": "fedstas"},
    "fedstas-ldp": {"name": "fedstas", "epsilon": 3.0, "bound": 100},
    "fedssar": {"name": "fedssar"},
    # Not in the paper: the same strata and importance sampling with weights that make them unbiased.
    "fedsts-ht": {"name": "fedsts", "aggregation": "horvitz-thompson"},
}
PAPER = {
    0.01: {"fedstas": "56.00", "fedstas-ldp": "54.67", "fedsts": "1.8 % less than FedSTaS"},
    0.001: {"fedstas": "61.90", "fedstas-ldp": "52.14", "fedsts": "17.6 % less than FedSTaS"},
}


def experiments(alpha: float, balance: str, rounds: int) -> dict[str, fs.Experiment]:
    """By label."""
    return {
        label: fs.Experiment(
            data="mnist",
            partition=fs.Dirichlet(alpha=alpha, clients=100, balance=balance),
            method=method,
            model={"name": "mlp", "hidden": [200, 100]},
            training={"rounds": rounds, "clients_per_round": 10, "local_steps": 3, "batch_size": 128, "lr": 0.01},
            evaluation=fs.Evaluation(checkpoint_every=33, targets=[0.3, 0.5, 0.6]),
        )
        for label, method in METHODS.items()
    }


def place(out: Path, alpha: float, balance: str) -> Path:
    return out / f"dirichlet-{alpha:g}-{balance}"


def run(out: Path, alphas: list[float], balances: list[str], seeds: list[int], rounds: int, only: list[str]) -> None:
    for balance in balances:
        for alpha in alphas:
            began = time.time()
            wanted = {label: spec for label, spec in experiments(alpha, balance, rounds).items() if label in only}
            fs.compare(wanted, seeds=seeds, out=place(out, alpha, balance), jobs=1)
            print(f"Dirichlet({alpha:g}) by {balance}: {time.time() - began:.0f} s", file=sys.stderr, flush=True)


def collect(out: Path, alphas: list[float], balances: list[str]) -> list[dict[str, object]]:
    """Mean and deviation over the seeds that are finished."""
    rows = []
    for balance in balances:
        for alpha in alphas:
            for label in METHODS:
                found = sorted((place(out, alpha, balance) / label).glob("seed-*/summary.json"))
                if not found:
                    continue
                runs = [fs.History.load(path.parent) for path in found]
                # The last round alone is noisy under such skew: the mean of the last ten too.
                tails = [[r["accuracy"] for r in run if r["accuracy"] is not None][-10:] for run in runs]
                figures = {
                    "final": [100 * run.summary["final_accuracy"] for run in runs],
                    "last10": [100 * statistics.mean(tail) for tail in tails],
                    "best": [100 * run.summary["best_accuracy"] for run in runs],
                }
                seconds = [sum(record["seconds"] for record in run) for run in runs]
                rows.append(
                    {
                        "balance": balance,
                        "alpha": alpha,
                        "method": label,
                        "seeds": len(runs),
                        "paper": PAPER[alpha].get(label, ""),
                        "seconds": round(statistics.mean(seconds), 1),
                        **{key: [round(value, 2) for value in values] for key, values in figures.items()},
                    }
                )
    return rows


def merged(results: Path, rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """The rows, and those of earlier result files that have more seeds or are of another setting."""
    found: dict[tuple[object, ...], dict[str, object]] = {}
    kept = results / "samplers_mnist.json"
    for row in [*(json.loads(kept.read_text()) if kept.is_file() else []), *rows]:
        key = (row["balance"], row["alpha"], row["method"])
        if key not in found or row["seeds"] >= found[key]["seeds"]:
            found[key] = row
    order = ["class", "client"], list(PAPER), list(METHODS)
    return sorted(
        found.values(),
        key=lambda row: [
            place.index(row[key]) for place, key in zip(order, ("balance", "alpha", "method"), strict=True)
        ],
    )


def spread(values: list[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{deviation}"


def markdown(rows: list[dict[str, object]]) -> str:
    lines = [
        "| Dirichlet over | α | method | seeds | final, % | mean of the last 10, % | best, % | paper, % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['balance']} | {row['alpha']} | {row['method']} | {row['seeds']} | {spread(row['final'])} "
        f"| {spread(row['last10'])} | {spread(row['best'])} | {row['paper'] or '–'} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", choices=["run", "table"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--alphas", default="0.01,0.001")
    parser.add_argument("--balances", default="client,class")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--results", type=Path, help="also write samplers_mnist.json and .md there")
    options = parser.parse_args()
    alphas = [float(alpha) for alpha in options.alphas.split(",")]
    balances = options.balances.split(",")
    if options.work == "run":
        seeds = [int(seed) for seed in options.seeds.split(",")]
        run(options.out, alphas, balances, seeds, options.rounds, options.methods.split(","))
    rows = (
        merged(options.results, collect(options.out, alphas, balances))
        if options.results
        else collect(options.out, alphas, balances)
    )
    table = markdown(rows)
    print(table)
    if options.results:
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / "samplers_mnist.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        (options.results / "samplers_mnist.md").write_text(table + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
