"""Colours and lines of methods, outcomes and verdicts. The report, all figures and the documentation use them.

Every colour has a contrast of at least 3:1 to its background, and people with any kind of colour blindness can
distinguish the colours of the series; ``tests/base/test_style.py`` checks both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple


class Colour(NamedTuple):
    """A colour on light and on dark ground, as ``#rrggbb``."""

    light: str
    dark: str


Dash = Literal["-", "--", "-.", ":"]
"""A line style of Matplotlib."""


class Stroke(NamedTuple):
    """The line of a method in charts. ``name`` is the name of its colour."""

    name: str
    colour: Colour
    dash: Dash


SERIES = (
    Stroke("grey", Colour("#4d5560", "#c2c9d1"), "-"),
    Stroke("blue", Colour("#5292f6", "#3f89cd"), "-"),
    Stroke("orange", Colour("#ab4e00", "#b57e4f"), "--"),
    Stroke("green", Colour("#347a58", "#8ceb95"), "-."),
    Stroke("pink", Colour("#d0468f", "#cb4d88"), "-"),
    Stroke("teal", Colour("#0087b0", "#62aec0"), "--"),
    Stroke("brown", Colour("#6c2e26", "#ea937f"), "-."),
    Stroke("violet", Colour("#492e63", "#dd95ff"), ":"),
)
"""The lines that labels take."""
FIXED = {"fedavg": 0, "stratify": 1, "fedsts": 2, "fedstas": 2, "rebafl": 3, "fedssar": 4, "scaffold": 5}
"""The index in ``SERIES`` of the methods that have the same line in every figure."""
OTHER = Stroke("other", Colour("#b9c0c8", "#5d6773"), "-")
"""The line of labels for which no colour is left."""
COLOURED = 6
"""The number of labels with a colour, if there are more labels than ``SERIES`` has lines."""

INK = Colour("#1f242b", "#e4e7eb")
"""Text and axes."""
SOFT = Colour("#59626d", "#a3acb8")
"""Notes and headings of tables."""
GRID = Colour("#e5e8ec", "#353b43")
"""The grid of charts, and lines between the rows of a table."""
PAPER = Colour("#ffffff", "#14171b")
"""The background."""
PANEL = Colour("#f6f7f9", "#1c2025")
"""The background of cards, and of the baseline's row in a table."""
ACCENT = Colour("#0a62b8", "#7cbcff")
"""Links, and the outline of what has the keyboard's focus."""
BORDER = Colour("#8a94a0", "#5d6773")
"""The border of buttons and of other controls."""
MIDDLE = "#7a7f86"
"""Text and axes of pictures that stand on light and on dark ground."""
SCALE = Colour("#08519c", "#6db3f2")
"""The upper end of a heat map's scale, which begins at the background."""

FATES = {
    "returned": Colour("#347a58", "#347a58"),
    "dropped out": Colour("#c98a00", "#c98a00"),
    "late": Colour("#0087b0", "#0087b0"),
    "failed": Colour("#ab4e00", "#ab4e00"),
    "refused": Colour("#d0468f", "#d0468f"),
}
"""A mapping from each outcome of an invited client to its colour."""


class Verdict(NamedTuple):
    """How a verdict is shown: always with its sign, its words and its colours together."""

    sign: str
    words: str
    text: Colour
    ground: Colour


AHEAD = Verdict("▲", "ahead", Colour("#0b6b3a", "#8ceb95"), Colour("#e4f3ea", "#16301f"))
BEHIND = Verdict("▼", "behind", Colour("#9b2c14", "#ea937f"), Colour("#fbe9e4", "#3a1d16"))
NO_ORDER = Verdict("○", "no order shown", Colour("#4d5560", "#c2c9d1"), Colour("#eef0f3", "#262b32"))


VARIABLES = {
    **{line.name: line.colour for line in (*SERIES, OTHER)},
    **{f"fate{index}": colour for index, colour in enumerate(FATES.values())},
    **{"ink": INK, "soft": SOFT, "paper": PAPER, "panel": PANEL, "line": GRID, "heat": SCALE},
    **{"accent": ACCENT, "border": BORDER},
    **{
        f"{name}{part}": colour
        for name, verdict in (("ahead", AHEAD), ("behind", BEHIND), ("no-order", NO_ORDER))
        for part, colour in (("", verdict.text), ("-ground", verdict.ground))
    },
}
"""A mapping from the name of each variable in the style sheets of HTML pages to its colour."""


def style_sheet() -> str:
    """Return the CSS that sets ``VARIABLES`` for light and for dark ground."""
    colours = "".join(f"--{name}: light-dark({light}, {dark}); " for name, (light, dark) in VARIABLES.items())
    return f":root {{ color-scheme: light dark; {colours}}}"


def lines(labels: Sequence[str]) -> dict[str, Stroke]:
    """Choose the line of each label.

    A method in ``FIXED`` has its own line; other labels take the lines that remain. If there are more labels than
    lines, only the first ``COLOURED`` labels get a colour, so that these can be distinguished.

    Args:
        labels: The labels, the most important ones first.

    >>> [SERIES.index(line) for line in lines(["moon", "scaffold", "fedavg"]).values()]
    [1, 5, 0]
    """
    coloured = labels if len(labels) <= len(SERIES) else labels[:COLOURED]
    chosen = dict.fromkeys(labels, OTHER)
    free = dict(enumerate(SERIES))
    for label in coloured:
        if (index := FIXED.get(label)) in free:
            chosen[label] = free.pop(index)
    # Grey is the colour of the usual baseline: another label gets it only if no colour is left.
    rest = sorted(free, key=lambda index: index == FIXED["fedavg"])
    for label, index in zip((each for each in coloured if chosen[each] is OTHER), rest, strict=False):
        chosen[label] = free[index]
    return chosen


def categories(count: int) -> list[Colour]:
    """Return colours of categories that are not methods, such as the labels of samples.

    They are the colours of ``SERIES``, then lighter shades of these, then darker ones, and then the same again.

    >>> [colour.light for colour in categories(10)[-3:]]
    ['#492e63', '#aaaeb3', '#adcbfb']
    """
    shades = [Colour(*map(_shade(step), stroke.colour)) for step in (0.0, 0.525, -0.45) for stroke in SERIES]
    return [shades[index % len(shades)] for index in range(count)]


def _shade(step: float) -> Callable[[str], str]:
    """Return a function that moves a colour a fraction of the way to white, or to black if ``step`` is negative."""
    aim = 255 if step > 0 else 0
    return lambda colour: (
        "#" + "".join(f"{round(value + abs(step) * (aim - value)):02x}" for value in bytes.fromhex(colour[1:]))
    )
