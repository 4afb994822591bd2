"""Results of ``rebafl_tables.py`` for the cells of ``fedstrata reproduce`` that have the same spec.

    python benchmarks/take_over.py [docs/results] && fedstrata reproduce --show --out docs/results

A cell takes a result over where the experiment is equal, and the first rounds of a longer run where only the number of
rounds differs: the learning rate is constant. What was made so has no fingerprint and says so: ``source`` names the
file. What ``fedstrata reproduce`` made itself stays.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rebafl_tables

import fedstrata as fs
from fedstrata.papers.running import keep, known, of_curve
from fedstrata.papers.tables import Cell, experiment_of, tables

SOURCE = "benchmarks/results/rebafl.json"
Made = list[tuple[fs.Experiment, dict[str, Any]]]
"""Experiments and what is kept of them."""


def plain(experiment: fs.Experiment) -> fs.Experiment:
    """Without what decides no result."""
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
    """What there is for a cell."""
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


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/results")
    there, old, taken = list(made()), known(out), 0
    for table in tables().values():
        for cell in table.cells():
            if "source" in old.get(cell.hash, {"source": ""}) and (result := of(cell, there)) is not None:
                keep(out, table, {cell.key: result})
                taken += 1
    print(f"{taken} cells taken over")


if __name__ == "__main__":
    main()
