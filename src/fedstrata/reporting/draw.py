"""Draw charts of runs (curves, participation and communication) into Matplotlib axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from fedstrata.base import style
from fedstrata.base.arrays import Floats, Ints
from fedstrata.base.errors import SpecError
from fedstrata.base.style import Stroke
from fedstrata.reporting.axes import (
    INK,
    End,
    log_ticks,
    style_axes,
    style_rounds,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedstrata.evaluation.history import History

Curves: TypeAlias = "Mapping[str, Sequence[History]]"
"""The type of a mapping from each method's label to its histories, one per seed."""

PAIR = style.SERIES[1:3]
"""The line styles for two curves that are not methods, such as training and test loss."""
BANDS = 3
"""The maximum number of curves with bands. If there are more curves, only the baseline and the best method have bands.
"""
BAND = 0.12
"""The opacity of a band."""
EARLY = 10
"""A chart may leave out the beginning of its curves only if a curve has at least this number of points."""

TRAFFIC = ("bytes_up", "bytes_down")

FATES = {
    "clients_returned": "returned",
    "clients_dropped": "dropped out",
    "clients_late": "late",
    "clients_failed": "failed",
}
"""For each column that contains a number of invited clients, the name of these clients' outcome."""


class Quantity(NamedTuple):
    """The display settings of a column: its name with the unit, and the factor that converts values to this unit."""

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
    """Return a column's display settings from ``QUANTITIES``, or derive the settings from the column's name.

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
    """A curve in a chart: horizontal positions, means and standard deviations over seeds; each of shape (R,)."""

    x: Ints | Floats
    mean: Floats
    sd: Floats


def over_seeds(histories: Sequence[History], column: str) -> Band:
    """Return the mean and standard deviation of a column over seeds, in the rounds in which all seeds have a value.

    Seeds without any value in the column are ignored. The curve ends at the last round of the shortest run.

    Raises:
        SpecError: No run has this column.
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
    """Return True if the curves' last values are, on average, above their first values."""
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
        curves: A mapping from each method to the histories of its runs, one per seed.
        column: The column.
        against: The horizontal axis: ``"round"``, or ``"bytes"`` for the MB sent since the start.

    Returns:
        A mapping from each method's label to its curve. Methods without values are left out.

    Raises:
        SpecError: No history has such a column.
    """
    factor, problem = quantity(column).factor, None
    drawn = dict[str, Curve]()
    missing = 0
    for label, histories in curves.items():
        try:
            rounds, mean, sd = over_seeds(histories, column)
        except SpecError as error:  # This federated method does not record the column, but others may.
            problem, missing = error, missing + 1
            continue
        x = rounds.astype(np.float64) if against == "round" else sent(histories, rounds)
        if (positive := x > 0).any():  # A logarithmic axis has no 0.
            drawn[label] = Curve(x[positive], mean[positive] * factor, sd[positive] * factor)
    if problem is not None and missing == len(curves):
        raise problem
    return drawn


def banded(drawn: Mapping[str, Curve]) -> list[str]:
    """Choose the curves that get bands, and return their labels. Only curves over several seeds can have bands.

    If the chart has more than ``BANDS`` curves, only the first curve and the best curve can have bands.
    """
    labels = drawn if len(drawn) <= BANDS else dict.fromkeys((next(iter(drawn)), ranked(drawn)[0]))
    return [label for label in labels if drawn[label].sd.any()]


def draw_curves(axes: Axes, curves: Curves, column: str, *, against: str = "round") -> list[End]:
    """Draw a column of the records as one curve per method, with a band of one standard deviation.

    If there are more methods than colours, the baseline (the first method) and the best methods have colours, and all
    other curves are grey. The steep beginning of long curves is cut off.

    Args:
        axes: The axes to draw into.
        curves: A mapping from each method to the histories of its runs, one per seed.
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
        style_rounds(axes, quantity(column).name)
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
    """Return the range of the vertical axis, so that the steep beginning of long curves is cut off.

    For percentages, the range is within 0 to 100.
    """
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
    """Return the total MB (sent and received) up to the end of each of R rounds, as a mean over seeds, shape (R,)."""
    mean: Floats = np.mean([spent(history, TRAFFIC, rounds) for history in histories], axis=0) * 1e-6
    return mean


def spent(history: History, columns: Sequence[str], rounds: Ints) -> Floats:
    """Return the cumulative sum of several columns after each of R rounds, shape (R,)."""
    total = np.zeros(len(rounds))
    for column in columns:
        when, amount = history.column(column)
        total += np.concatenate([[0.0], np.cumsum(amount)])[np.searchsorted(when, rounds, side="right")]
    return total


def draw_participation(axes: Axes, histories: Sequence[History]) -> None:
    """Draw the number of invited clients in each round (the mean over seeds), with one stacked area per outcome."""
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
    style_rounds(axes, "clients", from_zero=True)


def _edges(band: Band) -> Floats:
    return np.append(band.rounds - 0.5, band.rounds[-1] + 0.5)


def draw_communication(axes: Axes, histories: Sequence[History]) -> None:
    """Draw the cumulative amounts of data that clients sent and received, as means over seeds."""
    for column, name, stroke in zip(TRAFFIC, ("by clients", "to clients"), PAIR, strict=True):
        rounds, mean, sd = over_seeds(histories, column)
        _curve(axes, Curve(rounds, np.cumsum(mean) * 1e-6, np.zeros_like(sd)), stroke, name)
    style_rounds(axes, "sent since the start, MB", from_zero=True)


def draw_losses(axes: Axes, histories: Sequence[History]) -> None:
    """Draw the test loss and the training loss as means over seeds, with bands of one standard deviation."""
    for column, name, stroke in zip(("loss", "train_loss"), ("test", "training"), PAIR, strict=True):
        _curve(axes, Curve(*over_seeds(histories, column)), stroke, name)
    style_rounds(axes, "loss")


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
