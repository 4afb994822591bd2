"""Check figures of Matplotlib: that nothing of them is cut off."""

from __future__ import annotations

from matplotlib.figure import Figure


def assert_inside(figure: Figure) -> None:
    """Assert that all that a figure shows, such as labels and legends, lies within it; a pixel may be rounding."""
    figure.draw_without_rendering()
    box, (width, height), pixel = figure.get_tightbbox(), figure.get_size_inches(), 1 / figure.dpi
    assert min(box.x0, box.y0) >= -pixel, box
    assert box.x1 <= width + pixel, box
    assert box.y1 <= height + pixel, box
