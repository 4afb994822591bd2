"""Compare the strata that k-means finds from both starts (random clients, k-means++), on gradients of a finished run.

    fedstrata reproduce fedstas/mnist --seeds 0 --out OUT
    python benchmarks/kmeans_start.py OUT/runs/fedstas/mnist/fedsts/*/seed-0 [--starts 40] [--results DIR]

The gradients are those in the run's last checkpoint, and both starts use the same seeds. ``highest_samples`` is the
largest possible value of ``samples``, in which each client's own main label is counted. In the table, a cell contains
the purity of a single start, with the same seed for all methods.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from fedstrata.reporting.replayed_strata import View, strata_of_folder
from fedstrata.runs.run_folder import prepare_again
from fedstrata.sampling.allocation import allocated, spread
from fedstrata.sampling.stratified import Start, stratify

STARTS: tuple[Start, ...] = ("random", "k-means++")


def measured(view: View, count: int, draws: int, seed: int, start: Start) -> dict[str, float]:
    """Divide the clients of a run into strata from one start, and measure these strata.

    Returns:
        ``samples``: the percentage of samples whose label is the most frequent in their stratum. ``clients``: the
        percentage of clients whose main label is the most frequent main label in their stratum. ``undrawn``: the
        percentage of strata without a draw, by Neyman's allocation. ``largest``: the clients in the largest stratum.
        ``within``: the sum of squared distances of the gradients from the mean of their stratum.
    """
    strata = stratify(view.points, count, seed, view.round, start)
    main, sizes = np.eye(view.labels.shape[1])[view.labels.argmax(axis=1)], np.bincount(strata)
    groups = [np.flatnonzero(strata == stratum) for stratum in range(len(sizes))]
    deviations = spread(view.points, strata, len(sizes))
    allocation, _ = allocated("neyman", draws, sizes, deviations, np.random.default_rng(seed))
    return {
        "samples": 100 * sum(view.labels[group].sum(axis=0).max() for group in groups) / view.labels.sum(),
        "clients": 100 * sum(main[group].sum(axis=0).max() for group in groups) / len(strata),
        "undrawn": 100 * float((allocation == 0).mean()),
        "largest": float(sizes.max()),
        "within": float((sizes * deviations**2).sum() * view.points.shape[1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="run folders of FedSTS or FedSTaS")
    parser.add_argument("--starts", type=int, default=40, help="number of random starts of k-means")
    parser.add_argument("--results", type=Path, help="folder to write kmeans_start.json to")
    options = parser.parse_args()
    rows = []
    for folder in options.runs:
        spec, view = prepare_again(folder, "strata").spec, strata_of_folder(folder)
        count, draws = spec.method.strata, spec.training.clients_per_round
        for start in STARTS:
            each = [measured(view, count, draws, seed, start) for seed in range(options.starts)]
            figures = {name: [result[name] for result in each] for name in each[0]}
            row = {"partition": spec.to_spec()["partition"], "seed": spec.seed, "round": view.round, "start": start}
            row |= {
                "starts": options.starts,
                "highest_samples": 100 * view.labels.max(axis=1).sum() / view.labels.sum(),
            }
            for name, values in figures.items():
                row |= {name: round(float(np.mean(values)), 2), f"{name}_sd": round(float(np.std(values, ddof=1)), 2)}
            rows.append({**row, "highest_samples": round(float(row["highest_samples"]), 2)})
            print(json.dumps(rows[-1]))
    if options.results:
        (options.results / "kmeans_start.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
