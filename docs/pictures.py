"""The picture of the front page and of the README: accuracy against traffic, from committed results.

python docs/pictures.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from fedstrata.base import style
from fedstrata.reporting.axes import log_ticks

ROOT = Path(__file__).resolve().parents[1]
STUDY, SEEDS = "mnist-half", 3
LINES = {
    "FedAvg": ("fedavg | none", "-", (1.5, 55)),
    "SCAFFOLD": ("scaffold | none", "--", (1.5, 43)),
    "ReBaFL": ("rebafl | none", "-.", (1.7, 66)),
    "Stratify": ("stratify, dense | none", "--", (12, 88)),
    "Stratify,\ncompressed": ("stratify, 18 epochs | powersgd, rank 1 in bytes", "-", (0.2, 93)),
}
"""A mapping from each name to the label of its runs, its dashes, and where the name stands (GB and percent)."""
THEMES = ("light", "dark")
SHAPES = {"": (8.4, 4.2), "-narrow": (4.2, 4.4)}
"""The size in inches of the picture, and of that for phones."""


def main() -> None:
    """Draw the picture in both themes, for wide screens and for phones."""
    cells = json.loads((ROOT / "benchmarks" / "results" / "communication.json").read_text(encoding="utf-8"))
    runs = {
        name: [cells[f"{STUDY} | {label} | {seed}"] for seed in range(SEEDS)] for name, (label, *_) in LINES.items()
    }
    lines = style.lines(["fedavg", "scaffold", "rebafl", "stratify"])
    for theme in THEMES:
        ink = getattr(style.INK, theme)
        names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
        for shape, size in SHAPES.items():
            with plt.rc_context(dict.fromkeys(names, ink) | {"font.size": 11}):
                figure, axes = plt.subplots(figsize=size, layout="constrained")
                for name, (label, dash, place) in LINES.items():
                    colour = getattr(lines[label.partition(" ")[0].rstrip(",")].colour, theme)
                    end = draw(axes, runs[name], dash, colour)
                    side = "right" if place[0] < end[0] and "\n" in name else "left"
                    thread = {"arrowstyle": "-", "color": colour, "lw": 0.8}
                    near = {} if name.startswith("Stratify") else {"arrowprops": thread}
                    axes.annotate(name, end, place, color=colour, va="center", ha=side, fontweight="bold", **near)
                axes.set(xscale="log", ylim=(0, 100), xlabel="traffic in both directions, GB")
                axes.set_ylabel("test accuracy, %")
                log_ticks(axes.xaxis)
                if shape:
                    axes.set_xticks([0.01, 0.1, 1, 10])
                axes.grid(axis="y", color=getattr(style.GRID, theme))
                axes.spines[["top", "right"]].set_visible(False)
                path = Path(__file__).parent / "_static" / f"difference{shape}-{theme}.png"
                figure.savefig(path, dpi=150, transparent=True)
                plt.close(figure)


def draw(axes: plt.Axes, runs: list[dict[str, list[float]]], dash: str, colour: str) -> tuple[float, float]:
    """Draw the mean over runs at equal traffic, and the range of the runs as a band.

    Args:
        axes: The axes.
        runs: The accuracy, and the gigabytes up and down, after each evaluated round of each run.
        dash: The dashes of the line.
        colour: The colour of the line.

    Returns:
        The end of the line, in GB and percent.
    """
    costs = [np.add(run["up"], run["down"]) for run in runs]
    grid = np.geomspace(max(cost[0] for cost in costs), min(cost[-1] for cost in costs), 200)
    at_grid = [
        np.asarray(run["accuracy"])[np.searchsorted(cost, grid * (1 + 1e-9), side="right") - 1]
        for run, cost in zip(runs, costs, strict=True)
    ]
    curves = 100 * np.array(at_grid)
    axes.plot(grid, curves.mean(0), dash, color=colour, lw=2)
    axes.fill_between(grid, curves.min(0), curves.max(0), color=colour, alpha=0.15, lw=0)
    return float(grid[-1]), float(curves.mean(0)[-1])


if __name__ == "__main__":
    main()
