"""Draw runs as Matplotlib figures and as files, without a display and without ``pyplot``."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedstrata.base import style
from fedstrata.base.errors import SpecError
from fedstrata.evaluation.history import column_of
from fedstrata.reporting import draw
from fedstrata.reporting.answer import answer
from fedstrata.reporting.axes import INK, label_ends, literal, short
from fedstrata.reporting.contrasts import contrast
from fedstrata.reporting.draw import Curves
from fedstrata.reporting.tables import primary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedstrata.evaluation.history import History


class Format(NamedTuple):
    """The format of a figure: its width and height in inches, and its type size in points.

    The field ``longest`` is the maximum number of characters of a label. The field ``across`` is the maximum number of
    characters in a line of the title.
    """

    width: float
    height: float
    size: float
    longest: int
    across: int


SCREEN = Format(7.0, 4.2, 9, 24, 74)
PAPER = Format(3.5, 2.6, 8, 16, 40)
"""The format of figures for one column of a paper."""


def plot(
    history: History | Mapping[str, Sequence[History]],
    column: str = "accuracy",
    path: Path | str | None = None,
    *,
    against: str = "round",
    title: str = "",
    narrow: bool = False,
) -> Figure:
    """Plot a column of the records over the rounds: the mean over seeds, with a band of one standard deviation.

    The name of a method is written beside the end of its line. With more than 8 methods, only the baseline (the first
    method) and the five best methods have colours and names; other lines are grey. With more than 3 methods, only the
    baseline and the best method have bands. The vertical range excludes the steep beginning of long lines.

    Args:
        history: The history of a run, or a mapping from the methods' labels to histories, as ``compare`` returns it.
        column: A column of numbers, such as ``accuracy`` or ``bytes_up``.
        path: The file to write (optional). The suffix determines the format, such as ``.png`` or ``.pdf``.
        against: The horizontal axis: ``"round"``, or ``"bytes"`` for the data sent since the start.
        title: The title of the figure (optional).
        narrow: Whether to make the figure fit one column of a paper: 3.5 inches wide, with a font size of 8 points.

    Raises:
        SpecError: No run has the column.
    """
    if against not in ("round", "bytes"):
        raise SpecError("against", "must be 'round' or 'bytes'.", against)
    curves = history if isinstance(history, Mapping) else {history.method or "run": [history]}
    form = PAPER if narrow else SCREEN
    figure = _figure(form)
    axes = figure.subplots()
    ends = draw.draw_curves(axes, curves, column, against=against)
    for name in (axes.xaxis.label, axes.yaxis.label):
        name.set_fontsize(form.size)
    if title:
        text = textwrap.fill(literal(title), form.across)
        figure.suptitle(text, x=0.01, ha="left", fontsize=form.size + 1, fontweight="bold", color=INK)
    note = textwrap.fill(literal(_note(curves, column, against)), form.across)
    axes.set_title(note, loc="left", fontsize=form.size, color=style.SOFT.light)
    if len(curves) > 1:
        label_ends(axes, ends, size=form.size, longest=form.longest)
    return _saved(figure, path)


def plot_comparison(curves: Curves, folder: Path | str) -> list[Path]:
    """Plot the primary metric over rounds and over bytes, as PNG files, and as PDF files that fit a paper's column.

    The files of the first figure are named after the metric, such as ``accuracy.png``. The second figure's files
    are ``traffic.png`` and ``traffic.pdf``.

    Returns:
        The paths of the files.
    """
    files, metric = [], primary(curves)
    titles = {"round": _verdict(curves), "bytes": _cheapest(curves, column_of(metric))}
    for name, against in ((metric, "round"), ("traffic", "bytes")):
        for suffix in (".png", ".pdf"):
            files.append(Path(folder) / f"{name}{suffix}")
            is_paper = suffix == ".pdf"
            plot(curves, column_of(metric), files[-1], against=against, title=titles[against], narrow=is_paper)
    return files


def _verdict(curves: Curves) -> str:
    """Return a sentence about the methods that are ahead of the baseline; empty if there is only one method."""
    return answer(curves, contrast(curves)).headline.rstrip(".") if len(curves) > 1 else ""


def _cheapest(curves: Curves, column: str) -> str:
    """Return a sentence about the method that needs the fewest bytes to reach a level that all methods reach."""
    drawn = draw.lines_of(curves, column, "bytes")
    if len(drawn) < 2 or len(drawn) < len(curves):
        return ""
    sign = 1 if draw.rising(drawn) else -1
    common = min(float((sign * line.mean).max()) for line in drawn.values())
    needed = {label: float(line.x[np.argmax(sign * line.mean >= common)]) for label, line in drawn.items()}
    first, second, *_ = sorted(needed, key=needed.__getitem__)
    if needed[second] < 1.005 * needed[first]:
        return ""
    shown = draw.quantity(column)
    name, _, unit = shown.name.partition(", ")
    level = f"{sign * common:.1f} {unit}" if unit else f"{sign * common:.3f}"
    return f"{first} reaches a {name} of {level} with the fewest bytes, {needed[first]:,.3g} MB"


def _note(curves: Curves, column: str, against: str) -> str:
    """Return a note about a figure: the number of seeds, the meaning of bands, and the number of grey lines."""
    drawn, parts = draw.lines_of(curves, column, against), []
    seeds = {len(curves[label]) for label in drawn}
    if max(seeds, default=1) > 1:
        parts.append(f"mean of {'–'.join(map(str, dict.fromkeys((min(seeds), max(seeds)))))} seeds")
    if labels := draw.banded(drawn):
        of = "" if len(drawn) <= draw.BANDS else f" ({', '.join(map(short, labels))})"
        parts.append(f"band 1 sd{of}")
    if len(curves) > len(style.SERIES):
        parts.append(f"grey: {len(curves) - style.COLOURED} others")
    return ", ".join(parts)


def plot_run(history: History, folder: Path | str) -> list[Path]:
    """Plot a run as ``accuracy.png``, ``loss.png``, ``participation.png`` and ``communication.png``.

    If the accuracy is not the primary metric, the first file shows the primary metric and is named after this metric.

    Returns:
        The paths of the files.
    """
    pictures: dict[str, Callable[[Axes], object]] = {
        history.primary: lambda axes: draw.draw_curves(axes, {"": [history]}, column_of(history.primary)),
        "loss": lambda axes: draw.draw_losses(axes, [history]),
        "participation": lambda axes: draw.draw_participation(axes, [history]),
        "communication": lambda axes: draw.draw_communication(axes, [history]),
    }
    files = []
    for name, draw_into in pictures.items():
        figure = _figure()
        draw_into(figure.subplots())
        files.append(Path(folder) / f"{name}.png")
        _saved(figure, files[-1])
    return files


def _figure(form: Format = SCREEN) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(form.width, form.height), dpi=130, layout="constrained")


def _saved(figure: Figure, path: Path | str | None) -> Figure:
    if path is not None:
        save(figure, path)
    return figure


def save(figure: Figure, path: Path | str) -> None:
    """Write a figure to a file. The same figure always gives the same bytes."""
    import matplotlib

    dates = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
    # Embed TrueType fonts (type 42), because journals require them.
    with matplotlib.rc_context({"pdf.fonttype": 42, "svg.hashsalt": "fedstrata"}):
        figure.savefig(path, metadata=dates.get(Path(path).suffix.lower()))
