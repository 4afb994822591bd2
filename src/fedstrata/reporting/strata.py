"""Draw the strata (client groups): the clients as points in the plane, coloured by stratum and by their labels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedstrata.base.arrays import Floats, Floats32, Ints
from fedstrata.reporting.draw import GRID, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedstrata.reporting.replayed_strata import View

PIES = 200
"""The most clients for which each client is drawn as a pie chart of its labels. If there are more, each client is a dot
in the colour of its most frequent label."""


def plane(points: Floats32) -> tuple[Floats, float]:
    """Project points onto their first two principal components.

    Args:
        points: The points, shape (n, d), n ≥ 1.

    Returns:
        The coordinates in the plane, shape (n, 2), and the fraction of the variance that they preserve, in [0, 1].

    >>> where, share = plane(np.array([[0, 0, 1], [3, 0, 1], [6, 0, 1]], dtype=np.float32))
    >>> np.abs(where).round(4).tolist(), round(share, 4)
    ([[3.0, 0.0], [0.0, 0.0], [3.0, 0.0]], 1.0)
    """
    centred = points - points.mean(axis=0, dtype=np.float64)
    # The (n, n) matrix of scalar products is smaller than the (d, d) covariance matrix, because usually n < d.
    values, vectors = np.linalg.eigh(centred @ centred.T)
    values = np.maximum(values[::-1], 0.0)
    where = np.zeros((len(points), 2))
    shown = vectors[:, ::-1][:, :2] * np.sqrt(values[:2])
    where[:, : shown.shape[1]] = shown
    total = float(values.sum())
    return where, float(values[:2].sum()) / total if total > 0 else 1.0


def draw_strata(view: View, path: Path | str) -> None:
    """Write a picture with two charts of the clients: coloured by stratum on the left, by their labels on the right.

    Args:
        view: The strata.
        path: The file to write; its suffix is the format.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    points, strata, labels = view.points, view.strata, view.labels
    where, share = plane(points)
    count, classes = int(strata.max()) + 1, labels.shape[1]
    figure = Figure(figsize=(11.5, 5.4), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    strata_colours = [colormaps["tab20"](h % 20) for h in range(count)]
    left.scatter(*where.T, c=[strata_colours[h] for h in strata], s=46, linewidths=0.4, edgecolors="white")
    for h in range(count):
        middle = where[strata == h].mean(axis=0)
        left.annotate(str(int((strata == h).sum())), middle, color=INK, fontsize=9, ha="center", va="center")
    left.set_title(f"{count} strata; the numbers are their clients", fontsize=10, loc="left")

    colours = [colormaps["tab10" if classes <= 10 else "tab20"](c % 20) for c in range(classes)]
    if len(points) <= PIES:
        _pies(right, where, labels, colours)
    else:
        right.scatter(*where.T, c=[colours[c] for c in labels.argmax(axis=1)], s=14, linewidths=0)
    criterion = "labels held" if len(points) <= PIES else "the label most held"
    right.set_title(f"the same clients by {criterion}", fontsize=10, loc="left")
    if classes <= 20:
        names = view.class_names or tuple(map(str, range(classes)))
        for name, colour in zip(names, colours, strict=True):
            right.scatter([], [], color=colour, s=40, label=name if len(name) <= 14 else name[:13] + "…")
        right.legend(loc="best", fontsize=7, frameon=False, ncols=2)
    for axes in (left, right):
        axes.set_xlabel(f"first of two principal components ({share:.0%} of the variance)")
        axes.grid(color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(0.08)
    left.set_ylabel("second")
    if view.title:
        figure.suptitle(view.title, fontsize=11, x=0.01, ha="left", color=INK)
    figure.savefig(path)


def _pies(axes: Axes, where: Floats, labels: Ints, colours: list[tuple[float, float, float, float]]) -> None:
    """Draw a small pie chart per client. Each slice is drawn as a marker of a scatter plot."""
    from matplotlib.path import Path as Outline

    axes.scatter(where[:, 0], where[:, 1], s=110, facecolors="white", edgecolors=GRID, linewidths=0.8)
    for (x, y), held in zip(where, labels, strict=True):
        ends = np.concatenate([[0.0], np.cumsum(held) / max(int(held.sum()), 1)])
        for c in np.flatnonzero(held):
            angle = 2 * np.pi * np.linspace(ends[c], ends[c + 1], max(3, int(40 * (ends[c + 1] - ends[c]))))
            rim = np.stack([np.sin(angle), np.cos(angle)], axis=1)
            outline = Outline(np.concatenate([[[0.0, 0.0]], rim, [[0.0, 0.0]]]))
            # Matplotlib scales a marker by its extent. With this size, all slices of a pie have the same radius.
            size = 90 * float(np.abs(rim).max()) ** 2
            axes.scatter([x], [y], marker=outline, s=size, color=colours[c], linewidths=0)
