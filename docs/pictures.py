"""The picture of the front page and of the README: accuracy against traffic, from committed results.

python docs/pictures.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
STUDY, SEEDS = "mnist-half", 3
LINES = {
    "FedAvg": ("fedavg | none", "-", {"light": "#5a6570", "dark": "#aab4be"}),
    "SCAFFOLD": ("scaffold | none", "-.", {"light": "#1f77b4", "dark": "#6cb6ff"}),
    "ReBaFL": ("rebafl | none", ":", {"light": "#2e7d32", "dark": "#7ee787"}),
    "Stratify": ("stratify, dense | none", "--", {"light": "#b8860b", "dark": "#e3b341"}),
    "Stratify, compressed": (
        "stratify, 18 epochs | powersgd, rank 1 in bytes",
        "-",
        {"light": "#c0392b", "dark": "#ff7b72"},
    ),
}
INK = {"light": "#1f2328", "dark": "#e6edf3"}


def main() -> None:
    """Draw the picture in both themes."""
    cells = json.loads((ROOT / "benchmarks" / "results" / "communication.json").read_text(encoding="utf-8"))
    for theme, ink in INK.items():
        names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
        with plt.rc_context(dict.fromkeys(names, ink) | {"font.size": 11}):
            figure, axes = plt.subplots(figsize=(8.4, 4.2), layout="constrained")
            for name, (label, style, colours) in LINES.items():
                runs = [cells[f"{STUDY} | {label} | {seed}"] for seed in range(SEEDS)]
                draw(axes, name, runs, style, colours[theme])
            axes.set(xscale="log", ylim=(0, 100), xlabel="traffic in both directions, GB", ylabel="test accuracy, %")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(loc="center right", frameon=False)
            figure.savefig(Path(__file__).parent / "_static" / f"difference-{theme}.png", dpi=150, transparent=True)
            plt.close(figure)


def draw(axes: plt.Axes, name: str, runs: list[dict[str, list[float]]], style: str, colour: str) -> None:
    """Draw the mean over runs at equal traffic, and the range of the runs as a band.

    Args:
        axes: The axes.
        name: The line's name in the legend.
        runs: The accuracy, and the gigabytes up and down, after each evaluated round of each run.
        style: The line's style.
        colour: The line's colour.
    """
    costs = [np.add(run["up"], run["down"]) for run in runs]
    grid = np.geomspace(max(cost[0] for cost in costs), min(cost[-1] for cost in costs), 200)
    at_grid = [
        np.asarray(run["accuracy"])[np.searchsorted(cost, grid * (1 + 1e-9), side="right") - 1]
        for run, cost in zip(runs, costs, strict=True)
    ]
    curves = 100 * np.array(at_grid)
    axes.plot(grid, curves.mean(0), style, color=colour, lw=2, label=name)
    axes.fill_between(grid, curves.min(0), curves.max(0), color=colour, alpha=0.18, lw=0)


if __name__ == "__main__":
    main()
