"""Measure what differential privacy of clients (``privacy.clients``) costs in accuracy.

    python benchmarks/client_privacy.py run
    python benchmarks/client_privacy.py table [--page docs/privacy/clients.md]

``run`` skips the cells that are already in ``benchmarks/results``, so it can be stopped at any time. ``table`` writes a
table between the marks of the page.

A cell is a number of clients, a model, a noise and a seed. Each client has 60 samples of 3 classes of Fashion-MNIST. A
round has half of 20 clients, a fifth of 100 clients or a tenth of 1,000 clients, on average.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from marks import write

import fedstrata as fs
from fedstrata.base.jsonl import write_json
from fedstrata.base.process import training_process
from fedstrata.federation.settings import ClientDP
from fedstrata.runs.client_accountant import ClientAccountant

RESULTS = Path(__file__).parent / "results" / "client_privacy.json"
PER_ROUND = {20: 10, 100: 20, 1000: 100}
MODELS: dict[str, list[int]] = {"logistic regression": [], "MLP with 64 units": [64]}
NOISES, SEEDS = (None, 0.5, 1.0, 4.0), (0, 1, 2)
CLIP, ROUNDS = 0.3, 60


def spec_of(clients: int, model: str, noise: float | None, seed: int) -> fs.Experiment:
    private = {} if noise is None else {"privacy": {"clients": {"clip": CLIP, "noise": noise}}}
    return fs.Experiment.from_table(
        {
            "seed": seed,
            "data": "fashion_mnist",
            "partition": {"name": "classes", "per_client": 3, "size": 60, "clients": clients},
            "model": {"name": "mlp", "hidden": MODELS[model]},
            "method": {"name": "fedavg", "client_sampler": "poisson", "aggregator": "mean"},
            "training": {
                "rounds": ROUNDS,
                "clients_per_round": PER_ROUND[clients],
                "local_epochs": 1,
                "batch_size": 20,
                "lr": 0.1,
                "workers": 1,
            },
            "evaluation": {"every": 0},
            **private,
        }
    )


def cell(clients: int, model: str, noise: float | None, seed: int) -> dict[str, Any]:
    """Train a model, and return its accuracy, its ε, and the ε without amplification by sampling."""
    began = time.process_time()
    invited = Counter[int]()
    with training_process(1), fs.Simulation(prepared(clients, model, noise, seed)) as run:
        records = []
        for record in run:
            records.append(record)
            invited.update(run.federation.log.invited)
        size = sum(w.numel() for w in run.evaluated().params.values())
    most, unsampled = max(invited.values()), None
    if noise is not None:
        unsampled = ClientAccountant(ClientDP(clip=CLIP, noise=noise), clients, None).epsilon(most)
    return {
        "clients": clients,
        "model": model,
        "parameters": size,
        "noise": noise,
        "seed": seed,
        "accuracy": records[-1]["accuracy"],
        "epsilon": records[-1].get("epsilon"),
        "most_invitations": most,
        "epsilon_not_sampled": unsampled,
        "clipped": sum(record.get("clipped", 0) for record in records) / sum(invited.values()),
        "seconds": time.process_time() - began,
    }


def prepared(clients: int, model: str, noise: float | None, seed: int) -> Any:
    """Prepare a cell without the warning about few clients."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"privacy\.clients")
        return fs.prepare(spec_of(clients, model, noise, seed))


def run() -> None:
    done = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for seed in SEEDS:
        for clients in PER_ROUND:
            for model in MODELS:
                for noise in NOISES:
                    label = f"{clients} clients, {model}, noise {noise}, seed {seed}"
                    if label not in done:
                        done[label] = cell(clients, model, noise, seed)
                        write_json(RESULTS, done)
                        print(label, done[label]["accuracy"], done[label]["seconds"], flush=True)


def table(done: dict[str, Any]) -> list[str]:
    """Return the lines of a table in Markdown of all finished cells."""
    cells: dict[tuple[int, str], dict[float | None, list[dict[str, Any]]]] = {}
    for one in done.values():
        cells.setdefault((one["clients"], one["model"]), {}).setdefault(one["noise"], []).append(one)
    lines = ["| clients | per round | model | without noise | noise 0.5 | noise 1 | noise 4 |"]
    lines += ["|---:|---:|---|---:|---:|---:|---:|"]
    for (clients, model), by_noise in sorted(cells.items()):
        size = f"{by_noise[None][0]['parameters']:,}"
        shown = [accuracy(by_noise[noise]) if noise in by_noise else "–" for noise in NOISES]
        lines.append(f"| {clients:,} | {PER_ROUND[clients]} | {model} ({size} parameters) | {' | '.join(shown)} |")
    lines += ["", "| clients | noise | ε | ε if sampling is not counted |", "|---:|---:|---:|---:|"]
    for clients in PER_ROUND:
        for noise in NOISES[1:]:
            group = [one for one in done.values() if (one["clients"], one["noise"]) == (clients, noise)]
            epsilon = group[0]["epsilon"]
            largest = max(one["epsilon_not_sampled"] for one in group)
            lines.append(f"| {clients:,} | {noise:g} | {epsilon:.1f} | {largest:.1f} |")
    return lines


def accuracy(group: list[dict[str, Any]]) -> str:
    """Return the mean accuracy ± the standard deviation over the seeds as text."""
    values = [100 * one["accuracy"] for one in group]
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{deviation} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("work", choices=("run", "table"))
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.work == "run":
        run()
    else:
        write(options.page, "client privacy", table(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
