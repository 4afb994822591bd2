"""The picture of the front page and of the README, from the runs of the demo.

fedstrata compare examples/specs/demo.toml --seeds 0,1,2 --out demo
python docs/pictures.py demo
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import fedstrata as fs

OUT = Path(__file__).parent / "_static"
STYLES = {"fedavg": "-", "fedstas": "--", "scaffold": "-.", "stratify": "-"}
COLOURS = {
    "light": {"fedavg": "#5a6570", "fedstas": "#b8860b", "scaffold": "#1f77b4", "stratify": "#c0392b"},
    "dark": {"fedavg": "#aab4be", "fedstas": "#e3b341", "scaffold": "#6cb6ff", "stratify": "#ff7b72"},
}
INK = {"light": "#1f2328", "dark": "#e6edf3"}
PANELS = {
    "samples": ("samples trained on", "When computing is what costs", 1e3, "thousand"),
    "bytes": ("sent, both ways", "When sending is what costs", 1e6, "MB"),
}


def draw(runs: dict, theme: str) -> None:
    """Accuracy against both costs: the mean over seeds, and how far apart the seeds are."""
    ink = INK[theme]
    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    with plt.rc_context(dict.fromkeys(names, ink) | {"font.size": 10.5, "svg.hashsalt": "fedstrata"}):
        figure, axes = plt.subplots(1, 2, figsize=(9.2, 3.5), sharey=True, layout="constrained")
        for panel, (kind, (label, title, unit, word)) in zip(axes, PANELS.items(), strict=True):
            ends = [spent(run.history, kind)[-1] for members in runs.values() for run in members]
            grid = np.geomspace(
                min(spent(run.history, kind)[0] for each in runs.values() for run in each), max(ends), 200
            )
            for name, members in runs.items():
                curves = np.array([on_grid(run.history, kind, grid) for run in members])
                known = ~np.isnan(curves).any(axis=0)
                mean, low, high = (f(100 * curves[:, known], axis=0) for f in (np.mean, np.min, np.max))
                x = grid[known] / unit
                panel.plot(x, mean, STYLES[name], color=COLOURS[theme][name], lw=2, label=name)
                panel.fill_between(x, low, high, color=COLOURS[theme][name], alpha=0.18, lw=0)
            panel.set(title=title, xlabel=f"{label} ({word})", xscale="log", ylim=(0, 100))
            panel.xaxis.set_major_formatter("{x:g}")
            panel.grid(alpha=0.25)
            panel.spines[["top", "right"]].set_visible(False)
        axes[0].set_ylabel("test accuracy, %")
        axes[0].legend(loc="lower right", frameon=False)
        figure.savefig(OUT / f"difference-{theme}.png", dpi=150, transparent=True)
        plt.close(figure)


def spent(history: fs.History, kind: str) -> np.ndarray:
    """What a run had cost after each round."""
    names = ("samples",) if kind == "samples" else ("bytes_up", "bytes_down")
    return np.cumsum(np.sum([history.column(name)[1] for name in names], axis=0))


def on_grid(history: fs.History, kind: str, grid: np.ndarray) -> np.ndarray:
    """The accuracy at given costs: that of the last round within each; none before the first and after the last."""
    cost, accuracy = spent(history, kind), history.column("accuracy")[1]
    place = np.searchsorted(cost, grid, side="right") - 1
    return np.where((place >= 0) & (grid <= cost[-1]), accuracy[np.maximum(place, 0)], np.nan)


if __name__ == "__main__":
    for theme in COLOURS:
        draw(fs.load_runs(sys.argv[1]), theme)
