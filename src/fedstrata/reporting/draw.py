"""Draw charts of runs (curves, participation and communication) into Matplotlib axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from fedstrata.base import style
from fedstrata.base.arrays import Floats, Ints
from fedstrata.base.errors import SpecError
from fedstrata.base.style import Stroke

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.colors import Colormap

    from fedstrata.evaluation.history import History

Curves: TypeAlias = "Mapping[str, Sequence[History]]"
"""The type of a mapping from each method's label to its histories, one per seed."""

INK, GRID = style.INK.light, style.GRID.light
PAIR = style.SERIES[1:3]
"""The line styles for two curves that do not stand for methods, such as training and test loss."""
BANDS = 3
"""The largest number of curves that all have bands; if there are more, only the baseline and the best method have
one."""
BAND = 0.12
"""The opacity of a band."""
EARLY = 10
"""The number of points from which on the beginning of a curve may be left out of the chart."""
LONGEST = 24
"""The largest number of characters of a label in a chart."""

TRAFFIC = ("bytes_up", "bytes_down")

FATES = {
    "clients_returned": "returned",
    "clients_dropped": "dropped out",
    "clients_late": "late",
    "clients_failed": "failed",
}
"""A mapping from the column that counts each outcome of invited clients to the outcome's name in charts."""


class Quantity(NamedTuple):
    """The display settings of a column: the name with its unit, and the factor from recorded values to this unit."""

    name: str
    factor: float = 1.0


QUANTITIES = {
    "accuracy": Quantity("test accuracy, %", 100),
    "loss": Quantity("test loss"),
    "train_loss": Quantity("training loss"),
    "samples": Quantity("samples trained in the round"),
    "bytes_up": Quantity("sent by clients in the round, MB", 1e-6),
    "bytes_down": Quantity("sent to clients in the round, MB", 1e-6),
    "seconds": Quantity("time of the round, s"),
    "simulated_seconds": Quantity("simulated time of the round, s"),
}


def quantity(column: str) -> Quantity:
    """Return the display settings of a column. Derive them from its name if ``QUANTITIES`` does not contain it.

    >>> quantity("bytes_up").factor, quantity("head_accuracy").name, quantity("test.auroc").name
    (1e-06, 'head accuracy, %', 'test auroc')
    """
    if column in QUANTITIES:
        return QUANTITIES[column]
    words = column.replace("_", " ")
    words = f"test {words.removeprefix('test.')}" if words.startswith("test.") else words
    return Quantity(f"{words}, %", 100) if column.endswith("accuracy") else Quantity(words)


class Band(NamedTuple):
    """The mean and the standard deviation over seeds in each of R rounds, shape (R,). With one seed, ``sd`` is 0."""

    rounds: Ints
    mean: Floats
    sd: Floats


class Curve(NamedTuple):
    """A curve in a chart: R horizontal positions, and the mean and standard deviation over seeds, shape (R,)."""

    x: Ints | Floats
    mean: Floats
    sd: Floats


class End(NamedTuple):
    """The last point of a curve, and the curve's label and colour."""

    x: float
    y: float
    label: str
    colour: str


def over_seeds(histories: Sequence[History], column: str) -> Band:
    """Return a column's mean and standard deviation over seeds, for rounds in which all seeds have a value.

    A seed without values in the column is ignored. If the run of one seed ended early, the curve ends at the same
    round. The mean of the other seeds would jump.

    Raises:
        SpecError: None of the seeds has this column.
    """
    curves: list[dict[int, float]] = []
    missing: SpecError | None = None
    for history in histories:
        try:
            rounds, values = history.column(column)
        except SpecError as error:  # The column may record events that did not happen with this seed.
            missing = error
            continue
        if len(rounds):
            curves.append(dict(zip(rounds.tolist(), values.tolist(), strict=True)))
    if missing is not None and not curves:
        raise missing
    common = sorted(set.intersection(*map(set, curves))) if curves else []
    if not common:
        return Band(np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0))
    table = np.array([[curve[round] for round in common] for curve in curves], dtype=np.float64)
    sd = table.std(axis=0, ddof=1) if len(table) > 1 else np.zeros(len(common))
    return Band(np.array(common, dtype=np.int64), table.mean(axis=0), sd)


def rising(drawn: Mapping[str, Curve]) -> bool:
    """Return True if, on average, the last point of the curves is above the first point."""
    return sum(float(line.mean[-1] - line.mean[0]) for line in drawn.values()) >= 0


def ranked(drawn: Mapping[str, Curve]) -> list[str]:
    """Return the labels of curves, sorted by the curves' last values, from best to worst.

    The highest value is best if the curves rise; otherwise, the lowest value is best.
    """
    sign = -1 if rising(drawn) else 1
    return sorted(drawn, key=lambda label: sign * float(drawn[label].mean[-1]))


def lines_of(curves: Curves, column: str, against: str = "round") -> dict[str, Curve]:
    """Return the curves of a chart, in the units that the chart shows.

    Args:
        curves: The histories of each method.
        column: The column.
        against: The horizontal axis: ``"round"``, or ``"bytes"`` for the MB sent since the start.

    Returns:
        A mapping from each method's label to its curve. Methods without values are omitted.

    Raises:
        SpecError: No history has such a column.
    """
    factor, problem = quantity(column).factor, None
    drawn = dict[str, Curve]()
    missing = 0
    for label, histories in curves.items():
        try:
            rounds, mean, sd = over_seeds(histories, column)
        except SpecError as error:  # This method does not record the column, but other methods may.
            problem, missing = error, missing + 1
            continue
        x = rounds.astype(np.float64) if against == "round" else sent(histories, rounds)
        if (positive := x > 0).any():  # A logarithmic axis has no 0.
            drawn[label] = Curve(x[positive], mean[positive] * factor, sd[positive] * factor)
    if problem is not None and missing == len(curves):
        raise problem
    return drawn


def banded(drawn: Mapping[str, Curve]) -> list[str]:
    """Return the labels of the curves that get bands. Only curves over several seeds can have bands.

    If the chart has more than ``BANDS`` curves, only the first curve and the best curve can have bands.
    """
    labels = drawn if len(drawn) <= BANDS else dict.fromkeys((next(iter(drawn)), ranked(drawn)[0]))
    return [label for label in labels if drawn[label].sd.any()]


def draw_curves(axes: Axes, curves: Curves, column: str, *, against: str = "round") -> list[End]:
    """Draw a column as a curve per method, with a band of one standard deviation.

    If there are more methods than colours, the baseline (the first method) and the best methods have colours, and all
    other curves are grey. The vertical axis begins at the value at which the curves begin to differ.

    Args:
        axes: The axes to draw into.
        curves: The histories of each method.
        column: The column.
        against: The horizontal axis: ``"round"``, or ``"bytes"`` for the MB sent since the start, on a logarithmic
            scale.

    Returns:
        The last points of all curves except grey curves, for ``label_ends``.

    Raises:
        SpecError: No history has such a column.
    """
    drawn = lines_of(curves, column, against)
    labels = list(curves)
    if len(labels) > len(style.SERIES) and drawn:
        labels = list(dict.fromkeys([next(iter(drawn)), *ranked(drawn), *labels]))
    strokes, with_band = style.lines(labels), banded(drawn)
    for label, line in drawn.items():
        _curve(axes, line, strokes[label], has_band=label in with_band)
    low, high = _view(axes, drawn, percent=quantity(column).factor == 100) if drawn else (0.0, 1.0)
    axes.set_ylim(low, high)
    if against == "round":
        _style_rounds(axes, quantity(column).name)
    else:
        style_axes(axes, "sent and received since the start, MB", quantity(column).name)
        if drawn:
            axes.set_xscale("log")  # The amounts of data that methods send differ by orders of magnitude.
            visible = [float(x) for line in drawn.values() for x in line.x[(low <= line.mean) & (line.mean <= high)]]
            axes.set_xlim(0.9 * min(visible), 1.05 * max(visible))
            log_ticks(axes.xaxis)
    return [
        End(float(line.x[-1]), float(line.mean[-1]), label, strokes[label].colour.light)
        for label, line in drawn.items()
        if strokes[label] is not style.OTHER
    ]


def _view(axes: Axes, drawn: Mapping[str, Curve], *, percent: bool) -> tuple[float, float]:
    """Return the range of the vertical axis: without the steep beginning of long curves, within 0 to 100 percent."""
    low, high = axes.dataLim.y0, axes.dataLim.y1
    if max(len(line.mean) for line in drawn.values()) >= EARLY:
        values = np.concatenate([line.mean for line in drawn.values()])
        ends = [line.mean[-1] - line.sd[-1] * sign for line in drawn.values() for sign in (-1, 1)]
        if rising(drawn):
            low = max(low, min(float(np.percentile(values, 10)), *ends))
        else:
            high = min(high, max(float(np.percentile(values, 90)), *ends))
    margin = 0.05 * (high - low) or 1.0
    low, high = low - margin, high + margin
    return (max(low, 0.0), min(high, 100.0)) if percent else (low, high)


def sent(histories: Sequence[History], rounds: Ints) -> Floats:
    """Return the MB sent and received until the end of each of R rounds, as a mean over seeds, shape (R,)."""
    mean: Floats = np.mean([spent(history, TRAFFIC, rounds) for history in histories], axis=0) * 1e-6
    return mean


def spent(history: History, columns: Sequence[str], rounds: Ints) -> Floats:
    """Return the sum of several columns from the start until the end of each of R rounds, shape (R,)."""
    total = np.zeros(len(rounds))
    for column in columns:
        when, amount = history.column(column)
        total += np.concatenate([[0.0], np.cumsum(amount)])[np.searchsorted(when, rounds, side="right")]
    return total


def draw_participation(axes: Axes, histories: Sequence[History]) -> None:
    """Draw the number of invited clients with each outcome in each round, as stacked means over seeds."""
    base: Floats | None = None
    for column, name in FATES.items():
        band = over_seeds(histories, column)
        if len(band.rounds) == 0 or (column != "clients_returned" and not band.mean.any()):
            continue
        base = np.zeros(len(band.rounds)) if base is None else base
        if len(base) != len(band.rounds):  # Columns can be stacked only if they have the same rounds.
            continue
        low, high = (np.append(values, values[-1]) for values in (base, base + band.mean))
        axes.fill_between(
            _edges(band), low, high, step="post", label=name, facecolor=style.FATES[name].light,
            edgecolor=style.PAPER.light, linewidth=0.6, hatch="////" if name == "dropped out" else None,
        )  # fmt: skip
        base = base + band.mean
    invited = over_seeds(histories, "clients_invited")
    if len(invited.rounds):
        values = np.append(invited.mean, invited.mean[-1])
        axes.step(_edges(invited), values, where="post", color=INK, linewidth=1, label="invited")
    _style_rounds(axes, "clients", from_zero=True)


def _edges(band: Band) -> Floats:
    return np.append(band.rounds - 0.5, band.rounds[-1] + 0.5)


def draw_communication(axes: Axes, histories: Sequence[History]) -> None:
    """Draw the amounts of data that clients sent and received since the start, as means over seeds."""
    for column, name, stroke in zip(TRAFFIC, ("by clients", "to clients"), PAIR, strict=True):
        rounds, mean, sd = over_seeds(histories, column)
        _curve(axes, Curve(rounds, np.cumsum(mean) * 1e-6, np.zeros_like(sd)), stroke, name)
    _style_rounds(axes, "sent since the start, MB", from_zero=True)


def draw_losses(axes: Axes, histories: Sequence[History]) -> None:
    """Draw the means of the test loss and the training loss over seeds, with bands of one standard deviation."""
    for column, name, stroke in zip(("loss", "train_loss"), ("test", "training"), PAIR, strict=True):
        _curve(axes, Curve(*over_seeds(histories, column)), stroke, name)
    _style_rounds(axes, "loss")


def _curve(axes: Axes, line: Curve, stroke: Stroke, label: str | None = None, *, has_band: bool = True) -> None:
    x, mean, sd = line
    if not len(x):
        return
    colour = stroke.colour.light
    width, order = (1.0, 1.5) if stroke is style.OTHER else (1.8, 2.0)
    marker = "o" if len(mean) == 1 else ""  # A single round would be invisible without a marker.
    axes.plot(
        x, mean, stroke.dash, color=colour, label=label, linewidth=width, zorder=order, marker=marker, markersize=4
    )
    if has_band and sd.any():
        axes.fill_between(x, mean - sd, mean + sd, color=colour, alpha=BAND, linewidth=0)


def heat_map(colour: str = style.SCALE.light, ground: str = style.PAPER.light) -> Colormap:
    """Return the colour map of heat maps, which goes from the background to a colour."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("fedstrata", [ground, colour])


def style_axes(axes: Axes, xlabel: str, ylabel: str, *, size: float = 9) -> None:
    """Set the names of axes, and the style of spines, ticks and grid that all charts share.

    Args:
        axes: The axes.
        xlabel: The name of the horizontal axis, with its unit.
        ylabel: The name of the vertical axis.
        size: The size of the names in points. The ticks are one point smaller, but at least 8 points.
    """
    axes.set_xlabel(literal(xlabel), color=INK, fontsize=size)
    axes.set_ylabel(literal(ylabel), color=INK, fontsize=size)
    axes.tick_params(colors=INK, labelsize=max(8, size - 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[:].set_color(INK)
    axes.set_axisbelow(True)
    axes.grid(visible=False)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.margins(x=0.02)
    if not axes.has_data():
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color=INK)


def log_ticks(axis: Axis) -> None:
    """Set the ticks of a logarithmic axis to numbers such as 1, 3 and 10. A longer axis has fewer ticks per decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = axis.get_view_interval()
    decades = float(np.log10(high / low))
    subs = (1.0,) if decades > 5 else (1.0, 3.0) if decades > 1.2 else (1.0, 2.0, 3.0, 5.0)
    axis.set_major_locator(LogLocator(subs=subs, numticks=12) if decades > 0.4 else MaxNLocator(4))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def short(label: str, longest: int = LONGEST) -> str:
    """Shorten a long label in the middle, because labels often differ at the end.

    >>> short("fedavg"), short("stratify, powersgd of rank 2")
    ('fedavg', 'stratify, power…f rank 2')
    """
    if len(label) <= longest:
        return label
    tail = longest // 3
    return f"{label[: longest - tail - 1]}…{label[-tail:]}"


def label_ends(
    axes: Axes, ends: Sequence[End], *, size: float = 9, longest: int = LONGEST, ground: str = style.PAPER.light
) -> None:
    """Write labels to the right of the axes, at the heights of the lines' ends, and move overlapping labels apart.

    Args:
        axes: The axes, with all lines and limits. The figure of the axes must have its final size.
        ends: The last points of the lines.
        size: The size of the text in points.
        longest: The largest number of characters of a label.
        ground: The colour of the background.
    """
    from matplotlib.patheffects import withStroke

    figure, halo = axes.get_figure(root=True), [withStroke(linewidth=2, foreground=ground)]
    assert figure is not None
    figure.draw_without_rendering()  # Compute the layout, because the next lines need it.
    heights = [float(axes.transData.transform((end.x, end.y))[1]) for end in ends]
    places = separated(heights, 1.15 * size * figure.dpi / 72)
    for end, place in zip(ends, places, strict=True):
        height = float(axes.transAxes.inverted().transform((0, place))[1])
        thread = {"arrowstyle": "-", "color": end.colour, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 2}
        axes.annotate(
            literal(short(end.label, longest)), (end.x, end.y), (1.015, height), textcoords="axes fraction",
            va="center", color=end.colour, fontsize=size, annotation_clip=False, path_effects=halo,
            arrowprops={**thread, "relpos": (0, 0.5)},
        )  # fmt: skip


def separated(wanted: Sequence[float], gap: float) -> list[float]:
    """Move positions as little as possible, so that consecutive positions are at least ``gap`` apart.

    The order stays the same, and the sum of the squared movements is minimal.

    >>> separated([5.0, 5.0, 0.0], 2.0)
    [4.0, 6.0, 0.0]
    """
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    blocks = list[tuple[float, int]]()  # Each block has a mean position (without gaps) and a number of positions.
    for rank, index in enumerate(order):
        mean, size = wanted[index] - rank * gap, 1
        while blocks and blocks[-1][0] > mean:
            before, members = blocks.pop()
            mean, size = (before * members + mean * size) / (members + size), size + members
        blocks.append((mean, size))
    flat = [mean for mean, size in blocks for _ in range(size)]
    moved = {index: flat[rank] + rank * gap for rank, index in enumerate(order)}
    return [moved[index] for index in range(len(wanted))]


def _style_rounds(axes: Axes, ylabel: str, *, from_zero: bool = False) -> None:
    """Style axes whose horizontal axis shows rounds; add a legend above the axes if lines have labels."""
    from matplotlib.ticker import MaxNLocator

    style_axes(axes, "round", ylabel)
    if from_zero:
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    handles, names = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            handles, names, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(names), frameon=False, fontsize=8,
            labelcolor=INK, borderaxespad=0.2, handlelength=1.4, columnspacing=1.2,
        )  # fmt: skip


def literal(text: str) -> str:
    """Escape dollar signs, because Matplotlib reads a text between dollar signs as mathematics."""
    return text.replace("$", r"\$")
