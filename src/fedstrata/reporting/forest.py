"""Draw forest plots, one paper column wide, that show the differences between methods and a baseline."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fedstrata.base import style
from fedstrata.reporting import tables
from fedstrata.reporting.axes import INK, literal, short, style_axes
from fedstrata.reporting.contrasts import Contrast, Contrasts
from fedstrata.reporting.plots import PAPER, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW = 0.18
"""The height of a row in inches."""
FRAME = 0.85
"""The height of a panel's title and axis in inches."""


def draw_forest(comparisons: Mapping[str, Contrasts], path: Path | str) -> None:
    """Write a figure of the differences from the baseline, with one panel per data set and measure.

    A dot shows a mean difference, a line shows its 95 % interval, and circles show the differences of single seeds.

    Args:
        comparisons: A mapping from the name of each data set to its comparison. Each comparison must have a
            baseline.
        path: The file to write. The suffix determines the format, such as ``.png``.
    """
    from matplotlib.figure import Figure

    panels = [
        (data, comparison, key, [row for row in rows if row.difference is not None and row.difference.mean is not None])
        for data, comparison in comparisons.items()
        for key, rows in comparison.groups.items()
    ]
    heights = [FRAME + ROW * max(len(rows), 1) for *_, rows in panels]
    figure = Figure(figsize=(PAPER.width, sum(heights)), dpi=300, layout="constrained")
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (data, comparison, key, rows) in zip(grid, panels, strict=True):
        how = comparison.measures[key]
        heading = f"{data}: {how.heading}" if len(comparisons) > 1 else how.heading
        axes.set_title(textwrap.fill(literal(heading), 36), loc="left", fontsize=PAPER.size, color=INK)
        _panel(axes, comparison, how, sorted(rows, key=lambda row: _mean(row) * (comparison.directions[key] or 1)))
    save(figure, path)


def _mean(row: Contrast) -> float:
    return 0.0 if row.difference is None or row.difference.mean is None else row.difference.mean


def _panel(axes: Axes, comparison: Contrasts, how: tables.Measure, rows: list[Contrast]) -> None:
    """Draw one row per method, with the last method at the top."""
    strokes = style.lines(list(dict.fromkeys(row.label for row in comparison.rows)))
    axes.axvline(0, color=style.SOFT.light, linewidth=0.8)
    for place, row in enumerate(rows):
        difference, stroke = row.difference, strokes[row.label]
        assert difference is not None
        colour = (style.SOFT if stroke is style.OTHER else stroke.colour).light
        each = [value * how.factor for value in difference.each]
        axes.plot(
            each, [place] * len(each), "o", markersize=3, markerfacecolor="none", color=colour, markeredgewidth=0.6
        )
        if difference.interval is not None:
            axes.plot([end * how.factor for end in difference.interval], [place, place], color=colour, linewidth=1.4)
        axes.plot(_mean(row) * how.factor, place, "o", markersize=5, color=colour)
    unit = ", points" if how.factor == 100 else ""
    style_axes(axes, f"minus {short(comparison.baseline or '', PAPER.longest)}{unit}", "", size=PAPER.size)
    axes.set_yticks(range(len(rows)), [literal(short(row.label, PAPER.longest)) for row in rows])
    axes.tick_params(left=False)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    axes.set_ylim(-0.6, max(len(rows), 1) - 0.4)
