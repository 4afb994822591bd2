"""The forest plot of ``fedstrata table --figure``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from canvas import assert_inside
from matplotlib.figure import Figure

from fedstrata.evaluation.history import History
from fedstrata.reporting.contrasts import contrast
from fedstrata.reporting.forest import draw_forest


def runs(labels: list[str], seeds: int = 3) -> dict[str, list[History]]:
    return {
        label: [
            History([{"round": 1, "accuracy": 0.5 + 0.01 * place + 0.001 * seed * place}], seed=seed)
            for seed in range(seeds)
        ]
        for place, label in enumerate(labels)
    }


def test_dots_intervals_and_rings_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    draw_forest({"digits": contrast(runs(["fedavg", "moon", "stratify"]))}, tmp_path / "a.pdf")
    axes = figures[0].axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["moon", "stratify"]
    assert axes.get_xlabel() == "minus fedavg, points"
    rings, interval, dot = axes.lines[1:4]
    assert rings.get_xdata() == pytest.approx([1.0, 1.1, 1.2])
    assert dot.get_xdata() == pytest.approx([1.1])
    # t(0.9875, 2) = 6.205 for two differences together; the standard deviation is 0.1.
    assert interval.get_xdata() == pytest.approx([1.1 - 6.205 * 0.1 / 3**0.5, 1.1 + 6.205 * 0.1 / 3**0.5], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("methods", [pytest.param(2, marks=pytest.mark.long), 20])
def test_the_figure_fits_a_column_and_embeds_truetype_fonts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, methods: int
) -> None:
    comparison = contrast(runs(["fedavg", *(f"a method with a long name {n}" for n in range(methods - 1))]))
    draw_forest({"digits": comparison}, tmp_path / "a.pdf")
    data = (tmp_path / "a.pdf").read_bytes()
    assert b"/FontFile2" in data
    assert b"/Type3" not in data
    box = re.search(rb"/MediaBox \[ ?0 0 ([\d.]+) ", data)
    assert box is not None
    assert float(box[1]) == 3.5 * 72
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    draw_forest({"digits": comparison, "mnist": comparison}, tmp_path / "a.svg")
    assert_inside(figures[0])
