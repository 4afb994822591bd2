"""Draw single charts of runs into Matplotlib axes: columns over the rounds, participation and communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedstrata.base import style
from fedstrata.base.arrays import Floats, Ints
from fedstrata.base.errors import SpecError
from fedstrata.base.style import Dash

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedstrata.evaluation.history import History

Curves: TypeAlias = "Mapping[str, Sequence[History]]"
"""A mapping from each label to the histories of its seeds."""

INK, GRID = style.INK.light, style.GRID.light
PAIR = tuple(style.SERIES[index].colour.light for index in (1, 2))
"""The colours of two curves in one chart that are not methods."""
MARKED = 25
"""A curve with at most this many points has a marker at each point."""

TRAFFIC = ("bytes_up", "bytes_down")

FATES = {
    "clients_returned": "returned",
    "clients_dropped": "dropped out",
    "clients_late": "late",
    "clients_failed": "failed",
}
"""A mapping from the column that counts each outcome of invited clients to the outcome's name in charts."""


class Quantity(NamedTuple):
    """The display of a column: its name with the unit, and the factor from recorded values to that unit."""

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
    """Return the display of a column. The display of a column that is not in ``QUANTITIES`` is derived from its name.

    >>> quantity("bytes_up").factor, quantity("head_accuracy").name, quantity("test.auroc").name
    (1e-06, 'head accuracy, %', 'test auroc')
    """
    if column in QUANTITIES:
        return QUANTITIES[column]
    words = column.replace("_", " ")
    words = f"test {words.removeprefix('test.')}" if words.startswith("test.") else words
    return Quantity(f"{words}, %", 100) if column.endswith("accuracy") else Quantity(words)


class Band(NamedTuple):
    """A curve: its rounds, and the mean and standard deviation over seeds in each, (R,). With one seed, ``sd`` is 0."""

    rounds: Ints
    mean: Floats
    sd: Floats


def over_seeds(histories: Sequence[History], column: str) -> Band:
    """Compute a column's mean and standard deviation over seeds, in each round in which all seeds have a value.

    A seed without values in the column is ignored. If a seed ended early, the curve ends with it, because the mean of
    the other seeds alone would jump.

    Raises:
        SpecError: No seed has such a column.
    """
    curves: list[dict[int, float]] = []
    missing: SpecError | None = None
    for history in histories:
        try:
            rounds, values = history.column(column)
        except SpecError as error:  # the column may depend on events that did not happen with this seed
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


def draw_curves(axes: Axes, curves: Curves, column: str, *, against: str = "round") -> None:
    """Draw a column as a curve per label, with a band of one standard deviation.

    Args:
        axes: The axes to draw into.
        curves: The histories of each label.
        column: The column.
        against: The horizontal axis: ``"round"``, or ``"bytes"`` for the MB sent since the start, on a logarithmic
            scale.

    Raises:
        SpecError: No history has such a column.
    """
    shown = quantity(column)
    problem: SpecError | None = None
    drawn = 0
    lines = style.lines(list(curves))
    for label, histories in curves.items():
        try:
            rounds, mean, sd = over_seeds(histories, column)
        except SpecError as error:  # this label does not have the column, but others may
            problem = error
            continue
        drawn += 1
        x = rounds.astype(np.float64) if against == "round" else sent(histories, rounds)
        positive = x > 0  # a logarithmic axis has no 0
        if positive.any():
            _band(axes, x[positive], mean[positive] * shown.factor, sd[positive] * shown.factor, *light(lines[label]))
    if problem is not None and not drawn:
        raise problem
    if against == "round":
        _style_rounds(axes, shown.name)
    else:
        _style(axes, "sent and received since the start, MB", shown.name)
        if axes.has_data():
            axes.set_xscale("log")  # methods send amounts of data that differ by orders of magnitude


def sent(histories: Sequence[History], rounds: Ints) -> Floats:
    """Return the mean over seeds of the MB sent and received until the end of each of ``rounds``, (R,)."""
    mean: Floats = np.mean([spent(history, TRAFFIC, rounds) for history in histories], axis=0) * 1e-6
    return mean


def spent(history: History, columns: Sequence[str], rounds: Ints) -> Floats:
    """Return, for each of ``rounds``, the sum of all these columns from the start until the end of the round, (R,)."""
    total = np.zeros(len(rounds))
    for column in columns:
        when, amount = history.column(column)
        total += np.concatenate([[0.0], np.cumsum(amount)])[np.searchsorted(when, rounds, side="right")]
    return total


def draw_participation(axes: Axes, histories: Sequence[History]) -> None:
    """Draw for each round how many invited clients returned, dropped out and so on, stacked and averaged over seeds."""
    base: Floats | None = None
    for column, name in FATES.items():
        band = over_seeds(histories, column)
        if len(band.rounds) == 0 or (column != "clients_returned" and not band.mean.any()):
            continue
        base = np.zeros(len(band.rounds)) if base is None else base
        if len(base) != len(band.rounds):  # a column with values in other rounds cannot be stacked
            continue
        low, high = (np.append(values, values[-1]) for values in (base, base + band.mean))
        axes.fill_between(_edges(band), low, high, step="post", color=style.FATES[name].light, linewidth=0, label=name)
        base = base + band.mean
    invited = over_seeds(histories, "clients_invited")
    if len(invited.rounds):
        values = np.append(invited.mean, invited.mean[-1])
        axes.step(_edges(invited), values, where="post", color=INK, linewidth=1, label="invited")
    _style_rounds(axes, "clients", from_zero=True)


def _edges(band: Band) -> Floats:
    return np.append(band.rounds - 0.5, band.rounds[-1] + 0.5)


def draw_communication(axes: Axes, histories: Sequence[History]) -> None:
    """Draw the data sent since the start, by clients and to clients, averaged over seeds."""
    for column, name, colour in zip(TRAFFIC, ("by clients", "to clients"), PAIR, strict=True):
        rounds, mean, sd = over_seeds(histories, column)
        _band(axes, rounds, np.cumsum(mean) * 1e-6, np.zeros_like(sd), colour, label=name)
    _style_rounds(axes, "sent since the start, MB", from_zero=True)


def draw_losses(axes: Axes, histories: Sequence[History]) -> None:
    """Draw the mean test loss and training loss over seeds, with bands of one standard deviation."""
    for column, name, colour in zip(("loss", "train_loss"), ("test", "training"), PAIR, strict=True):
        _band(axes, *over_seeds(histories, column), colour, label=name)
    _style_rounds(axes, "loss")


def light(line: style.Stroke) -> tuple[str, Dash]:
    """Return the colour on light ground and the dashes of a line."""
    return line.colour.light, line.dash


def _band(
    axes: Axes, x: NDArray[Any], mean: Floats, sd: Floats, colour: str, dash: Dash = "-", label: str | None = None
) -> None:
    if not len(x):
        return
    marker = "o" if len(mean) <= MARKED else ""  # without markers, a single round would be invisible
    axes.plot(x, mean, dash, color=colour, marker=marker, markersize=3, linewidth=1.6, label=label)
    if sd.any():
        axes.fill_between(x, mean - sd, mean + sd, color=colour, alpha=0.18, linewidth=0)


def _style(axes: Axes, xlabel: str, ylabel: str) -> None:
    axes.set_xlabel(literal(xlabel), color=INK, fontsize=9)
    axes.set_ylabel(literal(ylabel), color=INK, fontsize=9)
    axes.tick_params(colors=INK, labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[:].set_color(INK)
    axes.set_axisbelow(True)
    axes.grid(color=GRID, linewidth=0.6)
    axes.margins(x=0.02)
    if not axes.has_data():
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color=INK)


def _style_rounds(axes: Axes, ylabel: str, *, from_zero: bool = False) -> None:
    """Style axes whose horizontal axis is the round, with a legend above the axes if lines have labels."""
    from matplotlib.ticker import MaxNLocator

    _style(axes, "round", ylabel)
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
    """Escape dollar signs, between which Matplotlib would typeset mathematics."""
    return text.replace("$", r"\$")
