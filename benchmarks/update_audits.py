"""Audit updates on MNIST with sums off and on, and at ε of 1, 3 and 8.

    python benchmarks/update_audits.py run
    python benchmarks/update_audits.py table [--page docs/results/privacy-audits.md]

``run`` skips the cells that are already in ``benchmarks/results``, so it can be stopped at any time. ``table`` writes
tables between the marks of the page.

A cell is a setting and a seed. Twelve clients have eight images each, and an MLP with 64 hidden units trains for five
rounds of one step per client. ``fedstrata audit updates`` attacks the last round: the twelve updates, and their sum.
``fedstrata audit canaries`` trains again with 2,000 canaries. With ``privacy.dp``, it also divides the noise by 10. In
this control, the bound should be above ε.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from marks import write

import fedstrata as fs
from fedstrata.audits import canaries, updates
from fedstrata.audits.intervals import Rate
from fedstrata.base.jsonl import write_json
from fedstrata.federation.settings import DPSGD
from fedstrata.runs.accountant import Accountant

RESULTS = Path(__file__).parent / "results" / "update_audits.json"
CLIENTS, IMAGES, ROUNDS, SEEDS, CANARIES = 12, 8, 5, (0, 1, 2), 2000
SETTINGS: dict[str, float | None] = {"plain": None, "secure": None, "8": 8.0, "3": 3.0, "1": 1.0}
"""The settings: plain sums, secure sums, and the ε of plain sums with noise."""


def spec_of(setting: str, seed: int) -> fs.Experiment:
    epsilon = SETTINGS[setting]
    noise = {} if epsilon is None else {"dp": {"clip": 1.0, "noise": noise_for(epsilon), "delta": 1e-5}}
    return fs.Experiment.from_table(
        {
            "seed": seed,
            "data": {"name": "mnist", "limit": CLIENTS * IMAGES},
            "partition": {"name": "iid", "clients": CLIENTS},
            "model": {"name": "mlp", "hidden": [64]},
            "method": "fedavg",
            "privacy": {"sums": "secure"} if setting == "secure" else noise,
            "training": {
                "rounds": ROUNDS,
                "clients_per_round": CLIENTS,
                "local_steps": 1,
                "batch_size": IMAGES,
                "lr": 0.1,
                "workers": 1,
            },
            "evaluation": {"every": ROUNDS, "checkpoint_every": 1},
        }
    )


def noise_for(epsilon: float) -> float:
    """Return the smallest noise, rounded up to 0.01, with which a client that trains in all rounds spends at most ε."""
    training = fs.Experiment(training={"local_steps": 1, "batch_size": IMAGES}).training

    def spent(noise: int) -> float:
        dp = DPSGD(clip=1.0, noise=noise / 100)
        return Accountant(dp, training, np.array([IMAGES])).largest(np.array([ROUNDS]))

    low, high = 1, 10_000
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if spent(middle) <= epsilon else (middle, high)
    return high / 100


def cell(setting: str, seed: int) -> dict[str, Any]:
    began, spec = time.process_time(), spec_of(setting, seed)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        history = fs.run(spec, out=run)
        audit = updates.audit_updates(run, parts=CLIENTS, steps=100, seed=seed)
        bounds = {"audit": canaries.audit_canaries(run, canaries=CANARIES, seed=seed)}
        if spec.privacy.dp is not None:
            bounds["control"] = canaries.audit_canaries(run, canaries=CANARIES, seed=seed, divide_noise=10)
    return {
        "setting": setting,
        "seed": seed,
        "accuracy": history[-1]["accuracy"],
        "updates": updates.to_json(audit),
        "canaries": {name: canaries.to_json(bound) for name, bound in bounds.items()},
        "seconds": time.process_time() - began,
    }


def run() -> None:
    for seed in SEEDS:
        for setting in SETTINGS:
            done = results()
            if (key := f"{setting}, seed {seed}") not in done:
                done[key] = cell(setting, seed)
                write_json(RESULTS, done)
                print(key, f"{done[key]['seconds']:.0f} s", flush=True)


def results() -> dict[str, Any]:
    """Return the results of the finished cells."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def spread(values: list[float], form: str = "{:.0f}") -> str:
    """Return the mean ± the standard deviation over the seeds as text."""
    if len(values) < 2:
        return form.format(values[0])
    return f"{form.format(statistics.fmean(values))} ± {form.format(statistics.stdev(values))}"


def of_view(cells: list[dict[str, Any]], view: int, value: Callable[[dict[str, Any]], float | None]) -> str:
    values = [value(each["updates"]["views"][view]) for each in cells]
    return "–" if None in values else f"{spread([100 * number for number in values if number is not None])} %"


def attacks(done: dict[str, Any]) -> Iterator[str]:
    """Yield the table of gradient inversion and membership inference."""
    yield "| noise | attacked | labels right | by chance | exact by a row | recognised | control | member found |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for setting, epsilon in SETTINGS.items():
        cells = [each for each in done.values() if each["setting"] == setting]
        for view, name in enumerate(("one client", "sum of 12")):
            if not cells or not cells[0]["updates"]["views"][view]["seen"]:
                continue
            columns = [
                of_view(cells, view, lambda each: each["inversion"]["labels"]),
                of_view(cells, view, lambda each: each["inversion"]["labels_chance"]),
                of_view(cells, view, lambda each: each["inversion"]["rows"]),
                of_view(cells, view, lambda each: each["inversion"]["recognised"]),
                of_view(cells, view, lambda each: each["control"]["recognised"]),
            ]
            pairs = [each["updates"]["views"][view]["membership"] for each in cells]
            rate = Rate.of(sum(each["right"] for each in pairs), sum(each["trials"] for each in pairs))
            columns.append(f"{100 * (rate.rate or 0):.0f} % [{100 * rate.low:.0f}, {100 * rate.high:.0f}]")
            noise = "none" if epsilon is None else f"ε = {epsilon:g}"
            yield f"| {noise} | {name} | {' | '.join(columns)} |"


def bounds(done: dict[str, Any]) -> Iterator[str]:
    """Yield the table of the lower bounds of ε."""
    yield "| noise | server sees | ε of the accountant | lower bound of ε | largest possible | bound, noise / 10 |"
    yield "|---|---|---:|---:|---:|---:|"
    for setting, epsilon in SETTINGS.items():
        cells = [each["canaries"] for each in done.values() if each["setting"] == setting]
        if not cells:
            continue
        audits = [each["audit"] for each in cells]
        claimed = "none" if epsilon is None else f"{audits[0]['epsilon']:.2f}"
        control = "–" if epsilon is None else spread([each["control"]["bound"] for each in cells], "{:.2f}")
        noise = "none" if epsilon is None else f"{audits[0]['noise']:.2f}"
        view = "sum of 12" if setting == "secure" else "one client"
        columns = [spread([each[key] for each in audits], "{:.2f}") for key in ("bound", "most")]
        yield f"| {noise} | {view} | {claimed} | {' | '.join(columns)} | {control} |"


def table(page: Path | None) -> None:
    done = results()
    write(page, "update audits", [*attacks(done), "", *bounds(done)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=("run", "table"))
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.work == "run":
        run()
    else:
        table(options.page)


if __name__ == "__main__":
    main()
