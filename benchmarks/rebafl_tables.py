"""Compare ReBaFL with other methods under label skew and client dropout, as in section 5 of the ReBaFL paper.

    python benchmarks/rebafl_tables.py run RUNS [--tables fashion20 …] [--only rebafl …]
    python benchmarks/rebafl_tables.py show RUNS

A cell is a run in the folder RUNS/TABLE/LABEL/seed-S, which uses one core and can continue from its last checkpoint.
Several processes of this program share the cells. The result and the curve of a finished cell are written to
``benchmarks/results/rebafl.json``, and the cell does not run again. ``show`` writes tables of all cells that have begun
to ``rebafl.md``, and the curves to ``rebafl_*.png``.

The settings follow section 5.1. Each client has 500 samples of each of 2 random classes. All clients are invited, and
each answers with probability p = 0.5. Clients train for 5 epochs with batches of 50 samples, a learning rate of 0.01
(0.02 for CIFAR-10), and weight decay 5e-4. The model is a CNN of 16 and 32 channels (64 more for CIFAR-10).
Convolutions and products are computed in bfloat16, which takes 0.6 of the time. The table "precision" compares bfloat16
with float32. Each method runs with its default parameters and with the best parameters of a grid, which comes from its
paper. Grid points run for 30 rounds with another seed. The best grid point has the highest mean accuracy of the last
ten rounds on 10,000 training images that no client has. For ReBaFL, first ε is chosen with μ = 0, and then μ, as in
section 5.5.1. FedLC has no grid: clients have equally many samples of each class, so all its margins are equal for
every τ.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import safetensors.torch
import torch
from matplotlib.axes import Axes
from numpy.typing import NDArray

import fedstrata as fs
from fedstrata.base import style
from fedstrata.evaluation.history import History
from fedstrata.reporting.axes import End, label_ends, style_axes

RESULTS = Path(__file__).parent / "results"
KEPT = RESULTS / "rebafl.json"
VALIDATION = 10_000
TUNING = 30
"""The number of rounds of a run that tries a point of a parameter grid."""

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "rebafl": {"name": "rebafl"},
    "fedrs": {"name": "fedrs"},
    "feddyn": {"name": "feddyn"},
    "bsm-fedavg": {"name": "bsm-fedavg"},
    "fedprox": {"name": "fedprox"},
    "scaffold": {"name": "scaffold"},
    "moon": {"name": "moon"},
    "fedbabu": {"name": "fedbabu"},
    "fedlc": {"name": "fedlc"},
}
FIVE = ["fedavg", "rebafl", "fedrs", "feddyn", "bsm-fedavg"]
SIX = ["rebafl", "fedavg", "feddyn", "bsm-fedavg", "fedrs", "scaffold"]
DRAWN = ["fedavg", "rebafl", "feddyn", "fedrs", "bsm-fedavg", "scaffold", "R-BSM", "F-Aug"]
"""The methods and parts that have a colour, which is the same in all pictures."""
PAIRED = (2, 3, 4)
"""The seeds that all methods in ``SIX`` run in addition to 0 and 1. The main table ranks methods by all five seeds."""
COMPOSED = {"fedsts + rebafl": {"name": "fedsts", "objective": {"name": "rebafl"}}}
PARTS: dict[str, dict[str, Any]] = {
    "none": METHODS["fedavg"],
    "R-BSM": {"name": "rebafl", "mu": 0.0},
    "F-Aug": {"name": "rebafl", "relaxed": False},
    "both": METHODS["rebafl"],
}
GRIDS: dict[str, list[dict[str, Any]]] = {
    "fedprox": [{"mu": mu} for mu in (0.001, 0.01, 0.1, 1.0)],
    "feddyn": [{"alpha": alpha} for alpha in (0.001, 0.01, 0.1)],
    "moon": [{"mu": mu} for mu in (0.1, 1.0, 5.0, 10.0)],
    "fedrs": [{"alpha": alpha} for alpha in (0.1, 0.5, 0.9)],
}
EPSILONS = [{"epsilon": epsilon, "mu": 0.0} for epsilon in (0.001, 0.01, 0.1)]
MUS = (0.1, 0.5, 1.0, 5.0)
DEFAULTS: dict[str, dict[str, Any]] = {
    "rebafl": {"epsilon": 0.01, "mu": 0.1},
    "fedprox": {"mu": 0.01},
    "feddyn": {"alpha": 0.01},
    "moon": {"mu": 1.0},
    "fedrs": {"alpha": 0.5},
}
CAPTIONS = {
    "fashion20": "Fashion-MNIST, 20 clients, 2 classes per client, 50 % answer",
    "fashion50": "Fashion-MNIST, 50 clients, 2 classes per client, 50 % answer",
    "cifar20": "CIFAR-10, 20 clients, 2 classes per client, 50 % answer",
    "dropout": "Fashion-MNIST, 20 clients: dropouts of one round, and absences of several rounds (50 % answer)",
    "ablation": "Fashion-MNIST, 20 clients: ReBaFL without one or both of its parts",
    "pairs": "Fashion-MNIST, 20 clients, 50 % answer: similar or random classes per client",
    "published-defaults": "Fashion-MNIST, 20 clients, 50 % answer: settings of the text, or of the published code "
    "(FedDyn: α = 0.01)",
    "readings": "Fashion-MNIST, 20 clients, 50 % answer: dropouts before and after training",
    "precision": "Fashion-MNIST, 20 clients, 50 % answer: precision of matrix products",
    "tuning": "Other parameters, on 10,000 training images that no client holds, 20 clients",
}
"""A mapping from each table to the heading of the table and of its picture."""
SMOOTH = 5
"""The number of rounds over which curves are averaged."""
CHOSEN = "chosen"
"""The name of the picture of the runs with chosen parameters, which are in the first table."""
SETTINGS = {
    "dropout": "",
    "ablation": "",
    "pairs": "classes that look alike",
    "published-defaults": "momentum 0.5, μ = 0.5",
    "readings": "before training",
    "precision": "",
}
"""A mapping from tables with labels "METHOD, SETTING" to the setting of labels that contain only a method."""
WORDS = {
    "2 classes": "2 classes per client, 50 % answer",
    "clustered": "2 to 5 classes per client, 20 to 50 % answer",
    "classes that look alike": "clients hold classes that look alike",
    "random classes": "clients hold random classes",
    "as in the text": "as in the text: no momentum, μ = 0.1",
    "momentum 0.5, μ = 0.5": "as published: momentum 0.5, μ = 0.5",
    "before training": "clients drop out before training",
    "replies lost": "clients drop out after training: replies are lost",
    "bf16": "bfloat16",
}
"""A mapping from settings to the titles of their panels."""
PARTS_IN_WORDS = {"none": "neither", "both": "both: ReBaFL"}
"""A mapping from parts of ReBaFL to their names in pictures."""
PAPER: dict[str, dict[str, float]] = {
    "fashion20": {
        "fedavg": 75.27, "fedprox": 75.36, "scaffold": 63.48, "feddyn": 77.98, "moon": 65.35, "fedrs": 72.46,
        "fedbabu": 74.20, "fedlc": 68.75, "bsm-fedavg": 68.64, "rebafl": 78.81,
    },
    "fashion50": {"fedavg": 83.60, "feddyn": 85.26, "fedrs": 79.83, "bsm-fedavg": 76.99, "rebafl": 85.44},
    "cifar20": {"fedavg": 54.82, "fedrs": 54.39, "rebafl": 58.49},
}  # fmt: skip

READINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "scaffold, replies lost": ({"name": "other_readings:LostSCAFFOLD"}, {"availability": {"name": "always"}}),
    "feddyn, replies lost": ({"name": "other_readings:LostFedDyn"}, {"availability": {"name": "always"}}),
}
"""Methods for another interpretation of the paper's dropout; see ``other_readings.py``."""

TWO_CLASSES = {"name": "classes", "per_client": 2, "size": 1000}
CLUSTERED = {
    "name": "groups",
    "groups": [{"clients": 4, "classes": n} for n in (2, 2, 3, 3, 5)],
    "size": 1000,
}
CLUSTERED_DROPOUT = {"name": "groups", "groups": [{"clients": 4, "p": p} for p in (0.5, 0.5, 0.3, 0.3, 0.2)]}
HALF = {"name": "bernoulli", "p": 0.5}
NEIGHBOURS = [
    (0, 2), (0, 3), (0, 6), (0, 6), (1, 3), (1, 3), (1, 8), (1, 8), (2, 4), (2, 4),
    (2, 6), (3, 4), (4, 6), (5, 7), (5, 7), (5, 8), (5, 9), (7, 9), (7, 9), (8, 9),
]  # fmt: skip
"""The two classes of each client if similar classes, such as two kinds of shoes, are at the same clients. Four clients
hold each class, as with random classes."""


@dataclass(frozen=True)
class Cell:
    """A run: its table, label and seed, its number of rounds, and its spec."""

    table: str
    label: str
    seed: int
    rounds: int
    spec: dict[str, Any]
    validated: bool = False

    @property
    def key(self) -> str:
        """The key of the cell in the result file, which is also the path of its run folder."""
        return f"{self.table}/{self.label}/seed-{self.seed}"


def spec_of(
    method: dict[str, Any],
    seed: int,
    rounds: int,
    *,
    clients: int = 20,
    data: str = "fashion_mnist",
    partition: dict[str, Any] = TWO_CLASSES,
    availability: dict[str, Any] = HALF,
    invited: int | None = None,
    precision: str = "bf16",
    momentum: float = 0.0,
) -> dict[str, Any]:
    """Return a spec with the paper's settings, except those that an argument changes."""
    cifar = data == "cifar10"
    return {
        "seed": seed,
        "data": {"name": data},
        "partition": {"clients": clients, **partition},
        "availability": availability,
        "method": method,
        "model": {"name": "cnn", "channels": [16, 32, 64] if cifar else [16, 32]},
        "training": {
            "rounds": rounds,
            "clients_per_round": invited or clients,
            "local_epochs": 5,
            "batch_size": 50,
            "lr": 0.02 if cifar else 0.01,
            "weight_decay": 5e-4,
            "momentum": momentum,
            "precision": precision,
            "workers": 1,
        },
        "evaluation": {"checkpoint_every": 10, "targets": [0.5, 0.6, 0.7, 0.75], "weight_diversity": True},
    }


def cells() -> Iterator[Cell]:
    """Yield all cells, the most important first."""
    yield from main_cells(0, [label for label in METHODS if label != "fedlc"])
    yield from main_cells(1, SIX)
    for seed in PAIRED:
        yield from main_cells(seed, SIX)
    for label, method in COMPOSED.items():
        # FedSTS divides clients into strata: all 20 send a compressed gradient if available, and at most 10 train.
        yield Cell("fashion20", label, 0, 200, spec_of({**method, "strata": 5}, 0, 200, invited=10))
    for label in ("bsm-fedavg", "rebafl", "feddyn", "fedavg"):
        yield Cell("pairs", label, 0, 60, spec_of(METHODS[label], 0, 60, partition=neighbours_together(0)))
    for label in FIVE:
        spec = spec_of({**METHODS[label], **({"mu": 0.5} if label == "rebafl" else {})}, 0, 60, momentum=0.5)
        yield Cell("published-defaults", label, 0, 60, spec)
    yield from tuning_cells(["fedrs", "feddyn"])
    for label, method in PARTS.items():
        if method not in METHODS.values():
            yield Cell("ablation", f"{label}, 2 classes", 0, 100, spec_of(method, 0, 100))
        spec = spec_of(method, 0, 100, partition=CLUSTERED, availability=CLUSTERED_DROPOUT)
        yield Cell("ablation", f"{label}, clustered", 0, 100, spec)
    for label in ("fedavg", "rebafl"):
        for p in (0.1, 0.3):
            spec = spec_of(METHODS[label], 0, 100, availability={"name": "bernoulli", "p": p})
            yield Cell("dropout", f"{label}, p = {p}", 0, 100, spec)
    for label in ("fedavg", "fedrs", "rebafl"):
        yield Cell("cifar20", label, 0, 60, spec_of(METHODS[label], 0, 60, data="cifar10"))
    yield from tuning_cells(["rebafl", "fedprox", "moon"])
    yield from chosen_cells(0, list(DEFAULTS))
    for label, (method, changes) in READINGS.items():
        yield Cell("readings", label, 0, 120, spec_of(method, 0, 120, **changes))
    for label in ("fedavg", "rebafl"):
        # Here, clients stay away for whole periods. A period of one round is the setting p = 0.5 of the first table.
        for period in (20, 60):
            absent = {"name": "persistent", "p": 0.5, "period": period}
            spec = spec_of(METHODS[label], 0, 120, availability=absent)
            yield Cell("dropout", f"{label}, s = {period}", 0, 120, spec)
    for label in FIVE:
        yield Cell("fashion50", label, 0, 100, spec_of(METHODS[label], 0, 100, clients=50))
    # FedLC comes late, because here it does the same as BSM-FedAvg (see above).
    yield from main_cells(0, ["fedlc"])
    # Another seed for the two methods whose results are closest to each other.
    yield from chosen_cells(1, ["rebafl", "feddyn"])
    # A reference with an unfair advantage: the server has a small set with all classes.
    yield Cell("fashion20", "fedavg-ft", 0, 200, spec_of({"name": "fedavg-ft"}, 0, 200))
    for label in ("fedavg", "rebafl"):
        spec = spec_of(METHODS[label], 0, 40, precision="float32")
        yield Cell("precision", f"{label}, float32", 0, 40, spec)


def main_cells(seed: int, labels: Sequence[str]) -> Iterator[Cell]:
    for label in labels:
        yield Cell("fashion20", label, seed, 200, spec_of(METHODS[label], seed, 200))


def chosen_cells(seed: int, labels: Sequence[str]) -> Iterator[Cell]:
    """Yield the cells of methods with their chosen parameters, if these differ from the defaults."""
    for label, point in chosen().items():
        if label in labels and point != DEFAULTS[label]:
            tuned = f"{label}, {text_of(point)}"
            yield Cell("fashion20", tuned, seed, 200, spec_of({**METHODS[label], **point}, seed, 200))


def tuning_cells(labels: Sequence[str]) -> Iterator[Cell]:
    for label in labels:
        for point in grid_of(label):
            spec = spec_of({**METHODS[label], **point}, 100, TUNING)
            yield Cell("tuning", f"{label}: {text_of(point)}", 100, TUNING, spec, validated=True)


def text_of(point: dict[str, float]) -> str:
    return ", ".join(f"{key} = {value:g}" for key, value in point.items())


def grid_of(label: str) -> list[dict[str, float]]:
    """Return the grid of a method; ReBaFL's grid contains values of μ after ε has been chosen."""
    if label != "rebafl":
        return GRIDS[label]
    found = best_of(label, EPSILONS)
    return EPSILONS + ([] if found is None else [{**found, "mu": mu} for mu in MUS])


def best_of(label: str, grid: list[dict[str, float]]) -> dict[str, float] | None:
    """Return the grid point that is best on the validation images; None if some points are not finished."""
    kept = load()
    curves = [kept.get(f"tuning/{label}: {text_of(point)}/seed-100", {}).get("curve") for point in grid]
    if not curves or not all(curves):
        return None
    return grid[int(np.argmax([statistics.mean(curve[TUNING - 10 : TUNING]) for curve in curves]))]


def chosen() -> dict[str, dict[str, float]]:
    """Return the chosen parameters of each method whose grid is finished."""
    best = {label: best_of(label, [point for point in grid_of(label) if point.get("mu") != 0]) for label in DEFAULTS}
    return {label: point for label, point in best.items() if point is not None}


def neighbours_together(seed: int) -> dict[str, Any]:
    """Return the partition of ``NEIGHBOURS``, with 500 samples of each class of a client."""
    labels = np.asarray(fs.Data("fashion_mnist").load(seed).y_train)
    generator = np.random.default_rng(seed)
    left = [list(generator.permutation(np.flatnonzero(labels == c))) for c in range(10)]
    taken = [[int(left[c].pop()) for c in pair for _ in range(500)] for pair in NEIGHBOURS]
    return {"name": "given", "clients": len(taken), "indices": taken}


def validation_arrays(name: str) -> dict[str, Any]:
    """Return the training set without 10,000 random images, which take the place of the test set."""
    data = fs.Data(name).load(0)
    x, y = data.x_train, data.y_train
    order = np.random.default_rng(0).permutation(len(y))
    kept, held = order[:-VALIDATION], order[-VALIDATION:]
    return {"x_train": x[kept], "y_train": y[kept], "x_test": x[held], "y_test": y[held]}


def run(runs: Path, wanted: Callable[[Cell], bool]) -> None:
    # Start from the beginning after every cell, because its result may add cells with chosen parameters.
    while any(run_one(runs, cell) for cell in cells() if wanted(cell)):
        pass


def run_one(runs: Path, cell: Cell) -> bool:
    """Run a cell; return False if it is finished or another process runs it."""
    lock = runs / f"{cell.key}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as mine:
        try:
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if cell.key in load():
            return False
        began = time.time()
        data = validation_arrays(cell.spec["data"]["name"]) if cell.validated else None
        history = fs.run(cell.spec, out=runs / cell.key, resume=True, data=data)
        keep(cell, {**figures(history), **({} if cell.validated else {"pairs": told_apart(cell, runs)})})
        print(f"{cell.key}: {100 * (history[-1]['accuracy'] or 0):.2f} % in {time.time() - began:.0f} s", flush=True)
        return True


def told_apart(cell: Cell, runs: Path) -> dict[str, float]:
    """Measure how well a finished model distinguishes pairs of classes.

    Returns:
        ``together``: the accuracy in percent on the test samples of two classes if only the logits of these two classes
        are compared, averaged over the pairs of which some client has both classes. ``apart``: this accuracy for all
        other pairs. ``errors_apart``: the percentage of all errors that confuse two classes of a pair in ``apart``.
    """
    prepared = fs.prepare(fs.Experiment.from_table(cell.spec))
    data, model = prepared.data, prepared.config.model
    held = prepared.assignment.counts(data.y_train.numpy(), data.outputs) > 0
    together: NDArray[np.bool_] = np.any(held[:, :, None] & held[:, None, :], axis=0)
    saved = safetensors.torch.load_file(runs / cell.key / "model.safetensors")
    weights = {name: saved[name] for name in model.params()}
    with torch.no_grad(), model.loaded(weights) as params:
        z = model(params, data.inputs(slice(None), "test")).numpy()
    y, guess = data.y_test.numpy(), z.argmax(axis=1)
    wrong = y != guess
    accuracy: dict[bool, list[float]] = {True: [], False: []}
    for i, j in itertools.combinations(range(data.outputs), 2):
        both = (y == i) | (y == j)
        accuracy[bool(together[i, j])].append(((z[both, i] > z[both, j]) == (y[both] == i)).mean())
    return {
        "together": round(100 * statistics.mean(accuracy[True]), 2),
        "apart": round(100 * statistics.mean(accuracy[False]), 2),
        "errors_apart": round(100 * float(1 - together[y[wrong], guess[wrong]].mean()), 1),
    }


def load() -> dict[str, Any]:
    """Return the results of all finished cells."""
    found: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.is_file() else {}
    return found


def figures(history: History) -> dict[str, Any]:
    """Return the results of a run that tables show."""
    curve = [100 * record["accuracy"] for record in history if record["accuracy"] is not None]
    diversity = [record["weight_diversity"] for record in history if record.get("weight_diversity") is not None]
    return {
        "rounds": len(history),
        "curve": [round(value, 2) for value in curve],
        "diversity": [float(f"{value:.4g}") for value in diversity],
        "mb_up": round(sum(record["bytes_up"] for record in history) / 1e6, 1),
        "seconds": round(sum(record["seconds"] for record in history)),
    }


def keep(cell: Cell, figure: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / ".rebafl.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes of this program may run
        found = load()
        found[cell.key] = figure
        half = KEPT.with_suffix(".part")
        half.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {compact(v)}" for k, v in found.items()) + "\n}\n")
        half.replace(KEPT)


def compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def everything(runs: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return the results of all cells that have begun: for each table and label, a list with an entry per seed."""
    kept = load()
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for cell in cells():
        figure = kept.get(cell.key)
        if figure is None and (runs / cell.key / "metrics.jsonl").is_file():
            history = History.load(runs / cell.key)
            figure = figures(history) if len(history) else None
        if figure is not None:
            part = {**beginning(figure, cell.rounds), "seed": cell.seed}
            seeds = found.setdefault(cell.table, {}).setdefault(cell.label, [])
            # A seed with fewer rounds would lower the mean of the finished seeds.
            if seeds and seeds[0]["rounds"] < cell.rounds:
                seeds.clear()
            if not seeds or part["rounds"] == cell.rounds:
                seeds.append(part)
    for method, table, label, rounds in contained():
        same = [beginning(each, rounds) for each in found.get("fashion20", {}).get(method, [])[:1]]
        if same:
            found[table] = {label: same, **found.get(table, {})}
    return found


def contained() -> Iterator[tuple[str, str, str, int]]:
    """Yield cells that need not run, because they are the first rounds of a cell in the first table.

    Each cell has four parts: the label in the first table; and the cell's own table, label and number of rounds.
    """
    for method, part in (("fedavg", "none"), ("rebafl", "both")):
        yield method, "precision", f"{method}, bf16", 40
        yield method, "dropout", f"{method}, p = 0.5", 100
        yield method, "dropout", f"{method}, s = 1", 120
        yield method, "ablation", f"{part}, 2 classes", 100
    for method in ("fedavg", "feddyn", "rebafl", "bsm-fedavg"):
        yield method, "pairs", f"{method}, random classes", 60
    for method in FIVE:
        yield method, "published-defaults", f"{method}, as in the text", 60
    for method in ("scaffold", "feddyn"):
        yield method, "readings", method, 120


def beginning(figure: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Return the results of a run after some of its rounds; bytes are in proportion to the rounds."""
    done = min(rounds, figure["rounds"])
    return {
        **figure,
        "ran": figure["rounds"],
        "rounds": done,
        "of": rounds,
        "curve": figure["curve"][:done],
        "diversity": figure["diversity"][:done],
        "mb_up": figure["mb_up"] * done / figure["rounds"],
    }


def spread(values: Sequence[float]) -> str:
    mean = f"{statistics.mean(values):.2f}"
    return mean + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def markdown(found: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    lines = [
        "# ReBaFL's experiments",
        "",
        "These runs are older than the runs on the page [ReBaFL](../../docs/results/rebafl.md).",
        "",
        "`benchmarks/rebafl_tables.py` wrote this page. The tables show top-1 test accuracies in percent (mean ±",
        "standard deviation over seeds). *Stability* is the standard deviation of the accuracy over a run's last 20",
        "rounds. Λ is the mean squared distance between the clients' models and their mean model (Eq. 24), averaged",
        "over rounds. *50 % answer* means that each client is available with probability 0.5. For unfinished runs, the",
        "column *rounds* shows the progress.",
    ]
    for table, caption in CAPTIONS.items():
        if table not in found:
            continue
        lines += ["", f"## {caption}", ""]
        lines += [f"![Test accuracy over rounds](rebafl_{table}.png)", ""] if table != "tuning" else []
        lines += ["| method | rounds | seeds | mean of the last 10 | best | stability | Λ | MB up | paper |"]
        lines += ["|---|---|---|---|---|---|---|---|---|"]
        for label, seeds in found[table].items():
            rounds = f"{seeds[0]['rounds']}" + ("" if seeds[0]["rounds"] >= seeds[0]["of"] else f" of {seeds[0]['of']}")
            curves = [each["curve"] for each in seeds]
            diversity = [statistics.mean(each["diversity"]) for each in seeds if each["diversity"]]
            paper = PAPER.get(table, {}).get(label)
            row = [
                label,
                rounds,
                str(len(seeds)),
                spread([statistics.mean(curve[-10:]) for curve in curves]),
                spread([max(curve) for curve in curves]),
                spread([statistics.stdev(curve[-20:]) for curve in curves]),
                f"{statistics.mean(diversity):.3g}" if diversity else "–",
                f"{statistics.mean(each['mb_up'] for each in seeds):.0f}",
                "–" if paper is None else f"{paper:.2f}",
            ]
            lines.append("| " + " | ".join(row) + " |")
    picked = "; ".join(f"{label} {text_of(point)}" for label, point in chosen().items())
    lines += [
        "",
        f"Chosen parameters: {picked or 'nothing yet'}. With FedSTS + ReBaFL, the server asks all 20 clients for",
        "a compressed gradient, and at most 10 available clients train. Otherwise, all available clients train.",
        "",
        f"![Test accuracy over rounds, chosen parameters](rebafl_{CHOSEN}.png)",
    ]
    lines += ["", *without_holders(found["fashion20"])] if "fashion20" in found else []
    lines += ["", "## Which classes are confused", ""]
    lines += [
        "Each accuracy is for one pair of classes: only the logits of the two classes are compared. *Together* is the",
        "mean over pairs that occur together at a client, and *apart* is the mean over all other pairs. The last",
        "column counts errors between two classes that do not occur together at any client, in % of all errors.",
        "",
        "| table | method | seed | together | apart | errors between classes apart |",
        "|---|---|---|---|---|---|",
    ]
    for table, methods in found.items():
        for label, each in ((label, each) for label, seeds in methods.items() for each in seeds):
            if "pairs" in each and each["rounds"] == each["ran"]:
                together, apart, errors = (each["pairs"][key] for key in ("together", "apart", "errors_apart"))
                lines.append(f"| {table} | {label} | {each['seed']} | {together:.2f} | {apart:.2f} | {errors:.1f} % |")
    return "\n".join(lines) + "\n"


def without_holders(methods: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return a table of the accuracy after rounds in which all clients with a class are away."""
    lines = ["## When nobody holds a class", ""]
    lines += [
        "The table shows mean accuracies after round 50. A class is missing if all of its clients dropped out.",
        "",
    ]
    missing = {seed: missing_classes(spec_of(METHODS["fedavg"], seed, 200)) for seed in (0, 1)}
    rounds = {seed: [int((found[50:] == n).sum()) for n in (0, 1, 2)] for seed, found in missing.items()}
    for seed, (none, one, two) in rounds.items():
        lines += [
            f"In {none} of 150 rounds with seed {seed}, every class is present. One class is missing in {one} rounds, "
            f"and two classes in {two}."
        ]
    lines += [""]
    lines += ["| method | seed | all there | one missing | two missing |", "|---|---|---:|---:|---:|"]
    for label, seeds in methods.items():
        for each in seeds:
            if label not in COMPOSED and each["rounds"] == 200:
                curve, away = np.array(each["curve"])[50:], missing[each["seed"]][50:]
                means = [f"{curve[away == n].mean():.1f}" for n in (0, 1, 2)]
                lines.append(f"| {label} | {each['seed']} | " + " | ".join(means) + " |")
    return lines


def missing_classes(spec: dict[str, Any]) -> NDArray[np.int64]:
    """Return for each round the number of classes of which all clients are away."""
    experiment = fs.Experiment.from_table(spec)
    prepared = fs.prepare(experiment)
    held = prepared.assignment.counts(prepared.data.y_train.numpy(), prepared.data.outputs) > 0
    everybody = np.arange(len(held))
    there = [
        experiment.availability.online(everybody, round, experiment.seed)
        for round in range(1, experiment.training.rounds + 1)
    ]
    return np.array([(~held[online].any(axis=0)).sum() for online in there])


Panels = dict[str, dict[str, list[float]]]
"""A mapping from the title of each panel of a picture to a mapping from names to accuracies per round."""


def pictures_of(found: dict[str, dict[str, list[dict[str, Any]]]]) -> dict[str, Panels]:
    """Return a mapping from the name of each picture to its panels."""
    pictures: dict[str, Panels] = {}
    for table, methods in found.items():
        if table == "tuning":
            continue
        for label, seeds in methods.items():
            name, _, setting = label.partition(", ")
            for each in (each for each in seeds if each["rounds"] >= SMOOTH):
                picture, title, seed = table, "", f"seed {each['seed']}"
                if table in SETTINGS:
                    title = in_words(setting or SETTINGS[table])
                elif table == "fashion20" and setting:
                    picture, title = CHOSEN, seed
                elif table == "fashion20":
                    title = seed if name in SIX else f"{seed}, other methods"
                pictures.setdefault(picture, {}).setdefault(title, {})[name] = each["curve"]
    main = pictures.get("fashion20", {})
    for title, curves in main.items():
        seed, _, others = title.partition(", ")
        if others:  # two methods of the neighbouring panel, for comparison
            curves |= {name: main[seed][name] for name in ("fedavg", "rebafl") if name in main.get(seed, {})}
    return pictures


def draw(found: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    """Draw the curves of each picture in faint colours, and on top of them their means over five rounds."""
    for picture, panels in pictures_of(found).items():
        across = min(len(panels), 3)
        down = -(-len(panels) // across)
        figure, grid = plt.subplots(
            down, across, figsize=(1.6 + 4 * across, 0.9 + 3.4 * down), sharey=True, squeeze=False, layout="constrained"
        )
        caption = f"{CAPTIONS['fashion20']}: chosen parameters" if picture == CHOSEN else CAPTIONS[picture]
        figure.suptitle(caption, x=0.01, ha="left", fontsize=12, color=style.INK.light)
        figure.supxlabel(f"Bold: mean of {SMOOTH} rounds. Faint: each round.", x=0.01, ha="left", fontsize=9)
        ends = [draw_panel(axes, panels[title], title) for axes, title in zip(grid.flat, sorted(panels), strict=False)]
        for axes in grid[:, 0]:
            axes.set_ylabel("test accuracy, %", fontsize=9, color=style.INK.light)
        for axes, of_panel in zip(grid.flat, ends, strict=False):
            label_ends(axes, of_panel)
        figure.savefig(RESULTS / f"rebafl_{picture}.png", dpi=100)
        plt.close(figure)


def draw_panel(axes: Axes, curves: dict[str, list[float]], title: str) -> list[End]:
    """Draw the curves of a panel, and return their ends."""
    ends = []
    for name, points in curves.items():
        line, curve = line_of(name), np.array(points)
        smooth = np.convolve(curve, np.full(SMOOTH, 1 / SMOOTH), mode="valid")
        order = 1 if line is style.OTHER else 2
        colour = line.colour.light
        axes.plot(np.arange(1, len(curve) + 1), curve, color=colour, alpha=0.2, linewidth=0.8, zorder=order)
        axes.plot(
            SMOOTH // 2 + 1 + np.arange(len(smooth)), smooth, line.dash, color=colour, linewidth=1.8, zorder=order
        )
        text = (style.SOFT if line is style.OTHER else line.colour).light
        ends.append(End(len(curve) - SMOOTH // 2, float(smooth[-1]), PARTS_IN_WORDS.get(name, name), text))
    style_axes(axes, "round", "")
    axes.set_title(title, loc="left", fontsize=10, color=style.INK.light)
    return ends


def in_words(setting: str) -> str:
    """Return the title of a setting's panel, such as ``10 % answer`` for ``p = 0.1``."""
    name, _, value = setting.partition(" = ")
    if name == "p":
        return f"{100 * float(value):.0f} % answer"
    if name == "s":
        return f"absent for {value} round{'' if value == '1' else 's'}"
    return WORDS.get(setting, setting)


def line_of(name: str) -> style.Stroke:
    """Return the line of a method or part, which is the same in all pictures."""
    return style.lines(DRAWN).get({"none": "fedavg", "both": "rebafl"}.get(name, name), style.OTHER)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", choices=["run", "show"])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--tables", nargs="+", default=[])
    parser.add_argument("--only", nargs="+", default=[], help="labels of the cells to run or show (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[])
    options = parser.parse_args()

    def wanted(cell: Cell) -> bool:
        return (
            (not options.tables or cell.table in options.tables)
            and (not options.only or cell.label in options.only)
            and (not options.seeds or cell.seed in options.seeds)
        )

    if options.work == "run":
        run(options.runs, wanted)
    found = everything(options.runs)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "rebafl.md").write_text(markdown(found), encoding="utf-8")
    draw(found)
    print(markdown(found))


if __name__ == "__main__":
    main()
