"""Colours: their contrast, and whether people with each kind of colour blindness can distinguish them."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from fedstrata.base import style
from fedstrata.base.arrays import Floats

# Machado, Oliveira and Fernandes (2009), A physiologically-based model for simulation of color vision deficiency,
# severity 1.0; the matrices apply to linear RGB.
SIGHTS = {
    "all colours": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
# Ottosson (2020), A perceptual color space for image processing: from linear RGB to OKLab.
TO_CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)
THEMES = ("light", "dark")


def linear(colour: str) -> Floats:
    """The linear RGB of a colour such as ``#4d5560``, from 0 to 1, (3,)."""
    values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(first: str, second: str) -> float:
    """The contrast of two colours by WCAG 2.2, from 1 to 21."""
    low, high = sorted(float(linear(colour) @ (0.2126, 0.7152, 0.0722)) for colour in (first, second))
    return (high + 0.05) / (low + 0.05)


def oklab(colour: str, sight: str) -> Floats:
    seen = np.clip(SIGHTS[sight] @ linear(colour), 0, 1)
    return TO_LAB @ np.cbrt(TO_CONES @ seen)


def test_contrasts_by_hand() -> None:
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)  # the known grey just below 4.5


def test_oklab_of_white_and_of_a_grey() -> None:
    assert oklab("#ffffff", "all colours") == pytest.approx([1, 0, 0], abs=1e-4)
    for sight in SIGHTS:  # no colour blindness changes a grey
        assert oklab("#808080", sight)[1:] == pytest.approx([0, 0], abs=2e-3)


@pytest.mark.parametrize("theme", THEMES)
def test_every_colour_can_be_seen(theme: str) -> None:
    def against(colour: style.Colour, ground: style.Colour = style.PAPER) -> float:
        return contrast(getattr(colour, theme), getattr(ground, theme))

    assert min(against(line.colour) for line in style.SERIES) >= 3
    assert min(against(colour) for colour in style.FATES.values()) >= 2.8
    assert against(style.BORDER) >= 3
    assert against(style.INK) >= 12
    assert min(against(style.SOFT), against(style.SOFT, style.PANEL), against(style.ACCENT)) >= 5.5
    for verdict in (style.AHEAD, style.BEHIND, style.NO_ORDER):
        assert against(verdict.text, verdict.ground) >= 4.5


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("sight", SIGHTS)
def test_people_with_any_sight_can_distinguish_the_series(theme: str, sight: str) -> None:
    seen = [oklab(getattr(line.colour, theme), sight) for line in style.SERIES]
    nearest = min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2))
    assert nearest >= 0.07


def test_methods_of_the_papers_keep_their_lines() -> None:
    blue, orange = style.SERIES[1], style.SERIES[2]
    for labels in (["stratify"], ["moon", "fedavg", "stratify"], [*map(str, range(7)), "stratify"]):
        assert style.lines(labels)["stratify"] == blue
    both = style.lines(["fedsts", "fedstas"])
    assert both["fedsts"] == orange
    assert both["fedstas"] not in (orange, style.OTHER)


@pytest.mark.parametrize("n", range(1, 21))
def test_labels_share_no_line_but_grey(n: int) -> None:
    chosen = style.lines([*map(str, range(n - 1)), "fedavg"])
    coloured = [line for line in chosen.values() if line != style.OTHER]
    assert len(set(coloured)) == len(coloured) == (n if n <= len(style.SERIES) else style.COLOURED)


def test_every_variable_has_both_colours() -> None:
    sheet = style.style_sheet()
    assert sheet.count("light-dark(#") == len(style.VARIABLES) > 20
    assert "--grey: light-dark(#4d5560, #c2c9d1);" in sheet


def test_categories_have_24_colours() -> None:
    categories = style.categories(24)
    assert len(set(categories)) == 24
    assert categories[:8] == [line.colour for line in style.SERIES]
    assert style.categories(25)[24] == categories[0]


@pytest.mark.slow
def test_no_other_file_defines_a_colour() -> None:
    root = Path(__file__).resolve().parents[2]
    files = [path for folder in ("src", "examples", "benchmarks") for path in sorted((root / folder).rglob("*.py"))]
    forbidden = re.compile(r"#[0-9a-fA-F]{6}\b|tab10|tab20|viridis|prop_cycle")
    wrong = {
        str(path.relative_to(root)): forbidden.findall(path.read_text(encoding="utf-8"))
        for path in [*files, *sorted((root / "docs").glob("*.py"))]
        if path != Path(style.__file__)
    }
    assert len(wrong) > 300
    assert {path: colours for path, colours in wrong.items() if colours} == {}, "use fedstrata.base.style"
