"""Compare accuracy and bytes of methods with codecs, under label skew, with and without dropouts.

    python benchmarks/communication.py run --out DIR [--study mnist mnist-half fashion] [--only LABEL …] [--seeds 0 1 2]
    python benchmarks/communication.py table [--page docs/results/compression.md]
    python benchmarks/communication.py speed

A cell is a combination of a method and a codec. ``run`` skips the cells that are already in ``benchmarks/results``, so
it can be stopped at any time. ``table`` draws all finished cells, and writes tables between the marks of the page and
of ``docs/methods/stratify.md``, and the file ``compression-targets.csv`` beside the page. ``speed`` measures the time
of the codecs.

MNIST: each class is divided among 100 clients by Dirichlet(0.01), and the model is an MLP with layers 784-200-100-10.
Baselines invite 10 clients per round. Stratify has batches of 400 samples. ``stratify, dense`` has short rounds of
4,000 samples, so that the curve also has points at few bytes. Fashion-MNIST: 20 clients of two classes each, half of
them away in every round.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from marks import write

import fedstrata as fs
from fedstrata.base import style
from fedstrata.papers.comparing import difference_text
from fedstrata.reporting.axes import log_ticks, separated, style_axes
from fedstrata.reporting.statistics import paired_difference

RESULTS = Path(__file__).parent / "results" / "communication.json"
RANK1 = {"name": "powersgd", "rank": 1, "factors": "bfloat16"}
RANK2 = {"name": "powersgd", "rank": 2, "factors": "bfloat16"}
BYTES = {"name": "powersgd", "rank": 1, "factors": "int8"}
BYTES2 = BYTES | {"rank": 2}
TOP = {"name": "top-k", "fraction": 0.01}
CODECS: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {"up": "bf16", "down": "bf16"},
    "qsgd": {"up": "qsgd", "down": "qsgd"},
    "top-k": {"up": TOP, "down": TOP},
    "powersgd, rank 1": {"up": RANK1, "down": RANK1},
    "powersgd, rank 1 in bytes": {"up": BYTES, "down": BYTES},
    "powersgd, rank 2 in bytes": {"up": BYTES2, "down": BYTES2},
    "powersgd, rank 2": {"up": RANK2, "down": RANK2},
    "powersgd, rank 4": {"up": RANK2 | {"rank": 4}, "down": RANK2 | {"rank": 4}},
}
BASELINES = {"rounds": 60, "clients_per_round": 10, "local_epochs": 5, "batch_size": 20, "lr": 0.05}
BATCHES = {"rounds": 11, "lr": 0.4, "schedule": "cosine"}
BYTES_LABEL = "stratify | powersgd, rank 1 in bytes"
PAIRS = [
    ("mnist", "[MNIST](../results/compression.md), Dirichlet(0.01), all clients online", "fedavg | none", BYTES_LABEL),
    ("mnist", "as above", "fedavg | qsgd", BYTES_LABEL),
    ("mnist", "as above, with short rounds", "fedavg | none", "stratify, dense | none"),
    ("mnist-half", "MNIST, online with probability 0.5", "fedavg | none", BYTES_LABEL),
    ("fashion", "Fashion-MNIST, two classes per client, online with probability 0.5", "fedavg | qsgd", BYTES_LABEL),
    ("fashion", "as above", "fedavg | none", BYTES_LABEL),
]
"""The comparisons at equal bytes: the study, the setting in words, and the cells of FedAvg and Stratify."""
METHODS: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "fedavg": ("fedavg", BASELINES, ["none", "bf16", "qsgd", "top-k", "powersgd, rank 4"]),
    # With the learning rate of the other methods, the accuracy of SCAFFOLD stays at chance here.
    "scaffold": ("scaffold", {**BASELINES, "lr": 0.01}, ["none", "qsgd", "powersgd, rank 4"]),
    "fedstas": ("fedstas", BASELINES, ["none", "qsgd", "powersgd, rank 4"]),
    "rebafl": ("rebafl", BASELINES, ["none", "qsgd", "powersgd, rank 4"]),
    "stratify, dense": (
        {"name": "stratify", "batch_size": 400, "cap": 400},
        {**BATCHES, "rounds": 160},
        ["none"],
    ),
    "stratify": (
        {"name": "stratify", "batch_size": 400},
        BATCHES,
        ["powersgd, rank 1 in bytes", "powersgd, rank 1", "powersgd, rank 2", "top-k", "qsgd"],
    ),
    "stratify, 18 epochs": (
        {"name": "stratify", "batch_size": 400},
        {**BATCHES, "rounds": 18},
        ["powersgd, rank 1 in bytes", "powersgd, rank 2 in bytes"],
    ),
}
MNIST = {"data": "mnist", "partition": {"name": "dirichlet", "alpha": 0.01, "clients": 100}}
FASHION = {"data": "fashion_mnist", "partition": {"name": "classes", "per_client": 2, "clients": 20}}
HALF = {"availability": {"name": "bernoulli", "p": 0.5}}
STUDIES: dict[str, dict[str, Any]] = {"mnist": MNIST, "mnist-half": MNIST | HALF, "fashion": FASHION | HALF}
TITLES = {"mnist": "MNIST", "mnist-half": "MNIST, half of the clients away", "fashion": "Fashion-MNIST, half away"}
AIMS = ((0.975, 0.25, 0.5), (0.98, 0.8, 1.6))
"""The targets for Stratify on MNIST: an accuracy, and the gigabytes up and down within which it should be reached."""


def cells(study: str) -> dict[str, dict[str, Any]]:
    """Return a mapping from each label of a study to its spec."""
    found = {}
    for method, (settings, training, codecs) in METHODS.items():
        # Methods with "epochs" in their name are needed only for the targets, which are on MNIST.
        for codec in codecs if study != "fashion" or "epochs" not in method else []:
            spec = {**STUDIES[study], "method": settings, "training": training, "evaluation": {"checkpoint_every": 2}}
            label = f"{method} | {codec}"
            found[label] = spec | ({"communication": CODECS[codec]} if CODECS[codec] else {})
    return found


def run(out: Path, studies: list[str], only: list[str], seeds: list[int]) -> None:
    """Run the cells that have no result yet."""
    for seed in seeds:
        for study in studies:
            for label, spec in cells(study).items():
                done = load()
                key = f"{study} | {label} | {seed}"
                if key in done or (only and not any(word in label for word in only)):
                    continue
                folder, began = out / key.replace(" | ", "/").replace(", ", "-").replace(" ", "-"), time.time()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    history = fs.run({**spec, "seed": seed}, out=folder, resume=folder.exists())
                cell = {"spec": fs.Experiment.from_table({**spec, "seed": seed}).to_spec(), **curve(history)}
                done = load() | {key: cell | {"seconds": round(time.time() - began), "torch": torch.__version__}}
                rows = [f"{json.dumps(name)}: {json.dumps(done[name])}" for name in sorted(done)]
                half = RESULTS.with_suffix(f".{os.getpid()}")
                half.write_text("{\n" + ",\n".join(rows) + "\n}\n")
                half.replace(RESULTS)
                print(key, cell["accuracy"][-1], cell["up"][-1], cell["down"][-1], flush=True)


def load() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return found


def curve(history: fs.History) -> dict[str, list[float]]:
    """Return the accuracy of each evaluation, and the gigabytes sent up and down until then."""
    up = down = 0
    found: dict[str, list[float]] = {"accuracy": [], "up": [], "down": []}
    for record in history:
        up, down = up + record["bytes_up"], down + record["bytes_down"]
        if record["accuracy"] is not None:
            found["accuracy"].append(round(record["accuracy"], 4))
            found["up"].append(round(up / 1e9, 5))
            found["down"].append(round(down / 1e9, 5))
    return found


def front(points: dict[str, tuple[float, float]]) -> list[str]:
    """Return the Pareto front: labels for which no other label has both fewer bytes and a higher accuracy."""
    best, found = -1.0, []
    for label, (_, accuracy) in sorted(points.items(), key=lambda item: (item[1][0], -item[1][1])):
        if accuracy > best:
            best = accuracy
            found.append(label)
    return found


def by_label(study: str) -> dict[str, list[dict[str, Any]]]:
    """Return a mapping from each label of a study to the results of its finished seeds."""
    done = load()
    found: dict[str, list[dict[str, Any]]] = {}
    for label in cells(study):
        of_seeds = [done[key] for key in sorted(done) if key.rpartition(" | ")[0] == f"{study} | {label}"]
        if of_seeds:
            found[label] = of_seeds
    return found


def ends(found: dict[str, list[dict[str, Any]]]) -> dict[str, tuple[float, float]]:
    """Return a mapping from each label to the gigabytes sent and the accuracy at the end, as means over seeds."""
    return {
        label: (
            statistics.mean(c["up"][-1] + c["down"][-1] for c in of),
            statistics.mean(c["accuracy"][-1] for c in of),
        )
        for label, of in found.items()
    }


def table_of(study: str) -> list[str]:
    """Return a Markdown table of the results at the end of the runs, and of the bytes until some accuracies."""
    found = by_label(study)
    best = set(front(ends(found)))
    lines = [
        "| method | codec | seeds | accuracy, % | GB up | GB down | front |",
        "|---|---|---:|---:|---:|---:|:---:|",
    ]
    for label, of in found.items():
        method, codec = label.split(" | ")
        accuracies = [100 * c["accuracy"][-1] for c in of]
        spread = f" ± {statistics.stdev(accuracies):.1f}" if len(of) > 1 else ""
        up, down = (statistics.mean(c[key][-1] for c in of) for key in ("up", "down"))
        lines.append(
            f"| {method} | {codec} | {len(of)} | {statistics.mean(accuracies):.1f}{spread} "
            f"| {up:.3f} | {down:.3f} | {'yes' if label in best else ''} |"
        )
    missing = [label for label in cells(study) if label not in found]
    if missing:
        lines.append(f"\nNot run: {'; '.join(label.replace(' | ', ', ') for label in missing)}.")
    return lines


def aims() -> list[list[Any]]:
    """Return rows that show when Stratify reaches the targets on MNIST, for each seed, with and without PowerSGD."""
    lines: list[list[Any]] = [["study", "run", "seed", "accuracy, %", "GB up", "GB down", "target"]]
    for study in ("mnist", "mnist-half"):
        for label, of in by_label(study).items():
            if not (label.startswith("stratify") and "powersgd" in label) and "dense" not in label:
                continue
            for cell in of:
                seed = cell["spec"]["seed"]
                rows = list(zip(cell["accuracy"], cell["up"], cell["down"], strict=True))
                for accuracy, most_up, most_down in AIMS:
                    there = next((row for row in rows if row[0] >= accuracy), None)
                    a, up, down = there or rows[-1]
                    kept = there is not None and up <= most_up and down <= most_down
                    aim = f"{100 * accuracy:.1f} % at {most_up} up, {most_down} down: {'yes' if kept else 'no'}"
                    name = label.replace(" | ", ", ")
                    lines.append([study, name, seed, f"{100 * a:.2f}", f"{up:.3f}", f"{down:.3f}", aim])
                    if "dense" in label:
                        within = [row for row in rows if row[1] <= most_up and row[2] <= most_down]
                        a, up, down = within[-1] if within else rows[0]
                        aim = f"the last round within {most_up} up, {most_down} down" if within else "its first round"
                        lines.append([study, name, seed, f"{100 * a:.2f}", f"{up:.3f}", f"{down:.3f}", aim])
    return lines


def at_equal_bytes() -> list[str]:
    """Return a table of Stratify's accuracy minus FedAvg's accuracy when Stratify has sent at most FedAvg's bytes."""
    lines = ["| setting | FedAvg's codec | Stratify's codec | difference, points | seeds |", "|---|---|---|---|---:|"]
    for study, setting, plain, label in PAIRS:
        ours, theirs = by_label(study)[label], {cell["spec"]["seed"]: cell for cell in by_label(study)[plain]}
        values, baseline = {}, {}
        for cell in ours:
            other = theirs.get(cell["spec"]["seed"])
            if other is None:
                continue
            limit = other["up"][-1] + other["down"][-1]
            rows = zip(cell["accuracy"], cell["up"], cell["down"], strict=True)
            within = [accuracy for accuracy, up, down in rows if up + down <= limit]
            values[cell["spec"]["seed"]] = 100 * within[-1] if within else None
            baseline[cell["spec"]["seed"]] = 100 * other["accuracy"][-1]
        difference = paired_difference(values, baseline)
        names = [each.split(" | ")[1].split(",")[0] for each in (plain, label)]
        low, high = difference.interval or (-1.0, 1.0)
        verdict = "wins: " if low > 0 else "loses: " if high < 0 else ""
        lines.append(
            f"| {setting} | {names[0]} | {names[1]} | {verdict}{difference_text(difference)} | {difference.n} |"
        )
    return lines


def draw(path: Path) -> None:
    """Plot the final accuracy against the bytes of runs: the Pareto front with names, and other runs in grey."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patheffects import withStroke

    shown = [study for study in STUDIES if by_label(study)]
    figure, axes = plt.subplots(
        1, len(shown), figsize=(3.5 * len(shown), 4.8), squeeze=False, sharey=True, layout="constrained"
    )
    lines = style.lines(["fedavg", "stratify", "scaffold", "fedstas", "rebafl"])
    fronts = []
    for axis, study in zip(axes[0], shown, strict=True):
        points = {label: (1000 * at, 100 * accuracy) for label, (at, accuracy) in ends(by_label(study)).items()}
        best = front(points)
        others = [point for label, point in points.items() if label not in best]
        axis.scatter(*zip(*others, strict=True), s=30, color=style.OTHER.colour.light)
        axis.plot(*zip(*map(points.get, best), strict=True), color=style.SOFT.light, lw=1.2)
        for label in best:
            axis.plot(*points[label], "o", ms=7, color=lines[label.split(" | ")[0].partition(",")[0]].colour.light)
        style_axes(axis, "MB up and down", "")
        axis.set_xscale("log")
        axis.set_title(TITLES[study], loc="left", fontsize=10, color=style.INK.light)
        log_ticks(axis.xaxis)
        axis.margins(x=0.06)
        names = [f"{number}  {label.replace(' | ', ', ')}" for number, label in enumerate(best, 1)]
        axis.text(0, -0.2, "\n".join(names), transform=axis.transAxes, va="top", fontsize=8, color=style.INK.light)
        fronts.append((axis, [points[label] for label in best]))
    axes[0][0].set_ylabel("test accuracy, %", fontsize=9, color=style.INK.light)
    figure.draw_without_rendering()  # only then, positions are known
    halo = [withStroke(linewidth=2, foreground=style.PAPER.light)]
    for axis, of_front in fronts:
        wanted = axis.transData.transform(of_front)
        for number, (x, (_, y)) in enumerate(zip(separated(wanted[:, 0], 12), wanted, strict=True), 1):
            axis.annotate(
                str(number), axis.transData.inverted().transform((x, y)), (0, 7), textcoords="offset points",
                ha="center", fontsize=9, fontweight="bold", color=style.INK.light, path_effects=halo,
            )  # fmt: skip
    figure.savefig(path, dpi=150)


def speed() -> list[str]:
    """Return a table of the milliseconds to encode and decode a million parameters, and of the encoded size."""
    import numpy as np

    from fedstrata.federation.communication.codecs import CODECS as NAMED
    from fedstrata.federation.communication.codecs import pack, unpack

    torch.set_num_threads(1)
    change = {"w": torch.randn(1000, 990), "b": torch.randn(10_000)}
    lines = ["| codec | encode, ms | decode, ms | bytes per parameter |", "|---|---:|---:|---:|"]
    for settings in ("none", "bf16", "qsgd", {"name": "qsgd", "levels": 127}, TOP, BYTES, RANK1, RANK2 | {"rank": 4}):
        codec = NAMED.parse(settings)
        times: dict[str, list[float]] = {"encode": [], "decode": []}
        for _ in range(15):
            began = time.perf_counter()
            packed = pack(codec.encode(change, np.random.default_rng(0)), codec.forms(change))
            middle = time.perf_counter()
            codec.decode(unpack(packed, codec.forms(change)), change)
            times["encode"].append(middle - began)
            times["decode"].append(time.perf_counter() - middle)
        size = len(packed) / 1e6
        name = settings if isinstance(settings, str) else ", ".join(str(value) for value in settings.values())
        encode, decode = (1000 * statistics.median(times[key]) for key in times)
        lines.append(f"| {name} | {encode:.1f} | {decode:.1f} | {size:.4f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table", "speed"])
    parser.add_argument("--out", type=Path, default=Path("runs/communication"))
    parser.add_argument("--study", nargs="+", choices=list(STUDIES), default=list(STUDIES))
    parser.add_argument("--only", nargs="+", default=[], help="words of which a cell's label must contain at least one")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--page", type=Path, default=Path("docs/results/compression.md"))
    options = parser.parse_args()
    if options.what == "run":
        run(options.out, options.study, options.only, options.seeds)
    elif options.what == "speed":
        lines = speed()
        print("\n".join(lines))
        if options.page.exists():
            write(options.page, "speed", lines)
    else:
        for study in STUDIES:
            write(options.page, study, table_of(study))
        with options.page.with_name("compression-targets.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(aims())
        write(options.page.parents[1] / "methods" / "stratify.md", "equal bytes", at_equal_bytes())
        draw(options.page.with_suffix(".png"))


if __name__ == "__main__":
    main()
