"""Square pictures of the pages in the gallery, which say more at this size than figures of the pages would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from fedstrata.base import style

GREY, BLUE, ORANGE, GREEN, PINK, TEAL = (line.colour.light for line in style.SERIES[:6])
INK, PALE = style.INK.light, style.OTHER.colour.light


def hospitals(axes: Axes) -> None:
    """Draw four sites, each with a gain and its interval."""
    for row, (gain, spread) in enumerate([(0.3, 0.25), (0.7, 0.2), (0.45, 0.3), (0.8, 0.15)]):
        axes.plot([gain - spread, gain + spread], [row, row], color=BLUE, linewidth=4)
        axes.plot(gain, row, "o", color=BLUE, markersize=13)
    axes.axvline(0.2, color=GREY, linewidth=2)
    axes.set(xlim=(-0.1, 1.1), ylim=(-0.7, 3.7))


def who_is_missing(axes: Axes) -> None:
    """Draw clients over rounds, of which some are absent."""
    here = np.random.default_rng(3).random((6, 6)) < 0.5
    for (row, column), there in np.ndenumerate(here):
        axes.plot(column, row, "s", color=BLUE if there else PALE, fillstyle="full" if there else "none", markersize=16)
    axes.set(xlim=(-0.7, 5.7), ylim=(-0.7, 5.7))


def compose_your_own(axes: Axes) -> None:
    """Draw four blocks, of which one is replaced."""
    for place, colour in zip([(0, 0), (1, 0), (0, 1), (1.12, 1.12)], [GREY, GREY, GREY, ORANGE], strict=True):
        axes.add_patch(plt.Rectangle(place, 0.92, 0.92, color=colour))
    axes.set(xlim=(-0.2, 2.25), ylim=(-0.2, 2.25))


def from_scratch(axes: Axes) -> None:
    """Draw lines of code."""
    widths = [0.55, 0.8, 0.65, 0.4, 0.75, 0.5, 0.3]
    for row, width in enumerate(widths):
        start = 0.18 * (row % 3 > 0)
        axes.plot([start, start + width], [-row, -row], color=[BLUE, GREY, GREEN][row % 3], linewidth=8)
    axes.set(xlim=(-0.1, 1.1), ylim=(-6.8, 0.8))


def bytes_against_accuracy(axes: Axes) -> None:
    """Draw two curves of accuracy over bytes."""
    x = np.linspace(0, 1, 50)
    axes.plot(x, 0.9 * (1 - np.exp(-9 * x)), color=BLUE, linewidth=5)
    axes.plot(x, 0.7 * (1 - np.exp(-3 * x)), color=GREY, linewidth=5)
    bottom(axes)


def from_flower(axes: Axes) -> None:
    """Draw a flower, and an arrow to strata."""
    angles = np.linspace(0, 2 * np.pi, 7)[:-1]
    axes.plot(0.25 + 0.15 * np.cos(angles), 0.5 + 0.15 * np.sin(angles), "o", color=PINK, markersize=17)
    axes.plot(0.25, 0.5, "o", color=ORANGE, markersize=15)
    arrow_to_strata(axes)


def from_fluke(axes: Axes) -> None:
    """Draw a fluke of a whale, and an arrow to strata."""
    x = np.linspace(-1, 1, 60)
    axes.fill_between(0.25 + 0.22 * x, 0.45 + 0.25 * np.abs(x) ** 1.5, 0.5 + 0.2 * np.abs(x) ** 0.5, color=TEAL)
    axes.fill_betweenx([0.25, 0.5], [0.22, 0.24], [0.28, 0.26], color=TEAL)
    arrow_to_strata(axes)


def stratify(axes: Axes) -> None:
    """Draw a schedule of labels."""
    colours = np.random.default_rng(1).permutation(np.repeat([BLUE, ORANGE, GREEN, PINK], 9))
    for index, colour in enumerate(colours):
        axes.plot(index % 6, index // 6, "s", color=colour, markersize=16)
    axes.set(xlim=(-0.7, 5.7), ylim=(-0.7, 5.7))


def fedsts_fedstas(axes: Axes) -> None:
    """Draw three strata of clients."""
    groups(axes, [(0.25, 0.7), (0.75, 0.72), (0.5, 0.25)], [BLUE, ORANGE, GREEN], 12)


def fedssar(axes: Axes) -> None:
    """Draw clusters of models of different sizes, and outliers."""
    groups(axes, [(0.3, 0.65), (0.72, 0.35)], [PINK, BLUE], 18)
    axes.plot([0.15, 0.85, 0.9], [0.15, 0.85, 0.7], "o", color=PALE, markersize=9)


def rebafl(axes: Axes) -> None:
    """Draw the accuracy of a class that is absent for some rounds."""
    x = np.linspace(0, 1, 60)
    away = (x > 0.35) & (x < 0.7)
    axes.axvspan(0.35, 0.7, color=style.GRID.light)
    axes.plot(x, np.where(away, 0.85 - 0.3 * (x - 0.35), 0.85), color=GREEN, linewidth=5)
    axes.plot(x, np.where(away, 0.8 * np.exp(-14 * (x - 0.35)), 0.8), color=GREY, linewidth=5)
    bottom(axes)


def groups(axes: Axes, centres: list[tuple[float, float]], colours: list[str], size: int) -> None:
    """Draw groups of points, each around its centre."""
    generator = np.random.default_rng(0)
    for centre, colour in zip(centres, colours, strict=True):
        x, y = generator.normal(centre, 0.07, (size, 2)).T
        axes.plot(x, y, "o", color=colour, markersize=9)
    axes.set(xlim=(0, 1), ylim=(0, 1))


def arrow_to_strata(axes: Axes) -> None:
    """Draw an arrow to three layers."""
    axes.annotate("", (0.68, 0.5), (0.5, 0.5), arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 3})
    for row, colour in enumerate([GREY, BLUE, ORANGE]):
        axes.plot([0.76, 0.96], [0.38 + 0.12 * row] * 2, color=colour, linewidth=10)
    axes.set(xlim=(0, 1.02), ylim=(0.1, 0.9))


def bottom(axes: Axes) -> None:
    """Draw the two axes of a chart."""
    axes.plot([0, 0, 1], [1, 0, 0], color=INK, linewidth=2)
    axes.set(xlim=(-0.08, 1.08), ylim=(-0.08, 1.05))


PICTURES: dict[str, dict[str, Callable[[Axes], None]]] = {
    "gallery": {
        each.__name__: each
        for each in (
            *(hospitals, who_is_missing, compose_your_own, from_scratch),
            *(bytes_against_accuracy, from_flower, from_fluke),
        )
    },
    "concepts": {each.__name__: each for each in (stratify, fedsts_fedstas, fedssar, rebafl)},
}
"""A mapping from each folder of pages to the picture of each page."""


def write(docs: Path) -> None:
    """Write all pictures where the gallery has its thumbnails."""
    for folder, pictures in PICTURES.items():
        for name, draw in pictures.items():
            figure = plt.figure(figsize=(2, 2), facecolor=style.PAPER.light)
            axes = figure.add_axes((0.06, 0.06, 0.88, 0.88))
            axes.axis("off")
            draw(axes)
            figure.savefig(docs / folder / "images" / "thumb" / f"sphx_glr_{name}_thumb.png", dpi=200)
            plt.close(figure)
