"""Results that were made before ``fedstrata reproduce``, for the cells of its tables that have the same spec.

    python benchmarks/take_over.py [docs/results]

A cell of a table takes a result over where the experiment is equal, and the first rounds of a longer run where only the
number of rounds differs (the learning rate is constant there). What was made then has no fingerprint and says so:
``source`` names the file. What ``fedstrata reproduce`` made itself stays.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import rebafl_tables

import fedstrata as fs
from fedstrata.papers.running import keep, known, of_curve
from fedstrata.papers.tables import Cell, Table, experiment_of, tables

RESULTS = Path(__file__).parent / "results"
Made = list[tuple[fs.Experiment, str, dict[str, Any]]]
"""Experiments, where their results are, and what is kept of them."""


def plain(experiment: fs.Experiment) -> fs.Experiment:
    """Without what decides no result."""
    training = experiment.training.model_copy(update={"workers": None})
    every = {"checkpoint_every": 1, "targets": (), "weight_diversity": False}
    evaluation = experiment.evaluation.model_copy(update=every)
    return experiment.model_copy(update={"training": training, "evaluation": evaluation})


def of_rebafl() -> Iterator[tuple[fs.Experiment, str, dict[str, Any]]]:
    kept = rebafl_tables.load()
    for cell in rebafl_tables.cells():
        if (figure := kept.get(cell.key)) is not None and not cell.validated:
            spec = dict(cell.spec)
            name = spec["method"]["name"]
            if name.startswith("other_readings:"):
                spec["method"] = {**spec["method"], "name": f"fedstrata.papers.{name}"}
            up = figure["mb_up"] * 1e6 / figure["rounds"]
            about = {"seconds": figure["seconds"], "bytes_up": round(up), "curve": figure["curve"]}
            yield plain(fs.Experiment.from_table(spec)), "benchmarks/results/rebafl.json", about


def of_stratify(found: Mapping[str, Cell]) -> Iterator[tuple[fs.Experiment, str, dict[str, Any]]]:
    """The old tables' specs were those of today's tables of the same name, but for the methods that came since."""
    kept = json.loads((RESULTS / "stratify.json").read_text())
    for table, methods in kept.items():
        for method, row in methods.items():
            for partition, cell in row.items():
                name = {"mnist": "mnist-batches"}.get(table, table)
                if (mine := found.get(f"stratify/{name}/{method}/{partition}/seed-0")) is None:
                    continue
                spec = experiment_of(mine)
                if spec.training.rounds != cell["epochs"]:
                    continue
                seconds = cell["seconds_an_epoch"] * cell["epochs"]
                curve = [round(100 * value, 2) for value in cell["curve"]]
                about = {"seconds": seconds, "hops": cell["hops_an_epoch"], "curve": curve}
                yield plain(spec), "benchmarks/results/stratify.json", about


def of_fedssar(found: Mapping[str, Cell]) -> Iterator[tuple[fs.Experiment, str, dict[str, Any]]]:
    settings = {
        (n, s): f"{n:,}, {name}" for n in (100, 1000) for s, name in ((2, "non-IID"), (1, "non-IID2"), (0, "IID"))
    }
    for row in json.loads((RESULTS / "fedssar_mnist.json").read_text()):
        label = {"fedssar-updates": "fedssar, updates"}.get(row["method"], row["method"])
        column = settings[row["clients"], row["shards"]]
        mine = found[f"fedssar/mnist/{label}/{column}/seed-0"]
        about = {key: row[key][0] for key in ("mean", "final", "best")}
        yield plain(experiment_of(mine)), "benchmarks/results/fedssar_mnist.json", about


def of_samplers(found: Mapping[str, Cell]) -> Iterator[tuple[fs.Experiment, str, dict[str, Any]]]:
    for row in json.loads((RESULTS / "samplers_mnist.json").read_text()):
        column = f"{'shares' if row['balance'] == 'client' else 'class'}, α = {row['alpha']:g}"
        for seed in range(row["seeds"]):
            mine = found.get(f"fedstas/readings/{row['method']}/{column}/seed-{seed}")
            if mine is not None:
                about = {key: row[key][seed] for key in ("final", "last10", "best")}
                about["seconds"] = row["seconds"]
                yield plain(experiment_of(mine)), "benchmarks/results/samplers_mnist.json", about


def of(cell: Cell, made: Made) -> dict[str, Any] | None:
    """What there is for a cell."""
    experiment = plain(experiment_of(cell))
    rounds = experiment.training.rounds
    for other, source, about in made:
        longer = other.training.rounds
        if longer < rounds or (longer > rounds and experiment.training.schedule != "constant"):
            continue
        training = other.training.model_copy(update={"rounds": rounds})
        if other.model_copy(update={"training": training}) != experiment:
            continue
        found = {"spec_sha256": cell.hash, "source": source, "rounds": rounds, **about}
        if "curve" in about:
            curve = about["curve"][:rounds]
            found |= {**of_curve(curve), "curve": curve}
            found["seconds"] = round(about["seconds"] * rounds / longer, 1)
        return found
    return None


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/results")
    cells: dict[str, tuple[Table, Cell]] = {
        f"{name}/{cell.key}": (table, cell) for name, table in tables().items() for cell in table.cells()
    }
    found = {key: cell for key, (_, cell) in cells.items()}
    made = [*of_rebafl(), *of_stratify(found), *of_fedssar(found), *of_samplers(found)]
    there, taken = known(out), 0
    for table, cell in cells.values():
        old = there.get(cell.hash)
        if (old is None or "source" in old) and (result := of(cell, made)) is not None:
            keep(out, table, {cell.key: result})
            taken += 1
    print(f"{taken} cells taken over")


if __name__ == "__main__":
    main()
