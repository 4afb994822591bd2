"""Set the style of axes: colours, ticks, and labels that do not overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedstrata.base import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.colors import Colormap

LONGEST = 24
"""The maximum number of characters of a label in a chart."""


INK, GRID = style.INK.light, style.GRID.light


class End(NamedTuple):
    """The last point of a curve, and the curve's label and colour."""

    x: float
    y: float
    label: str
    colour: str


def heat_map(colour: str = style.SCALE.light, ground: str = style.PAPER.light) -> Colormap:
    """Return the colour map of heat maps, from the background colour to ``colour``."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("fedstrata", [ground, colour])


def style_axes(axes: Axes, xlabel: str, ylabel: str, *, size: float = 9) -> None:
    """Label the axes, and style their spines, ticks and grid as in all charts.

    Args:
        axes: The axes.
        xlabel: The name of the horizontal axis, with its unit.
        ylabel: The name of the vertical axis.
        size: The size of the names in points. The ticks' numbers are one point smaller, but not below 8 points.
    """
    axes.set_xlabel(literal(xlabel), color=INK, fontsize=size)
    axes.set_ylabel(literal(ylabel), color=INK, fontsize=size)
    axes.tick_params(colors=INK, labelsize=max(8, size - 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[:].set_color(INK)
    axes.set_axisbelow(True)
    axes.grid(visible=False)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.margins(x=0.02)
    if not axes.has_data():
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color=INK)


def log_ticks(axis: Axis) -> None:
    """Set the ticks of a logarithmic axis to numbers such as 1, 3 and 10."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = axis.get_view_interval()
    decades = float(np.log10(high / low))
    subs = (1.0,) if decades > 5 else (1.0, 3.0) if decades > 1.2 else (1.0, 2.0, 3.0, 5.0)
    axis.set_major_locator(LogLocator(subs=subs, numticks=12) if decades > 0.4 else MaxNLocator(4))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def short(label: str, longest: int = LONGEST) -> str:
    """Shorten a long label in the middle, because labels often differ at the end.

    >>> short("fedavg"), short("stratify, powersgd of rank 2")
    ('fedavg', 'stratify, power…f rank 2')
    """
    if len(label) <= longest:
        return label
    tail = longest // 3
    return f"{label[: longest - tail - 1]}…{label[-tail:]}"


def label_ends(
    axes: Axes, ends: Sequence[End], *, size: float = 9, longest: int = LONGEST, ground: str = style.PAPER.light
) -> None:
    """Write each line's label to the right of the axes, at the height of the line's end. Move overlapping labels apart.

    Args:
        axes: The axes, after all lines are drawn and all limits are set. The figure must already have its final size.
        ends: The last points of the lines.
        size: The size of the text in points.
        longest: The maximum number of characters of a label.
        ground: The colour of the background.
    """
    from matplotlib.patheffects import withStroke

    figure, halo = axes.get_figure(root=True), [withStroke(linewidth=2, foreground=ground)]
    assert figure is not None
    figure.draw_without_rendering()  # Compute the layout, because the next lines need it.
    heights = [float(axes.transData.transform((end.x, end.y))[1]) for end in ends]
    places = separated(heights, 1.15 * size * figure.dpi / 72)
    for end, place in zip(ends, places, strict=True):
        height = float(axes.transAxes.inverted().transform((0, place))[1])
        thread = {"arrowstyle": "-", "color": end.colour, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 2}
        axes.annotate(
            literal(short(end.label, longest)), (end.x, end.y), (1.015, height), textcoords="axes fraction",
            va="center", color=end.colour, fontsize=size, annotation_clip=False, path_effects=halo,
            arrowprops={**thread, "relpos": (0, 0.5)},
        )  # fmt: skip


def separated(wanted: Sequence[float], gap: float) -> list[float]:
    """Move positions as little as possible, so that consecutive positions are at least ``gap`` apart.

    The order of the positions does not change.

    >>> separated([5.0, 5.0, 0.0], 2.0)
    [4.0, 6.0, 0.0]
    """
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    # A block is a group of neighbours that are placed ``gap`` apart. It is stored as a pair: the mean of the wanted
    # positions, from which rank * gap is subtracted, and the number of positions.
    blocks = list[tuple[float, int]]()
    for rank, index in enumerate(order):
        mean, size = wanted[index] - rank * gap, 1
        while blocks and blocks[-1][0] > mean:
            before, members = blocks.pop()
            mean, size = (before * members + mean * size) / (members + size), size + members
        blocks.append((mean, size))
    flat = [mean for mean, size in blocks for _ in range(size)]
    moved = {index: flat[rank] + rank * gap for rank, index in enumerate(order)}
    return [moved[index] for index in range(len(wanted))]


def style_rounds(axes: Axes, ylabel: str, *, from_zero: bool = False) -> None:
    """Style a chart whose horizontal axis shows rounds. If lines have labels, add a legend above the chart."""
    from matplotlib.ticker import MaxNLocator

    style_axes(axes, "round", ylabel)
    if from_zero:
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    handles, names = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            handles, names, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(names), frameon=False, fontsize=8,
            labelcolor=INK, borderaxespad=0.2, handlelength=1.4, columnspacing=1.2,
        )  # fmt: skip


def literal(text: str) -> str:
    """Escape dollar signs, because Matplotlib interprets text between dollar signs as mathematics."""
    return text.replace("$", r"\$")
