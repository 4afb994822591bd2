"""Test whether a composition of methods beats all four papers; ``docs/results/study.md`` has plan and answer.

    python benchmarks/compositions.py choose [--runs DIR]
    python benchmarks/compositions.py confirm [--runs DIR]
    python benchmarks/compositions.py table

Several processes of this program share the runs. An interrupted run continues from its checkpoint, and the result of a
finished run is written to ``benchmarks/results/study.json``. No run begins after the budget of core hours is spent.
``table`` writes the answer between the marks of the page.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from marks import write
from rebafl_tables import validation_arrays

import fedstrata as fs
from fedstrata.papers.comparing import difference_text
from fedstrata.reporting.statistics import paired_difference

HERE = Path(__file__).parent
PLAN: dict[str, Any] = tomllib.loads((HERE / "study" / "candidates.toml").read_text(encoding="utf-8"))
RESULTS = HERE / "results" / "study.json"
PAGE = HERE.parent / "docs" / "results" / "study.md"
CHOOSING, CONFIRMING = (100, 101), (200, 201, 202, 203, 204)
REFERENCE = "fedavg"
PAPERS = ("stratify", "fedstas", "fedssar", "rebafl")
BUDGETS = ("samples", "bytes")
SENT = "GB past FedAvg's samples | GB past FedAvg's bytes"
BUDGET_HOURS = 4.0
MOST_ROUNDS = 2_000
VERDICTS = {"above": "better", "below": "worse"}
CLOSE = 0.2
"""The difference in percentage points up to which candidates count as equal. Then, fewer bytes decide."""


class Spent(fs.Callback):
    """A callback that counts the samples and bytes of a run, and ends the run when both budgets are reached.

    Args:
        samples: The budget of samples that all clients process; None for no limit.
        bytes: The budget of bytes that are sent in both directions; None for no limit.
    """

    samples: float | None = None
    bytes: float | None = None

    def on_start(self, simulation: fs.Simulation) -> None:
        """Start to measure processor time."""
        self.began = time.process_time()

    def on_round(self, simulation: fs.Simulation, record: Mapping[str, Any]) -> None:
        """Record the accuracy at the first round in which a budget is reached."""
        told: dict[str, Any] = dict(simulation.memory.get("spent", {"samples": 0.0, "bytes": 0.0, "cpu": 0.0}))
        now = time.process_time()
        told["cpu"] += now - self.began
        self.began = now
        told["samples"] += record["samples"]
        told["bytes"] += record["bytes_up"] + record["bytes_down"]
        for key, most in (("samples", self.samples), ("bytes", self.bytes)):
            if most is not None and told[key] >= most and f"at_{key}" not in told:
                told[f"at_{key}"] = 100 * record["accuracy"]
                told[f"bytes_at_{key}"] = told["bytes"]
        simulation.memory["spent"] = told
        self.told = told
        if all(f"at_{key}" in told for key in BUDGETS):
            simulation.stop("both budgets are spent")


def spec_of(label: str, seed: int) -> dict[str, Any]:
    """Return the spec of a label. FedAvg ends after a number of rounds, other methods when both budgets are reached."""
    spec = {**PLAN["spec"], "seed": seed, "method": {**PLAN["rivals"], **PLAN["candidates"]}[label]}
    for key, change in PLAN["changes"].get(label, {}).items():
        spec[key] = {**spec.get(key, {}), **change}
    if label != REFERENCE:
        spec["training"] = {**spec["training"], "rounds": MOST_ROUNDS}
    return {**spec, "evaluation": {"checkpoint_every": 10}}


def load() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return found


def keep(key: str, result: dict[str, Any]) -> None:
    with FileLock(RESULTS.with_suffix(".lock")):
        done = load() | {key: result}
        rows = [f"{json.dumps(name)}: {json.dumps(done[name])}" for name in sorted(done)]
        RESULTS.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def hours() -> float:
    """Return the core hours of all finished runs."""
    return float(sum(result["cpu"] for result in load().values())) / 3600


def run(labels: list[str], seeds: tuple[int, ...], runs: Path) -> None:
    """Run experiments that are not finished. For each seed, FedAvg runs first, because it sets the budgets."""
    for seed in seeds:
        for label in [REFERENCE, *labels]:
            key = f"{label} | {seed}"
            folder = runs / key.replace(" | ", "/").replace(", ", "-").replace(" ", "-")
            folder.parent.mkdir(parents=True, exist_ok=True)
            try:
                # All processes wait until FedAvg has finished, because other runs need its budgets.
                held = FileLock(f"{folder}.lock").acquire(timeout=-1 if label == REFERENCE else 0)
            except Timeout:
                continue
            with held:
                if key in load():
                    continue
                if hours() >= BUDGET_HOURS:
                    sys.exit(f"{BUDGET_HOURS} core hours are spent; {key} and what comes after it is not run")
                keep(key, result_of(label, seed, folder))
                print(key, load()[key], flush=True)


def result_of(label: str, seed: int, folder: Path) -> dict[str, Any]:
    """Run an experiment, and return the accuracy at both budgets.

    For the seeds of ``CHOOSING``, the accuracy is measured on validation samples, and otherwise on the test set.
    """
    most = {} if label == REFERENCE else {key: load()[f"{REFERENCE} | {seed}"][key] for key in BUDGETS}
    spent = Spent(**most)
    data = validation_arrays(PLAN["spec"]["data"]["name"]) if seed in CHOOSING else None
    history = fs.run(spec_of(label, seed), out=folder, resume=folder.exists(), data=data, callbacks=[spent])
    found = {"rounds": len(history), **{key: round(value, 2) for key, value in spent.told.items()}}
    if label == REFERENCE:
        accuracy = round(100 * history[-1]["accuracy"], 2)
        found |= {"at_samples": accuracy, "at_bytes": accuracy, "bytes_at_samples": found["bytes"]}
    return found


def chosen() -> str | None:
    """Return the candidate that is best on the validation samples; None if some candidates have not run yet."""
    done = load()
    figures: dict[str, tuple[float, float]] = {}
    for label in PLAN["candidates"]:
        of = [done.get(f"{label} | {seed}") for seed in CHOOSING]
        if None in of and hours() < BUDGET_HOURS:
            return None
        if None not in of:
            there = [result for result in of if result]
            score = statistics.mean(result[f"at_{key}"] for result in there for key in BUDGETS)
            figures[label] = score, statistics.mean(result["bytes_at_samples"] for result in there)
    best = max(score for score, _ in figures.values())
    return min((label for label in figures if figures[label][0] > best - CLOSE), key=lambda label: figures[label][1])


def choosing_table() -> Iterator[str]:
    done = load()
    yield f"| method | seeds | past FedAvg's samples, % | past FedAvg's bytes, % | mean | {SENT} |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    best = chosen()
    for label in [*PLAN["rivals"], *PLAN["candidates"]]:
        of = [done[key] for seed in CHOOSING if (key := f"{label} | {seed}") in done]
        if not of:
            yield f"| {label} | not run | | | | | |"
            continue
        samples, sent = (statistics.mean(result[f"at_{key}"] for result in of) for key in BUDGETS)
        name = f"**{label}** (chosen)" if label == best else label
        mean = (samples + sent) / 2
        yield f"| {name} | {len(of)} | {samples:.1f} | {sent:.1f} | {mean:.1f} | {gigabytes(of)} |"


def gigabytes(of: list[dict[str, float]]) -> str:
    """Return the gigabytes sent until each of the two budgets was reached; the last round may exceed the budget."""
    sent = {key: [result.get(f"bytes_at_{key}", result["bytes"]) for result in of] for key in BUDGETS}
    return " | ".join(f"{statistics.mean(each) / 1e9:.2f}" for each in sent.values())


def confirming_table() -> Iterator[str]:
    best, done = chosen(), load()
    if best is None:
        return
    yield f"| method | seeds | past FedAvg's samples, % | past FedAvg's bytes, % | {SENT} |"
    yield "|---|---:|---:|---:|---:|---:|"
    for label in (best, *PAPERS, REFERENCE):
        of = [done[key] for seed in CONFIRMING if (key := f"{label} | {seed}") in done]
        if of:
            at = " | ".join(f"{statistics.mean(result[f'at_{key}'] for result in of):.1f}" for key in BUDGETS)
            yield f"| {label} | {len(of)} | {at} | {gigabytes(of)} |"
    yield ""
    yield f"| {best} compared with | past FedAvg's | difference, points | verdict |"
    yield "|---|---|---|---|"
    orders, seeds = [], []
    for rival in PAPERS:
        for budget in BUDGETS:
            ours, theirs = (
                {seed: done.get(f"{label} | {seed}", {}).get(f"at_{budget}") for seed in CONFIRMING}
                for label in (best, rival)
            )
            difference = paired_difference(ours, theirs, resolution=0.0, together=8)
            orders.append(difference.order())
            seeds.append(difference.n)
            verdict = VERDICTS.get(orders[-1], "not significant")
            yield f"| {rival} | {budget} | {difference_text(difference)} | {verdict} |"
    ahead = orders.count("above")
    unfinished = " (not finished)" if min(seeds) < len(CONFIRMING) else ""
    yield ""
    yield f"*{best}* is better in {ahead} of {len(orders)} comparisons{unfinished}. Core hours spent: {hours():.1f}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["choose", "confirm", "table"])
    parser.add_argument("--runs", type=Path, default=Path("runs/study"))
    options = parser.parse_args()
    if options.what == "choose":
        run([label for label in [*PLAN["candidates"], *PLAN["rivals"]] if label != REFERENCE], CHOOSING, options.runs)
    elif options.what == "confirm":
        if (best := chosen()) is None:
            sys.exit("not all candidates are run: python benchmarks/compositions.py choose")
        run([best, *PAPERS], CONFIRMING, options.runs)
    else:
        write(PAGE, "choosing", list(choosing_table()))
        write(PAGE, "confirming", list(confirming_table()))


if __name__ == "__main__":
    main()
