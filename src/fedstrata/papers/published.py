"""Draw a paper's published numbers beside our results, which are means over seeds with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedstrata.papers.svg import BLUE, INK, ORANGE, as_svg
from fedstrata.papers.tables import METRICS, Table
from fedstrata.reporting.axes import literal
from fedstrata.reporting.statistics import Estimate, cut

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW, FRAME = 0.2, 0.85
"""Height of a line, and total height of a panel's title and axis, in inches."""
WIDTH = 5.6
"""Width of the figure in inches. At this width, the text is readable on a phone."""


class Row(NamedTuple):
    """A published number and our result for one setting and method, in percent.

    Args:
        setting: Name of the column in the paper's table.
        method: Name of the row in the paper's table.
        paper: Published number; None if the paper does not give a number.
        ours: Our mean over seeds, with its interval.
    """

    setting: str
    method: str
    paper: float | None
    ours: Estimate


class Panel(NamedTuple):
    """A panel of the figure: a table, and at least one row with a published number and our result."""

    table: Table
    rows: Sequence[Row]

    def lines(self) -> list[str | Row]:
        """Return the lines of the panel: the name of each setting, followed by its rows."""
        groups = groupby(self.rows, key=attrgetter("setting"))
        return [line for setting, rows in groups for line in (setting, *rows)]


def draw_published(panels: Sequence[Panel]) -> str:
    """Draw one panel per table, with a line for each pair of a published number and our result.

    Args:
        panels: One or more panels.

    Returns:
        The figure as SVG.
    """
    return as_svg(partial(_figure, panels), size=9)


def _figure(panels: Sequence[Panel]) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    heights = [FRAME + ROW * len(panel.lines()) for panel in panels]
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.3), layout=ConstrainedLayoutEngine(h_pad=0.1))
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, panel in zip(grid, panels, strict=True):
        draw_panel(axes, panel)
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper left", ncols=2, frameon=False)
    return figure


def draw_panel(axes: Axes, panel: Panel) -> None:
    """Draw a triangle at each published number, a dot at our mean, and a line that covers our 95 % interval."""
    lines = panel.lines()
    rows = [(place, line) for place, line in enumerate(lines) if isinstance(line, Row)]
    places = [place for place, _ in rows]
    for place, row in rows:
        if interval := cut(row.ours.interval, (0.0, 100.0)):
            axes.plot(interval, [place, place], color=BLUE, lw=2, solid_capstyle="butt")
    ours, paper = np.array([(row.ours.mean, row.paper) for _, row in rows], dtype=np.float64).T
    axes.plot(ours, places, "o", color=BLUE, ms=5, clip_on=False, label="our mean and its 95 % interval")
    axes.plot(paper, places, "^", color=ORANGE, ms=5, clip_on=False, label="the paper's figure")
    axes.set_title(literal(panel.table.title), loc="left", fontweight="bold")
    axes.set_yticks(range(len(lines)), [literal(line if isinstance(line, str) else line.method) for line in lines])
    for place in {*range(len(lines))} - {*places}:
        axes.axhline(place, color=INK, lw=0.3)
        axes.get_yticklabels()[place].set_fontweight("bold")
    axes.tick_params(left=False)
    low, high = axes.get_xlim()
    axes.set(xlim=(max(low, 0.0), min(high, 100.0)), ylim=(len(lines) - 0.3, -0.7))
    axes.set_xlabel(f"{METRICS[panel.table.metric]}, %")
    axes.spines[["top", "right", "left"]].set_visible(False)
