"""Draw a forest plot of the papers' claims: the differences between accuracies, with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from fedstrata.papers.judging import Judgement
from fedstrata.papers.svg import BLUE, INK, ORANGE, as_svg
from fedstrata.papers.tables import PAPERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW = 0.17
"""Height of a row in inches."""


def forest(judgements: Sequence[Judgement]) -> str:
    """Draw the accuracy differences of all claims, with one panel per paper.

    A thick line is the 95 % interval of a single comparison. The thin lines are Bonferroni-corrected: with 95 %
    confidence, all thin intervals of a claim contain the true values. The colour depends on the interval that decides
    the verdict. Blue intervals support the claim, orange intervals show the opposite, and grey intervals are not
    significant.

    Args:
        judgements: Verdicts on the claims of all papers.

    Returns:
        The figure as SVG.
    """
    return as_svg(partial(_figure, judgements))


def _figure(judgements: Sequence[Judgement]) -> Figure:
    from matplotlib.figure import Figure

    accuracies = [each for each in judgements if each.claim.kind in ("above", "near") and each.decisive]
    panels = {paper: [each for each in accuracies if each.claim.paper == paper] for paper in PAPERS}
    rows = {paper: sum(1 + len(each.decisive) for each in judged) for paper, judged in panels.items()}
    tallest = sorted(rows, key=lambda paper: -rows[paper])
    heights = [max(rows[paper] for paper in tallest[i : i + 2]) + 4 for i in (0, 2)]
    figure = Figure(figsize=(10, ROW * sum(heights)), layout="constrained")
    for paper, axes in zip(tallest, figure.subplots(2, 2, height_ratios=heights).flat, strict=True):
        _panel(axes, paper, panels[paper])
    return figure


def _panel(axes: Axes, paper: str, judgements: Sequence[Judgement]) -> None:
    labels = list[str]()
    for each in judgements:
        axes.axhline(len(labels), color=INK, lw=0.3)
        labels.append(f"{each.claim.about['table']}: {each.claim.about['row']}")
        within, sign = float(each.claim.about.get("within", 0.0)), {"above": BLUE, "below": ORANGE}
        for comparison, decisive in each.decisive:
            colour, y = sign.get(decisive.order(within), INK), len(labels)
            for difference, width in ((comparison.together, 1.0), (comparison.alone, 3.0)):
                if difference.interval:
                    axes.plot(difference.interval, [y, y], color=colour, lw=width, solid_capstyle="butt")
            axes.plot(decisive.mean or 0.0, y, "o", color=colour, ms=4)
            labels.append(f"− {comparison.than}, {comparison.column}")
    axes.set_title(PAPERS[paper].partition(" ")[0], loc="left", fontweight="bold")
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(left=False)
    axes.axvline(0, color=INK, lw=0.8)
    axes.set(ylim=(len(labels) - 0.3, -0.7), xlabel="difference in accuracy, points")
    axes.spines[["top", "right", "left"]].set_visible(False)
