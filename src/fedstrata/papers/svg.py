"""Draw figures as SVG that is readable on light and dark backgrounds."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fedstrata.base import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, BLUE, ORANGE = style.MIDDLE, style.SERIES[1].colour.dark, style.SERIES[2].colour.dark
"""Colours that are readable on light and dark backgrounds. ``INK`` is the colour of text and axes."""


def as_svg(draw: Callable[[], Figure], *, size: float = 8) -> str:
    """Return a figure as SVG with a transparent background. Equal figures yield equal SVG text.

    Args:
        draw: Function that draws and returns the figure.
        size: Font size in points.
    """
    import matplotlib

    colours = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    options: Any = {
        # Store text as text instead of shapes, so that the file is small and does not depend on this machine's fonts.
        "svg.fonttype": "none",
        "svg.hashsalt": "forest",
        "font.size": size,
        "font.family": "sans-serif",
        **colours,
    }
    text = io.StringIO()
    with matplotlib.rc_context(options):
        draw().savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"
