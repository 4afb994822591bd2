"""Stratify and its baselines on real data: the cells of Tables I and II that fit on one core.

    python benchmarks/stratify_tables.py RUNS [--table mnist fashion pacs64 digits3 cifar10] [--only METHOD …]

Every cell is a run folder RUNS/TABLE/PARTITION/METHOD that goes on from its last checkpoint, so the script may be
stopped and started at will; cells that are complete, here or in the result file, are only read (``--again`` runs the
latter anew). The results so far are written after each cell to ``benchmarks/results/stratify.json`` and ``stratify.md``
beside the paper's figures. Data are looked for where
fedstrata always looks (``$FEDSTRATA_DATA``, ``~/.cache/fedstrata``).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fedstrata as fs
from fedstrata.history import History

RESULTS = Path(__file__).parent / "results"
CLIENTS = 10

CLASSES = {f"#C={k}": {"name": "classes", "per_client": k, "clients": CLIENTS} for k in (1, 3, 5)}
DIRICHLET = {"name": "dirichlet", "alpha": 0.5, "clients": CLIENTS}
IID = {"name": "iid", "clients": CLIENTS}
DOMAINS = {
    "#D=1": {"name": "domain", "per_client": 1, "clients": CLIENTS},
    "Dirichlet(0.5)": {"name": "domain", "alpha": 0.5, "clients": CLIENTS},
}

BASELINES: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "fedprox": {"name": "fedavg", "objective": {"name": "fedprox", "mu": 0.01}},
    "scaffold": {"name": "scaffold"},
    "sfl": {"name": "sfl"},
}
SINGLE = {"name": "stratify", "mode": "single", "chunk_size": 5}
BATCH = {"name": "stratify", "mode": "batch"}

# The baselines take mini-batches of ten, as they are published: batches of one would take them ten times as long.
MINI_BATCHES = {"batch_size": 10, "lr": 0.05}

# One local epoch a round for the baselines: a round is an epoch everywhere, as in the paper.
TABLES: dict[str, dict[str, Any]] = {
    "mnist": {
        "caption": "MNIST, single sample per iteration, simple CNN, at most 5 epochs (paper: Table I, up to 30)",
        "partitions": {**CLASSES, "Dirichlet(0.5)": DIRICHLET, "IID": IID},
        "methods": {"stratify": SINGLE, **BASELINES},
        "data": {"name": "mnist"},
        "model": {"name": "cnn"},
        "training": {"rounds": 5, "batch_size": 1, "lr": 0.01, "schedule": "cosine"},
        "baselines": MINI_BATCHES,
        "paper": {
            "stratify": [98.80, 99.06, 98.95, 98.94, 98.82],
            "fedavg": [18.71, 91.67, 95.42, 97.82, 98.32],
            "fedprox": [12.37, 85.27, 96.51, 97.19, 98.34],
            "scaffold": [17.68, 91.11, 92.60, 98.75, 98.71],
            "sfl": [15.19, 72.52, 89.30, 97.76, 98.79],
        },
    },
    "fashion": {
        "caption": "Fashion-MNIST, batch mode, simple CNN, 10 epochs (not in the paper)",
        "partitions": {"#C=1": CLASSES["#C=1"], "IID": IID},
        "methods": {"stratify": BATCH, "fedavg": BASELINES["fedavg"]},
        "data": {"name": "fashion_mnist"},
        "model": {"name": "cnn"},
        "training": {"rounds": 10, "batch_size": 64, "lr": 0.05, "momentum": 0.9, "schedule": "cosine"},
        "paper": {},
    },
    "digits3": {
        "caption": "digits3 (3 domains), single sample per iteration, simple CNN, 8 epochs",
        "partitions": DOMAINS,
        "methods": {
            "stratify (uniform)": SINGLE,
            "stratify (weighted)": {**SINGLE, "selection": "weighted"},
            "fedavg": BASELINES["fedavg"],
        },
        "data": {"name": "digits3"},
        "model": {"name": "cnn"},
        "training": {"rounds": 8, "batch_size": 1, "lr": 0.005, "schedule": "cosine"},
        "baselines": MINI_BATCHES,
        # Digits-DG has 4 domains and more samples: the columns are its nearest relatives.
        "paper": {"stratify (uniform)": [82.48, 82.60], "fedavg": [82.69, 82.31]},
    },
    "pacs64": {
        "caption": "pacs64 (4 domains, 64x64), single sample per iteration, simple CNN, 8 epochs",
        "partitions": DOMAINS,
        "methods": {
            "stratify (uniform)": SINGLE,
            "stratify (weighted)": {**SINGLE, "selection": "weighted"},
            "fedavg": BASELINES["fedavg"],
        },
        "data": {"name": "pacs64"},
        "model": {"name": "cnn", "channels": [16, 32, 64]},
        "training": {"rounds": 8, "batch_size": 1, "lr": 0.003, "schedule": "cosine"},
        "baselines": MINI_BATCHES,
        # The paper's images are larger and its network is another one.
        "paper": {"stratify (uniform)": [95.24, 95.84], "fedavg": [87.13, 84.40]},
    },
    "cifar10": {
        "caption": "CIFAR-10, batch mode with BatchNorm, ResNet-9, #C=1 (paper: 90.60 % at epoch 8)",
        "partitions": {"#C=1": CLASSES["#C=1"]},
        "methods": {"stratify": BATCH},
        "data": {"name": "cifar10"},
        "model": {"name": "resnet9"},
        "training": {
            "rounds": 8,
            "batch_size": 128,
            "lr": 0.05,
            "momentum": 0.9,
            "weight_decay": 5e-4,
            "schedule": "cosine",
        },
        "paper": {"stratify": [90.60]},
    },
}


def cells(names: list[str], only: list[str]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Table, partition, method and spec of every cell, method by method."""
    for name in names:
        table = TABLES[name]
        for method, settings in table["methods"].items():
            if only and method.split()[0] not in only:
                continue
            for partition, split in table["partitions"].items():
                training = {"local_epochs": 1, "clients_per_round": CLIENTS, **table["training"]}
                if method.split()[0] != "stratify":
                    training |= table.get("baselines", {})
                if method == "scaffold":
                    training["momentum"] = 0.0
                spec = {"seed": 0, "data": table["data"], "partition": split, "method": settings}
                spec |= {"model": table["model"], "training": training}
                spec["evaluation"] = {"checkpoint_every": 1}
                yield name, partition, method, spec


def folder_of(runs: Path, table: str, partition: str, method: str) -> Path:
    parts = (text.replace("#", "").replace("=", "").replace("(", "-").replace(")", "") for text in (partition, method))
    return runs.joinpath(table, *(part.replace(" ", "") for part in parts))


def collect(runs: Path) -> dict[str, Any]:
    """Best accuracy, its epoch and the curve of every cell that has one."""
    found: dict[str, Any] = {}
    for table, partition, method, _ in cells(list(TABLES), []):
        folder = folder_of(runs, table, partition, method)
        if not (folder / "metrics.jsonl").is_file():
            continue
        history = History.load(folder)
        if not len(history):
            continue
        curve = [record["accuracy"] for record in history]
        best = max(range(len(curve)), key=lambda i: curve[i] or 0.0)
        found.setdefault(table, {}).setdefault(method, {})[partition] = {
            "best": curve[best],
            "epoch": best + 1,
            "epochs": len(curve),
            "curve": curve,
            "seconds_an_epoch": round(sum(record["seconds"] for record in history) / len(curve), 1),
            "hops_an_epoch": round(sum(record["hops"] for record in history) / len(curve)),
            "client_bytes": history[-1].get("client_bytes"),
        }
    return found


def markdown(found: dict[str, Any]) -> str:
    """The tables, ours beside the paper's."""
    lines = [
        "# Stratify on real data",
        "",
        "Written by `benchmarks/stratify_tables.py`. Top-1 test accuracy in percent: best (its epoch / epochs run) |",
        "the paper's.",
    ]
    for name, methods in found.items():
        table = TABLES[name]
        columns = list(table["partitions"])
        training = ", ".join(f"{key} {value}" for key, value in table["training"].items())
        if "baselines" in table:
            training += "; baselines: " + ", ".join(f"{key} {value}" for key, value in table["baselines"].items())
        lines += ["", f"## {table['caption']}", "", f"Seed 0; {training}.", ""]
        lines += ["| method | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
        for method in table["methods"]:
            row = []
            for place, column in enumerate(columns):
                cell = methods.get(method, {}).get(column)
                paper = table["paper"].get(method)
                text = "–" if cell is None else f"{100 * cell['best']:.2f} (E{cell['epoch']}/{cell['epochs']})"
                row.append(text + (f" \\| {paper[place]:.2f}" if paper else ""))
            lines.append(f"| {method} | " + " | ".join(row) + " |")
        lines += ["", "Seconds an epoch: " + "; ".join(_seconds(methods)) + "."]
    return "\n".join(lines) + "\n"


def _seconds(methods: dict[str, Any]) -> Iterator[str]:
    for method, cells_of in methods.items():
        seconds = [cell["seconds_an_epoch"] for cell in cells_of.values()]
        yield f"{method} {min(seconds):.0f}–{max(seconds):.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--table", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--again", action="store_true", help="run cells anew that the result file already has")
    arguments = parser.parse_args()
    kept = RESULTS / "stratify.json"
    known = {} if arguments.again or not kept.is_file() else json.loads(kept.read_text())
    for table, partition, method, spec in cells(arguments.table, arguments.only):
        folder = folder_of(arguments.runs, table, partition, method)
        done = known.get(table, {}).get(method, {}).get(partition, {}).get("epochs", 0) >= spec["training"]["rounds"]
        if not done and not (folder / "summary.json").exists():
            history = fs.run(spec, out=folder, resume=True)
            print(f"{table:8} {partition:15} {method:20} {100 * (history[-1]['accuracy'] or 0):.2f} %", flush=True)
        write(arguments.runs)
    write(arguments.runs)


def write(runs: Path) -> None:
    """What RUNS holds, over what earlier runs left in the result file: a cell once measured is not lost."""
    RESULTS.mkdir(exist_ok=True)
    kept = RESULTS / "stratify.json"
    found = json.loads(kept.read_text()) if kept.is_file() else {}
    for table, methods in collect(runs).items():
        for method, row in methods.items():
            found.setdefault(table, {}).setdefault(method, {}).update(row)
    (RESULTS / "stratify.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "stratify.md").write_text(markdown(found))


if __name__ == "__main__":
    main()
