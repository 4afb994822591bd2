"""Measure what noise from the clients costs in accuracy, compared with noise from the server (``privacy.clients``).

    python benchmarks/noise_shares.py run
    python benchmarks/noise_shares.py table [--page docs/privacy/clients.md]

``run`` skips the cells that are already in ``benchmarks/results``, so it can be stopped at any time. ``table`` writes a
table between the marks of the page. All cells together take a few minutes.

A cell is a data set, a noise, a way to add it, and a seed. Of 100 clients, 20 take part in a round, on average with
Poisson sampling. A client has 60 samples of 3 classes of Fashion-MNIST, or 14 or 15 samples of the digits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

from marks import write

import fedstrata as fs
from fedstrata.base.jsonl import write_json
from fedstrata.base.process import training_process

RESULTS = Path(__file__).parent / "results" / "noise_shares.json"
PARTITIONS: dict[str, dict[str, Any]] = {
    "fashion_mnist": {"name": "classes", "per_client": 3, "size": 60, "clients": 100},
    "digits": {"name": "iid", "clients": 100},
}
NAMES = {"fashion_mnist": "Fashion-MNIST", "digits": "digits"}
TRAINING = {
    "fashion_mnist": {"local_epochs": 1, "batch_size": 20, "lr": 0.1},
    "digits": {"local_epochs": 5, "batch_size": 20, "lr": 0.1},
}
CLIPS = {"fashion_mnist": 0.3, "digits": 0.5}
LIMIT = {"participations": 14}
PLAIN, SITES = {"sums": "plain"}, {"sums": "secure"}
SHARES = {**LIMIT, "noise_from": "sites"}
WAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "server, Poisson sampling": ("poisson", {}, PLAIN),
    "server": ("uniform", LIMIT, PLAIN),
    "sites, t = 20": ("uniform", SHARES, {**SITES, "parties": 20}),
    "sites, t = 14": ("uniform", SHARES, SITES),
}
"""For each way to add noise: the client sampler, the settings of ``privacy.clients``, and the settings of sums."""
NOISES, SEEDS, ROUNDS = (0.5, 1.0), (0, 1, 2), 60


def spec_of(data: str, way: str | None, noise: float, seed: int) -> fs.Experiment:
    """Return the spec of a cell. If ``way`` is None, nobody adds noise."""
    sampler, clients, privacy = ("uniform", {}, PLAIN) if way is None else WAYS[way]
    if way is not None:
        privacy = {**privacy, "clients": {"clip": CLIPS[data], "noise": noise, **clients}}
    return fs.Experiment.from_table(
        {
            "seed": seed,
            "data": data,
            "partition": PARTITIONS[data],
            "model": {"name": "mlp", "hidden": []},
            "method": {"name": "fedavg", "client_sampler": sampler, "aggregator": "mean"},
            "training": {"rounds": ROUNDS, "clients_per_round": 20, "workers": 1, **TRAINING[data]},
            "evaluation": {"every": 0},
            "privacy": privacy,
        }
    )


def cell(data: str, way: str | None, noise: float, seed: int) -> dict[str, Any]:
    """Train a model, and return its accuracy and its ε."""
    began = time.process_time()
    with training_process(1), fs.Simulation(fs.prepare(spec_of(data, way, noise, seed))) as run:
        records = list(run)
    return {
        "data": data,
        "way": way,
        "noise": noise,
        "seed": seed,
        "rounds": len(records),
        "failed": sum(not record["clients_trained"] for record in records),
        "accuracy": records[-1]["accuracy"],
        "epsilon": records[-1].get("epsilon"),
        "seconds": time.process_time() - began,
    }


def run() -> None:
    """Run the cells that are not in the results yet."""
    done = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    ways: list[tuple[str | None, float]] = [(None, 0.0), *((way, noise) for way in WAYS for noise in NOISES)]
    for seed in SEEDS:
        for data in PARTITIONS:
            for way, noise in ways:
                label = f"{data}, {way}, noise {noise}, seed {seed}"
                if label not in done:
                    done[label] = cell(data, way, noise, seed)
                    write_json(RESULTS, done)
                    print(label, done[label], flush=True)


def table(done: dict[str, Any]) -> list[str]:
    """Return the lines of a table in Markdown: a row for each way to add noise."""
    groups: dict[tuple[str, str | None, float], list[dict[str, Any]]] = {}
    for one in done.values():
        groups.setdefault((one["data"], one["way"], one["noise"]), []).append(one)
    columns = [f"{name}, noise {noise:g}" for name in NAMES.values() for noise in NOISES]
    columns += [f"ε, noise {noise:g}" for noise in NOISES]
    lines = [f"| noise added by | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    without = [shown for data in NAMES for shown in [accuracy(groups[data, None, 0.0])] * len(NOISES)]
    lines.append(f"| nobody | {' | '.join([*without, *('–' for _ in NOISES)])} |")
    for way in WAYS:
        shown = [accuracy(groups[data, way, noise]) for data in NAMES for noise in NOISES]
        epsilons = [max(one["epsilon"] for data in NAMES for one in groups[data, way, noise]) for noise in NOISES]
        shown += [f"{epsilon:.1f}" for epsilon in epsilons]
        lines.append(f"| {way} | {' | '.join(shown)} |")
    return lines


def accuracy(group: list[dict[str, Any]]) -> str:
    """Return the mean accuracy ± the standard deviation over the seeds as text."""
    values = [100 * one["accuracy"] for one in group]
    return f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("work", choices=("run", "table"))
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=r"privacy\.clients")
    if options.work == "run":
        run()
        return
    write(options.page, "noise shares", table(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
