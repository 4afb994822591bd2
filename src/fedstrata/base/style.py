"""Define the colours and line styles of the report, all figures and the documentation.

Every colour has a contrast of at least 3:1 to its background. People with any kind of colour blindness can distinguish
the colours of the series. The tests in ``tests/base/test_style.py`` check both rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple


class Colour(NamedTuple):
    """A colour in the format ``#rrggbb``, with one value for light backgrounds and one for dark backgrounds."""

    light: str
    dark: str


Dash = Literal["-", "--", "-.", ":"]
"""A line style of Matplotlib."""


class Stroke(NamedTuple):
    """The line style of a method in charts. The field ``name`` is the name of the line's colour."""

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
"""The line styles of a chart's labels."""
FIXED = {"fedavg": 0, "stratify": 1, "fedsts": 2, "fedstas": 2, "rebafl": 3, "fedssar": 4, "scaffold": 5}
"""For each method whose line style is the same in all figures, the index of this style in ``SERIES``."""
OTHER = Stroke("other", Colour("#b9c0c8", "#5d6773"), "-")
"""The line style of all labels that do not get a style from ``SERIES``."""
COLOURED = 6
"""The number of labels that get a style from ``SERIES`` if a chart has more labels than styles."""

INK = Colour("#1f242b", "#e4e7eb")
"""The colour of text and axes."""
SOFT = Colour("#59626d", "#a3acb8")
"""The colour of notes and table headings."""
GRID = Colour("#e5e8ec", "#353b43")
"""The colour of grids in charts, and of lines between table rows."""
PAPER = Colour("#ffffff", "#14171b")
"""The colour of the background."""
PANEL = Colour("#f6f7f9", "#1c2025")
"""The background colour of cards, and of the baseline's row in tables."""
ACCENT = Colour("#0a62b8", "#7cbcff")
"""The colour of links, and of the outline of the element that has the keyboard focus."""
BORDER = Colour("#8a94a0", "#5d6773")
"""The colour of borders of buttons and other controls."""
MIDDLE = "#7a7f86"
"""The colour of text and axes in pictures for both light and dark backgrounds."""
SCALE = Colour("#08519c", "#6db3f2")
"""The colour of the largest value in a heat map. The colour scale begins with the background colour."""

FATES = {
    "returned": Colour("#347a58", "#347a58"),
    "dropped out": Colour("#c98a00", "#c98a00"),
    "late": Colour("#0087b0", "#0087b0"),
    "failed": Colour("#ab4e00", "#ab4e00"),
    "refused": Colour("#d0468f", "#d0468f"),
}
"""The colour for each outcome of a client's invitation to a round."""


class Verdict(NamedTuple):
    """The display of a comparison's result: a sign, words and colours, which are always used together."""

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
"""A mapping from each CSS variable of the HTML pages to its colour."""


def style_sheet() -> str:
    """Return the CSS that sets ``VARIABLES`` for light and dark backgrounds."""
    colours = "".join(f"--{name}: light-dark({light}, {dark}); " for name, (light, dark) in VARIABLES.items())
    return f":root {{ color-scheme: light dark; {colours}}}"


def lines(labels: Sequence[str]) -> dict[str, Stroke]:
    """Choose a line style for each label of a chart.

    A method in ``FIXED`` gets its fixed style. All other labels get the remaining styles. If there are more labels than
    styles, only the first ``COLOURED`` labels get colours, so that the colours can be distinguished.

    Args:
        labels: The labels, in order of importance.

    >>> [SERIES.index(line) for line in lines(["moon", "scaffold", "fedavg"]).values()]
    [1, 5, 0]
    """
    coloured = labels if len(labels) <= len(SERIES) else labels[:COLOURED]
    chosen = dict.fromkeys(labels, OTHER)
    free = dict(enumerate(SERIES))
    for label in coloured:
        if (index := FIXED.get(label)) in free:
            chosen[label] = free.pop(index)
    # Grey is the colour of FedAvg, the usual baseline. Another label gets grey only if no other colour is left.
    rest = sorted(free, key=lambda index: index == FIXED["fedavg"])
    for label, index in zip((each for each in coloured if chosen[each] is OTHER), rest, strict=False):
        chosen[label] = free[index]
    return chosen


def categories(count: int) -> list[Colour]:
    """Return colours for categories other than methods, for example for the labels of samples.

    The colours of ``SERIES`` come first, then their lighter shades, and then their darker shades. After the darker
    shades, the colours repeat.

    >>> [colour.light for colour in categories(10)[-3:]]
    ['#492e63', '#aaaeb3', '#adcbfb']
    """
    shades = [Colour(*map(_shade(step), stroke.colour)) for step in (0.0, 0.525, -0.45) for stroke in SERIES]
    return [shades[index % len(shades)] for index in range(count)]


def _shade(step: float) -> Callable[[str], str]:
    """Return a function that mixes a colour with white or, if ``step`` is negative, with black."""
    aim = 255 if step > 0 else 0
    return lambda colour: (
        "#" + "".join(f"{round(value + abs(step) * (aim - value)):02x}" for value in bytes.fromhex(colour[1:]))
    )
