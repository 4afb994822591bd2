"""The picture of a paper's figures beside ours."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedstrata.papers.published import Panel, Row, draw_panel, draw_published
from fedstrata.papers.tables import tables
from fedstrata.reporting.statistics import Estimate

ROWS = [
    Row("IID", "a", 75.0, Estimate.over([75.0, 75.0, 75.0])),
    Row("IID", "b", 71.25, Estimate.over([80.0, 90.2, 84.9])),
    Row("skewed", "a", 20.0, Estimate.over([10.0, 50.0, 99.0])),
]


@pytest.fixture
def panel():
    table = replace(next(iter(tables().values())), title="$a$ table", metric="final")
    return Panel(table, ROWS)


def test_marks_and_intervals_stand_at_their_values(panel):
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    draw_panel(axes, panel)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["IID", "a", "b", "skewed", "a"]
    marks = {line.get_marker(): line.get_xydata().tolist() for line in axes.lines if line.get_marker() in "o^"}
    assert marks["^"] == [[75.0, 1], [71.25, 2], [20.0, 4]]
    assert marks["o"] == [[75.0, 1], [pytest.approx(85.0333, abs=1e-4), 2], [53.0, 4]]
    assert marks["o"][0] == marks["^"][0], "equal values stand at the same place"
    intervals = {line.get_ydata()[0]: list(line.get_xdata()) for line in axes.lines if line.get_linewidth() == 2}
    # Mean 85.03, sd 5.1013, t with 2 degrees of freedom 4.3027: ± 12.67.
    assert intervals[2] == pytest.approx([72.361, 97.706], abs=1e-3)
    assert intervals[4] == [0.0, 100.0], "an interval of accuracies ends at what is possible"
    assert (axes.get_xlim()[0], axes.get_xlim()[1]) == (0.0, 100.0)
    assert axes.get_xlabel() == "accuracy after the last round, %"


@pytest.mark.slow
def test_the_picture_is_the_same_each_time_and_says_what_the_marks_are(panel):
    text = draw_published([panel, panel])
    assert text == draw_published([panel, panel])
    for words in ("our mean and its 95 % interval", "the paper's figure"):
        assert text.count(f">{words}</text>") == 1
    assert text.count(">$a$ table</text>") == 2
