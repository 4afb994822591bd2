"""Draw the critical difference diagram of a ranking (Demšar 2006), with one row per method."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fedstrata.papers.board.protocol import BASELINE
from fedstrata.papers.board.ranks import Ranking
from fedstrata.papers.svg import BLUE, INK, ORANGE, as_svg
from fedstrata.reporting.axes import literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW, FRAME = 0.17, 1.0
"""Height of a row, and total height of the title and the axis, in inches."""
WIDTH = 5.6
"""Width of the picture in inches. At this width, the text is readable on a phone."""


def critical_difference_picture(ranking: Ranking, blocks: str) -> str:
    """Draw the average rank of each method, with a line that extends half the critical difference to each side.

    Args:
        ranking: Average ranks of the methods.
        blocks: Name for the blocks in the axis label, such as ``seeds``.

    Returns:
        The picture as SVG.
    """
    return as_svg(partial(_figure, ranking, blocks), size=9)


def _figure(ranking: Ranking, blocks: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, FRAME + ROW * len(ranking.ranks)), layout="constrained")
    draw(figure.subplots(), ranking, blocks)
    return figure


def draw(axes: Axes, ranking: Ranking, blocks: str) -> None:
    """Draw a ranking: a dot at each average rank, and a line that extends half the critical difference to each side.

    If the difference of two ranks is less than the critical difference, their lines overlap. The baseline is orange.
    """
    for place, (name, rank) in enumerate(ranking.ranks.items()):
        colour = ORANGE if name == BASELINE else BLUE
        ends = rank - ranking.critical / 2, rank + ranking.critical / 2
        axes.plot(ends, [place, place], color=colour, lw=2, alpha=0.4, solid_capstyle="butt")
        axes.plot(rank, place, "o", color=colour, ms=4)
    if BASELINE in ranking.ranks:
        for end in (-ranking.critical / 2, ranking.critical / 2):
            axes.axvline(ranking.ranks[BASELINE] + end, color=INK, lw=0.5, ls=":")
    axes.set_yticks(range(len(ranking.ranks)), [literal(name) for name in ranking.ranks])
    axes.tick_params(left=False)
    low, high = axes.get_xlim()
    axes.set_xticks([1, *(tick for tick in axes.get_xticks() if 1 < tick <= len(ranking.ranks))])
    axes.set(xlim=(low, high), ylim=(len(ranking.ranks) - 0.4, -0.6))
    axes.set_xlabel(f"average rank over {ranking.blocks} {blocks} (1 is best)")
    axes.set_title(f"critical difference {ranking.critical:.1f}", loc="left", fontsize="medium")
    axes.spines[["top", "right", "left"]].set_visible(False)
