"""Copy results of ``rebafl_tables.py`` to the cells of ``fedstrata reproduce`` that have the same spec.

    python benchmarks/take_over.py take [--out docs/results] && fedstrata reproduce --show --out docs/results
    python benchmarks/take_over.py repeat [TABLE …] [--rounds 10] [--out docs/results]

``take`` copies a result to a cell if the experiment is equal. If only the number of rounds differs, it copies the first
rounds of the longer run; this is correct because the learning rate is constant. A copied result has no fingerprint, and
its ``source`` names the original file. Results of ``fedstrata reproduce`` itself are not replaced. ``repeat`` runs the
first rounds of copied cells again and stores the difference between their accuracies and the copied accuracies. If the
difference is more than one percentage point, all cells that were copied from the same run are removed. ``take`` would
copy them again, so run ``repeat`` after it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rebafl_tables
from filelock import FileLock

import fedstrata as fs
from fedstrata.papers.running import keep, known, of_curve, read, results_file
from fedstrata.papers.tables import Cell, Table, experiment_of, tables

LIMIT = 1.0
"""The largest accepted difference in percentage points. Results differ because versions of PyTorch round bfloat16
differently, and the accuracy changes by five to ten points from one round to the next."""
SOURCE = "benchmarks/results/rebafl.json"
Made = list[tuple[fs.Experiment, dict[str, Any]]]
"""Pairs of an experiment and its stored result."""


def plain(experiment: fs.Experiment) -> fs.Experiment:
    """Return the experiment without settings that do not influence results, such as the number of workers."""
    training = experiment.training.model_copy(update={"workers": None})
    every = {"checkpoint_every": 1, "targets": (), "weight_diversity": False}
    evaluation = experiment.evaluation.model_copy(update=every)
    return experiment.model_copy(update={"training": training, "evaluation": evaluation})


def made() -> Iterator[tuple[fs.Experiment, dict[str, Any]]]:
    kept = rebafl_tables.load()
    for cell in rebafl_tables.cells():
        if (figure := kept.get(cell.key)) is not None and not cell.validated:
            spec = dict(cell.spec)
            if (name := spec["method"]["name"]).startswith("other_readings:"):
                spec["method"] = {**spec["method"], "name": f"fedstrata.papers.{name}"}
            yield plain(fs.Experiment.from_table(spec)), figure


def of(cell: Cell, there: Made) -> dict[str, Any] | None:
    """Return the result that can be copied to a cell; None if there is none."""
    experiment = plain(experiment_of(cell))
    rounds = experiment.training.rounds
    for other, figure in there:
        longer = other.training.rounds
        if longer < rounds or experiment.training.schedule != "constant":
            continue
        training = other.training.model_copy(update={"rounds": rounds})
        if other.model_copy(update={"training": training}) == experiment:
            curve = figure["curve"][:rounds]
            return {
                "spec_sha256": cell.hash,
                "source": SOURCE,
                "rounds": rounds,
                **of_curve(curve),
                "seconds": round(figure["seconds"] * rounds / longer, 1),
                "bytes_up": round(figure["mb_up"] * 1e6 / longer),
                "curve": curve,
            }
    return None


def take(out: Path) -> None:
    """Copy all results that fit a cell."""
    there, old, taken = list(made()), known(out), 0
    for table in tables().values():
        for cell in table.cells():
            before = old.get(cell.hash, {"source": ""})
            if "source" in before and (result := of(cell, there)) is not None:
                keep(out, table, {cell.key: {**result, **{key: before[key] for key in ("repeated",) if key in before}}})
                taken += 1
    print(f"{taken} cells taken over")


def repeat(out: Path, names: list[str], rounds: int) -> None:
    """Run the first rounds of copied cells again, and store the difference from the copied accuracies."""
    everywhere = [(table, cell) for table in tables().values() for cell in table.cells()]
    for name, table in tables().items():
        for cell in table.cells() if not names or name in names else []:
            before = known(out).get(cell.hash, {})
            if "source" not in before or "curve" not in before or before.get("repeated", {}).get("rounds", 0) >= rounds:
                continue
            experiment = experiment_of(cell)
            training = experiment.training.model_copy(update={"rounds": min(rounds, before["rounds"])})
            history = fs.run(experiment.model_copy(update={"training": training}))
            now = [100 * record["accuracy"] for record in history]
            off = max(abs(a - b) for a, b in zip(now, before["curve"], strict=False))
            found = {"rounds": len(now), "points": round(off, 2), "version": fs.__version__}
            there = known(out)
            for other, same in everywhere:
                result = there.get(same.hash, {})
                if not of_one_run(result, before):
                    continue
                if off <= LIMIT:
                    keep(out, other, {same.key: {**result, "repeated": found}})
                else:
                    drop(out, other, same)
            print(f"{name}/{cell.key}: {found}", flush=True)


def of_one_run(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Return True if two results were copied from the same run, perhaps with different numbers of rounds."""
    shared = min(len(a.get("curve", [])), len(b.get("curve", [])))
    return shared > 1 and a.get("source") == b.get("source") and a["curve"][:shared] == b["curve"][:shared]


def drop(out: Path, table: Table, cell: Cell) -> None:
    """Remove a cell's result from the file of a table."""
    path = results_file(out, table)
    with FileLock(path.with_suffix(".lock")):
        left = {key: result for key, result in read(path).items() if key != cell.key}
        path.write_text("{}\n", encoding="utf-8")
    keep(out, table, left)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["take", "repeat"])
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="tables to repeat, as PAPER/TABLE (default: all)")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    if options.what == "take":
        take(options.out)
    else:
        repeat(options.out, options.tables, options.rounds)


if __name__ == "__main__":
    main()
