"""Draw strata (client groups): clients are points in a plane, with a line around each stratum."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedstrata.base import style
from fedstrata.base.arrays import Floats, Floats32, Ints
from fedstrata.reporting.axes import INK, literal, short, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedstrata.reporting.replayed_strata import View

PIES = 200
"""The maximum number of clients that are drawn as pie charts of their class labels.

If there are more clients, each client is a dot in the colour of its most frequent class label.
"""


def plane(points: Floats32) -> tuple[Floats, float]:
    """Project points onto their first two principal components.

    Args:
        points: The points, shape (n, d), with n ≥ 1.

    Returns:
        The coordinates in the plane, shape (n, 2), and the fraction of the variance that they explain, in [0, 1].

    >>> where, share = plane(np.array([[0, 0, 1], [3, 0, 1], [6, 0, 1]], dtype=np.float32))
    >>> np.abs(where).round(4).tolist(), round(share, 4)
    ([[3.0, 0.0], [0.0, 0.0], [3.0, 0.0]], 1.0)
    """
    centred = points - points.mean(axis=0, dtype=np.float64)
    # Use the (n, n) matrix of scalar products, because it is usually smaller than the (d, d) covariance matrix.
    values, vectors = np.linalg.eigh(centred @ centred.T)
    values = np.maximum(values[::-1], 0.0)
    where = np.zeros((len(points), 2))
    shown = vectors[:, ::-1][:, :2] * np.sqrt(values[:2])
    where[:, : shown.shape[1]] = shown
    total = float(values.sum())
    return where, float(values[:2].sum()) / total if total > 0 else 1.0


def outline(points: Floats, pad: Floats) -> Floats:
    """Return the convex hull of points, with a rounded margin around the points.

    Args:
        points: The n ≥ 1 points, shape (n, 2).
        pad: The width of the margin in each direction, shape (2,).

    Returns:
        The corners of the outline in order, shape (k, 2).
    """
    from scipy.spatial import ConvexHull

    angles = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    around: Floats = points[:, None] + pad * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    around = around.reshape(-1, 2)
    corners: Floats = around[ConvexHull(around).vertices]
    return corners


def draw_strata(view: View, path: Path | str) -> None:
    """Write a picture with two charts of the clients: one of the server's strata, and one of the class labels.

    A line surrounds the clients of each stratum. The number of clients is written above the line. The colours show the
    class labels of the clients.

    Args:
        view: The strata.
        path: The file to write. The suffix determines the format, such as ``.png``.
    """
    from matplotlib.figure import Figure

    points, strata, labels = view.points, view.strata, view.labels
    where, share = plane(points)
    count, classes = int(strata.max()) + 1, labels.shape[1]
    figure = Figure(figsize=(11.5, 5.4), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    left.scatter(*where.T, color=style.SOFT.light, s=24, linewidths=0)
    left.set_title(f"known to the server: {count} strata, with their numbers of clients", fontsize=10, loc="left")
    colours = [colour.light for colour in style.categories(classes)]
    if len(points) <= PIES:
        _pies(right, where, labels, colours)
    else:
        right.scatter(*where.T, c=[colours[c] for c in labels.argmax(axis=1)], s=14, linewidths=0)
    criterion = "labels" if len(points) <= PIES else "most frequent labels"
    right.set_title(f"not known to the server: the clients' {criterion}", fontsize=10, loc="left")
    if classes <= 20:
        names = view.class_names or tuple(map(str, range(classes)))
        for name, colour in zip(names, colours, strict=True):
            right.scatter([], [], color=colour, s=40, label=literal(short(name, 14)))
        figure.legend(loc="outside right center", fontsize=8, frameon=False, labelcolor=INK, title="label")
    outline_strata(left, where, strata)
    outline_strata(right, where, strata, has_numbers=False)
    for axes in (left, right):
        style_axes(axes, f"first of two principal components ({share:.0%} of the variance)", "")
        axes.margins(0.08)
    left.set_ylabel("second", color=INK, fontsize=9)
    if view.title:
        figure.suptitle(textwrap.fill(literal(view.title), 120), fontsize=11, x=0.01, ha="left", color=INK)
    figure.savefig(path)


def outline_strata(axes: Axes, where: Floats, strata: Ints, *, has_numbers: bool = True) -> None:
    """Draw a line around the points of each stratum, and optionally write above it how many points the stratum has.

    Args:
        axes: The axes.
        where: The points, shape (n, 2).
        strata: The stratum of each point, shape (n,).
        has_numbers: Whether to write the numbers of points.
    """
    from matplotlib.patches import Polygon
    from matplotlib.patheffects import withStroke

    pad = np.maximum(0.025 * np.ptp(where, axis=0), 1e-9)
    for h in range(int(strata.max()) + 1):
        corners = outline(where[strata == h], pad)
        edge, width = (style.SOFT, 1.2) if has_numbers else (style.OTHER.colour, 0.8)
        axes.add_patch(Polygon(corners, fill=False, edgecolor=edge.light, linewidth=width, zorder=0.9))
        if has_numbers:
            axes.annotate(
                str(int((strata == h).sum())), corners[corners[:, 1].argmax()], (0, 2), textcoords="offset points",
                color=INK, fontsize=10, fontweight="bold", ha="center", va="bottom",
                path_effects=[withStroke(linewidth=2.5, foreground=style.PAPER.light)],
            )  # fmt: skip


def _pies(axes: Axes, where: Floats, labels: Ints, colours: list[str]) -> None:
    """Draw a small pie chart per client, with each slice as a marker of a scatter plot."""
    from matplotlib.path import Path as Outline

    for (x, y), held in zip(where, labels, strict=True):
        ends = np.concatenate([[0.0], np.cumsum(held) / max(int(held.sum()), 1)])
        for c in np.flatnonzero(held):
            angle = 2 * np.pi * np.linspace(ends[c], ends[c + 1], max(3, int(40 * (ends[c + 1] - ends[c]))))
            rim = np.stack([np.sin(angle), np.cos(angle)], axis=1)
            slice = Outline(np.concatenate([[[0.0, 0.0]], rim, [[0.0, 0.0]]]))
            # Matplotlib scales a marker by its extent; this size gives all slices of a pie the same radius.
            size = 140 * float(np.abs(rim).max()) ** 2
            axes.scatter([x], [y], marker=slice, s=size, color=colours[c], linewidths=0)
