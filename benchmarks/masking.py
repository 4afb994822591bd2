"""Measure the time and the bytes of the enrolment with masked labels, for each mode and number of classes and clients.

    python benchmarks/masking.py [--quick]
    python benchmarks/masking.py --show

Writes ``masking.json``, ``masking.md`` and ``masking.png`` to ``benchmarks/results``, and the rows of the largest cell
between the marks of ``docs/privacy/masked-labels.md``. ``--show`` writes them again from ``masking.json``.

The cells are the cells of Stratify's Table IV: each client has 1 of 2, 5 of 10 or 50 of 100 classes. All modes of a
cell run one after another in one process with one thread, on the same labels. Fast modes run several times, and the
median is reported. ``ckks-paper`` in the largest cells takes minutes. Times are CPU time of this thread. Nothing waits
for a disk or a network, and other work on the machine is not included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from marks import write as write_between
from torch import nn

from fedstrata.base import style
from fedstrata.clients.client import ClientContext, StateStore
from fedstrata.data.dataset import from_arrays
from fedstrata.data.partitions.base import Assignment
from fedstrata.engines.local import LocalEngine
from fedstrata.federation.availability import Always
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.federation.settings import Training
from fedstrata.models.model import Model
from fedstrata.objectives.base import CrossEntropy
from fedstrata.reporting.axes import log_ticks
from fedstrata.runs.simulation import HANDLERS
from fedstrata.stratify.masking import enrolment
from fedstrata.stratify.masking.enrolment import enrol

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
import printed_protocol

enrolment._MODES[printed_protocol.MODE] = printed_protocol.enrol_printed

RESULTS = Path(__file__).parent / "results" / "masking"
PAGE = Path(__file__).parents[1] / "docs" / "privacy" / "masked-labels.md"
CELLS = ((2, 1), (10, 5), (100, 50))
CLIENTS = (5, 10, 20)
MODES = ("ckks-paper", "ckks", "prf", "none")
PHASES = ("unique list", "mapping", "counts")
GROWTH_LABELS = 10
GROWTH_CLIENTS, GROWTH_CLASSES = (10, 100, 1000), (10, 100, 1000)


def federation(clients: int, classes: int, labels: int, seed: int = 0) -> Federation:
    """Return a federation whose clients each hold one sample of ``labels`` random classes.

    Every class is at some client if this is possible.
    """
    generator = np.random.default_rng(seed)
    held = [generator.choice(classes, size=labels, replace=False) for _ in range(clients)]
    uses = np.bincount(np.concatenate(held), minlength=classes)
    for missing in np.flatnonzero(uses == 0).tolist():
        server_data = [(k, i) for k in range(clients) for i in range(labels) if uses[held[k][i]] > 1]
        if server_data:
            k, i = server_data[int(generator.integers(len(server_data)))]
            uses[held[k][i]] -= 1
            held[k][i], uses[missing] = missing, 1
    y = np.concatenate(held)
    names = [f"class {c}" for c in range(classes)]
    data = from_arrays(np.zeros((len(y), 1), np.float32), y, np.zeros((1, 1), np.float32), y[:1], class_names=names)
    assignment = Assignment.from_lists(np.split(np.arange(len(y)), clients))
    config = FederationConfig(
        seed, Training(), Model(nn.Linear(1, classes)), classes, clients, assignment.sizes, strata=classes
    )
    engine = LocalEngine(
        ClientContext(config, data, assignment, CrossEntropy(), HANDLERS + printed_protocol.HANDLERS), StateStore()
    )
    made = Federation(engine, config, Always(), "stratify")
    made.begin(0)
    return made


def measure(masking: str, clients: int, classes: int, labels: int) -> dict[str, Any]:
    """Run one enrolment, and return the seconds of each phase and the bytes per client; keys are counted separately."""
    asked = federation(clients, classes, labels)
    marks: list[tuple[str, float]] = [("keys", time.process_time())]
    roll = enrol(asked, masking, watch=lambda phase: marks.append((phase, time.process_time())))  # type: ignore[arg-type]
    marks.append(("end", time.process_time()))
    assert len(roll.held) == clients
    assert (roll.totals == np.bincount(np.concatenate(list(roll.held.values())))).all()
    seconds = {name: after - at for (name, at), (_, after) in itertools.pairwise(marks)}
    log = asked.log
    return {
        "masking": masking,
        "clients": clients,
        "classes": classes,
        "labels": labels,
        **{name: seconds.get(name, 0.0) for name in ("keys", *PHASES)},
        "seconds": sum(seconds[name] for name in PHASES),
        "up": log.bytes_up / clients,
        "down": log.bytes_down / clients,
    }


def typical(masking: str, clients: int, classes: int, labels: int, repeats: int) -> dict[str, Any]:
    """Run several enrolments, and return the enrolment with the median time."""
    runs = [measure(masking, clients, classes, labels) for _ in range(repeats)]
    return sorted(runs, key=lambda run: float(run["seconds"]))[len(runs) // 2]


def table_iv(quick: bool) -> list[dict[str, Any]]:
    """Measure the cells of Table IV in every mode."""
    found = []
    for classes, labels in CELLS[: 2 if quick else 3]:
        for clients in CLIENTS:
            for masking in MODES:
                slow = masking == "ckks-paper"
                found.append(typical(masking, clients, classes, labels, 1 if slow else 5))
                print(line(found[-1]), flush=True)
    return found


def growth(quick: bool) -> list[dict[str, Any]]:
    """Measure enrolments with growing numbers of clients and of classes; each client has ten classes."""
    found = []
    pairs = {(n, 100) for n in GROWTH_CLIENTS} | {(100, c) for c in GROWTH_CLASSES}
    if not quick:
        pairs |= {(1000, 1000)}
    for masking in ("ckks", "prf"):
        for clients, classes in sorted(pairs):
            found.append(measure(masking, clients, classes, GROWTH_LABELS))
            print(line(found[-1]), flush=True)
    return found


def duration(seconds: float) -> str:
    """Return seconds as text with a unit."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def size(count: float) -> str:
    """Return a number of bytes as text with a unit."""
    unit, name = (1e9, "GB") if count >= 1e9 else (1e6, "MB") if count >= 1e5 else (1e3, "kB")
    return f"{count / unit:.3g} {name}"


def line(run: dict[str, Any]) -> str:
    """Return the row of a table about one enrolment."""
    phases = " + ".join(duration(run[name]) for name in PHASES)
    what = f"| {run['classes']:,} / {run['labels']} | {run['clients']:,} | {run['masking']} "
    return what + f"| {phases} | {duration(run['seconds'])} | {size(run['up'])} | {size(run['down'])} |"


def largest(cells: list[dict[str, Any]]) -> list[str]:
    """Return the rows of the largest cell, as a table that compares them with ``ckks-paper``."""
    last = max((run["classes"], run["clients"]) for run in cells)
    there = {run["masking"]: run for run in cells if (run["classes"], run["clients"]) == last}
    printed = there["ckks-paper"]["seconds"]
    labels = there["ckks-paper"]["labels"]
    lines = [
        f"With {last[0]} classes, and {last[1]} clients that each have samples of {labels} classes:",
        "",
        "| `masking` | CPU time of all parties | speed-up | sent per client | received per client |",
        "|---|---|---|---|---|",
    ]
    for masking, name in (("prf", "`prf`"), ("ckks", "`ckks`"), ("ckks-paper", "as published (not in fedstrata)")):
        run = there[masking]
        cost = f"{duration(run['seconds'])} | {printed / run['seconds']:,.0f}x"
        lines.append(f"| {name} | {cost} | {size(run['up'])} | {size(run['down'])} |")
    return lines


PAPER = {
    (2, 5): "20 ms + 0.8 s + 8 ms", (2, 10): "20 ms + 0.8 s + 9 ms", (2, 20): "9 ms + 0.9 s + 10 ms",
    (10, 5): "0.4 s + 1.3 s + 40 ms", (10, 10): "0.5 s + 1.7 s + 40 ms", (10, 20): "0.6 s + 2 s + 50 ms",
    (100, 5): "63 s + 19 s + 0.4 s", (100, 10): "90 s + 22 s + 0.5 s", (100, 20): "102 s + 27 s + 0.6 s",
}  # fmt: skip
"""Table IV of Stratify: from (classes, clients) to the times of its three phases: unique list, mapping, counts."""


def beside_the_paper(cells: list[dict[str, Any]]) -> list[str]:
    """Return a table of the times in Table IV (machine unknown), and of ``ckks-paper`` and ``ckks`` on this machine."""
    lines = ["| classes | clients | paper | published protocol here | `ckks` here |", "|---|---|---|---|---|"]
    there = {(run["classes"], run["clients"], run["masking"]): run for run in cells}
    for (classes, clients), paper in PAPER.items():
        both = [there.get((classes, clients, masking)) for masking in ("ckks-paper", "ckks")]
        found = [" + ".join(duration(run[name]) for name in PHASES) if run else "" for run in both]
        lines.append(f"| {classes} | {clients} | {paper} | {' | '.join(found)} |")
    return lines


def picture(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw the time and the bytes against the numbers of clients and classes."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(8, 5.5), sharex="col", sharey="row", layout="constrained")
    for column, (axis, fixed) in enumerate((("clients", "classes"), ("classes", "clients"))):
        for masking, line in (("ckks", style.SERIES[1]), ("prf", style.SERIES[2])):
            part = sorted(
                (run for run in runs if run["masking"] == masking and run[fixed] == 100), key=lambda run: run[axis]
            )
            x = [run[axis] for run in part]
            axes[0, column].loglog(
                x,
                [run["seconds"] for run in part],
                "o" + line.dash,
                color=line.colour.light,
                label=f"masking = {masking}",
            )
            axes[1, column].loglog(
                x, [(run["up"] + run["down"]) / 1e6 for run in part], "o" + line.dash, color=line.colour.light
            )
        axes[0, column].set_title(f"100 {fixed}, {GROWTH_LABELS} labels per client", fontsize=10)
        axes[1, column].set_xlabel(axis)
    axes[0, 0].set_ylabel("seconds, all clients")
    axes[1, 0].set_ylabel("MB per client, sent + received")
    axes[0, 0].legend(frameon=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color=style.GRID.light)
        log_ticks(axis.xaxis)
        log_ticks(axis.yaxis)
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="path of the result files, without a suffix")
    parser.add_argument("--page", type=Path, default=PAGE, help="page that shows the result of the largest cell")
    parser.add_argument("--quick", action="store_true", help="skip slow cells, and do not change the page")
    parser.add_argument(
        "--show", action="store_true", help="write the tables of earlier measurements, without new measurements"
    )
    options = parser.parse_args()
    file = options.out.with_suffix(".json")
    if options.show:
        kept = json.loads(file.read_text())
    else:
        torch.set_num_threads(1)
        for masking in MODES[1:]:
            measure(masking, 2, 2, 1)  # warm-up: imports and first allocations
        cells, grown = table_iv(options.quick), growth(options.quick)
        kept = {"machine": platform.machine(), "cells": cells, "growth": grown}
        file.write_text(json.dumps(kept, indent=1) + "\n")
    write(options.out, kept)
    if not options.quick:
        write_between(options.page, "masking", largest(kept["cells"]))


def write(out: Path, kept: dict[str, Any]) -> None:
    """Write all tables and the picture."""
    cells, grown = kept["cells"], kept["growth"]
    seconds_of_keys = statistics.median(run["keys"] for run in cells if run["masking"] == "ckks")
    head = [
        "| classes / labels | clients | masking | unique list + mapping + counts | total | sent | received |",
        "|---|---|---|---|---|---|---|",
    ]
    text = [
        "# Cost of masked labels",
        "",
        "These tables show how much time and traffic `method.masking` needs.",
        "[Masked labels](../../docs/privacy/masked-labels.md) explains the modes.",
        "",
        "Masking happens before the first round, and again when clients join, in three phases:",
        "",
        "1. **Unique list**: the server makes a list that contains each label once.",
        "2. **Mapping**: each client learns the placeholders of its labels.",
        "3. **Counts**: from encrypted sums, the server learns how many samples each placeholder has in total.",
        "",
        f"We measured with `make bench-masking` ({kept['machine']}). *labels* is the number of labels of each",
        "client. Times are the total CPU time of all clients and the server, in one thread. *Sent* and *received* are",
        f"bytes per client. Making and loading the keys once takes another {duration(seconds_of_keys)}.",
        "`ckks-paper` is the published protocol.",
        "",
        "## All modes, in the settings of Stratify's Table IV",
        "",
        *head,
        *map(line, cells),
        "",
        "## Comparison with the paper",
        "",
        "Table IV was measured on another machine, so compare only how the times grow.",
        "Each cell gives the times of the three phases.",
        "",
        *beside_the_paper(cells),
        "",
        "## More clients, more classes",
        "",
        f"Each client holds {GROWTH_LABELS} labels.",
        "",
        *head,
        *map(line, grown),
        "",
        f"![Time and bytes against clients and classes]({out.name}.png)",
        "",
        "*Left: more clients. Right: more classes.*",
        "",
    ]
    out.with_suffix(".md").write_text("\n".join(text), encoding="utf-8")
    picture(grown, out.with_suffix(".png"))


if __name__ == "__main__":
    main()
