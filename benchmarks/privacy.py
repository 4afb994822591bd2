"""Measure the sizes of clients' parts of Stratify's batches, what attacks recover, and what a minimum size costs.

    python benchmarks/privacy.py run
    python benchmarks/privacy.py table [--page docs/results/privacy-audits.md]

``run`` skips the cells that are already in ``benchmarks/results``, so it can be stopped at any time. ``table`` writes
tables between the marks of the page.

A cell is a number of clients (20 or 100), a value of ``privacy.min_samples`` and a seed. It trains an MLP of 784-200-10
on MNIST, divided by Dirichlet(0.5), for 3 epochs with batches of 32 samples, and attacks some of the parts with the
smallest size that is allowed. Other cells attack a small CNN, whose first layer is not linear, with 20 clients and 200
samples of each class per epoch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from marks import write

import fedstrata as fs
from fedstrata.audits.gradients import Attacker, Tap
from fedstrata.audits.pixels import Pixels
from fedstrata.base.jsonl import write_json
from fedstrata.base.process import training_process

RESULTS = Path(__file__).parent / "results" / "privacy.json"
CLIENTS, LEAST, SEEDS = (20, 100), (1, 2, 4, 8), (0, 1, 2)
EPOCHS, PARTS, STEPS = 3, 8, 300


def spec_of(clients: int, least: int, seed: int, cnn: bool) -> fs.Experiment:
    return fs.Experiment.from_table(
        {
            "seed": seed,
            "data": "mnist",
            "partition": {"name": "dirichlet", "alpha": 0.5, "clients": clients},
            "model": {"name": "cnn"} if cnn else {"name": "mlp", "hidden": [200]},
            "method": {"name": "stratify", **({"cap": 200} if cnn else {})},
            "privacy": {"min_samples": least},
            "training": {"rounds": EPOCHS, "batch_size": 32, "lr": 0.1, "workers": 1},
        }
    )


def cell(clients: int, least: int, seed: int, cnn: bool = False) -> dict[str, Any]:
    began, spec = time.process_time(), spec_of(clients, least, seed, cnn)
    prepared = fs.prepare(spec)
    with training_process(1), fs.Simulation(prepared) as simulation:
        tap = Tap(simulation.context, simulation.store, [least], PARTS, seed)
        simulation.federation.engine = tap
        records = list(simulation)
        trained = time.process_time() - began
        attacker = Attacker(prepared, Pixels.of(prepared.data), STEPS, seed)
        finding = attacker.attack(least, tap.counts[least], tap.kept[least])
    added = ("samples", "scheduled", "transfers", "bytes_up", "bytes_down", "held_back", "exchanges")
    return {
        "model": spec.model.name,
        "clients": clients,
        "min_samples": least,
        "seed": seed,
        "accuracy": records[-1]["accuracy"],
        **{key: sum(record.get(key, 0) for record in records) for key in added},
        "parts": {str(size): count for size, count in sorted(tap.counts.items())},
        "attack": asdict(finding),
        "seconds": {"trained": trained, "all": time.process_time() - began},
    }


def run() -> None:
    done = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for seed in SEEDS:
        for clients in CLIENTS:
            for least in LEAST:
                one(done, f"{clients} clients, {least}, seed {seed}", clients, least, seed)
        for least in LEAST:
            one(done, f"cnn, {least}, seed {seed}", CLIENTS[0], least, seed, cnn=True)


def one(done: dict[str, Any], label: str, *about: int, cnn: bool = False) -> None:
    """Run a cell and write its result, if ``done`` does not contain it."""
    if label not in done:
        done[label] = cell(*about, cnn)
        write_json(RESULTS, done)
        print(label, done[label]["seconds"], flush=True)


def spread(values: list[float], form: str = "{:.1f}") -> str:
    """Return the mean ± the standard deviation over the seeds as text."""
    if len(values) < 2:
        return form.format(values[0])
    return f"{form.format(statistics.fmean(values))} ± {form.format(statistics.stdev(values))}"


def tables(done: dict[str, Any]) -> str:
    """Return tables of all finished cells in Markdown."""
    cells: dict[tuple[int, int], list[dict[str, Any]]] = {}
    convolutional: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for one in done.values():
        group = convolutional if one.get("model") == "cnn" else cells
        group.setdefault((one["clients"], one["min_samples"]), []).append(one)
    seeds = max(len(group) for group in cells.values())
    lines = [
        "**Percentage of clients' gradients that are computed from few samples**, if `min_samples` is not set. "
        f"All tables show means ± standard deviations over {seeds} seeds."
    ]
    lines += [
        "",
        "| clients | gradients of 1 sample | of under 4 samples | of under 8 samples |",
        "|---:|---:|---:|---:|",
    ]
    for clients in CLIENTS:
        if group := cells.get((clients, 1)):
            shares = [spread([100 * below(one, size) for one in group]) + " %" for size in (2, 4, 8)]
            lines.append(f"| {clients} | {' | '.join(shares)} |")
    lines += ["", "**Results of the attacks**, by the number of samples in a gradient.", ""]
    head = "| model | clients | samples | labels right | by chance | exact by a row | error | class mean | recognised |"
    lines += [head, "|---|---:|---:|---:|---:|---:|---:|---:|---:|"]
    for model, those in (("MLP", cells), ("CNN", convolutional)):
        for (clients, least), group in sorted(those.items()):
            if found := [one["attack"] for one in group if one["attack"]["attacked"]]:
                lines.append(f"| {model} | {clients} | {least} | {' | '.join(got(found))} |")
        explained = "*Difference* is the paired difference from `min_samples` = 1. "
    explained += "*Trained* and *held back* are the percentages of samples that were trained and held back."
    lines += ["", f"**Cost of `min_samples`** after {EPOCHS} epochs. {explained}", ""]
    head = "| clients | `min_samples` | accuracy | difference, points | gradients sent | sent by clients | trained "
    lines += [f"{head}| held back |"]
    lines += ["|---:|---:|---:|---:|---:|---:|---:|---:|"]
    for (clients, least), group in sorted(cells.items()):
        plain = {one["seed"]: one for one in cells.get((clients, 1), [])}
        same = [(one, plain[one["seed"]]) for one in group if one["seed"] in plain]
        trained = [100 * one["samples"] / before["samples"] for one, before in same]
        points = [100 * (one["accuracy"] - before["accuracy"]) for one, before in same]
        row = [
            spread([100 * one["accuracy"] for one in group], "{:.2f}") + " %",
            spread(points, "{:+.2f}").replace("± +", "± ") if least > 1 and points else "–",
            spread([one["transfers"] / 1000 for one in group], "{:.1f}") + " k",
            spread([one["bytes_up"] / 1e9 for one in group], "{:.1f}") + " GB",
            spread(trained, "{:.2f}") + " %" if trained else "–",
            spread([100 * one["held_back"] / one["scheduled"] for one in group], "{:.3f}") + " %",
        ]
        lines.append(f"| {clients} | {least} | {' | '.join(row)} |")
    return "\n".join(lines)


def got(found: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the results of the attacks as cells of a table."""
    for key in ("labels", "labels_chance", "rows"):
        values = [of[key] for of in found]
        yield "–" if None in values else spread([100 * value for value in values], "{:.0f}") + " %"
    for key in ("error", "error_mean"):
        yield spread([of[key] for of in found], "{:.3f}")
    yield spread([100 * of["recognised"] for of in found], "{:.0f}") + " %"


def below(one: dict[str, Any], size: int) -> float:
    """Return the fraction of a cell's parts that have fewer than ``size`` samples."""
    total = sum(one["parts"].values())
    return sum(count for each, count in one["parts"].items() if int(each) < size) / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("work", choices=("run", "table"))
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.work == "run":
        run()
    else:
        write(options.page, "privacy", tables(json.loads(RESULTS.read_text())).splitlines())


if __name__ == "__main__":
    main()
