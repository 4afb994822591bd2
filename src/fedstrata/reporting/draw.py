"""What a picture of runs is made of: a column over the rounds, who took part, what was sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedstrata.base.errors import SpecError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedstrata.evaluation.history import History

Floats = NDArray[np.float64]
Curves: TypeAlias = "Mapping[str, Sequence[History]]"
"""The histories of a label's seeds, by label."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito (2008) without black and yellow: told apart with any colour vision, on white and on black."""
Dash = Literal["-", "--", ":", "-."]
DASHES: tuple[Dash, ...] = ("-", "--", ":", "-.")
INK, GRID = "#22272e", "#d5d9de"
"""Text and lines, and the grid."""
MARKED = 25
"""Curves of so many points at most have markers."""

TRAFFIC = ("bytes_up", "bytes_down")

FATES = {
    "clients_returned": ("returned", "#009e73"),
    "clients_dropped": ("dropped out", "#e69f00"),
    "clients_late": ("late", "#56b4e9"),
    "clients_failed": ("failed", "#d55e00"),
}
"""What becomes of the invited clients, in the order in which it is stacked."""


class Quantity(NamedTuple):
    """How a column is shown: its name with the unit, and what its values are multiplied by."""

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
    """How a column is shown; one that is not known by its own name.

    >>> quantity("bytes_up").factor, quantity("head_accuracy").name, quantity("weight_diversity").name
    (1e-06, 'head accuracy, %', 'weight diversity')
    """
    if column in QUANTITIES:
        return QUANTITIES[column]
    words = column.replace("_", " ")
    return Quantity(f"{words}, %", 100) if column.endswith("accuracy") else Quantity(words)


class Band(NamedTuple):
    """Mean and sample standard deviation over seeds; (R,) each, the deviation 0 where there is one seed."""

    rounds: NDArray[np.int64]
    mean: Floats
    sd: Floats


def over_seeds(histories: Sequence[History], column: str) -> Band:
    """A column's mean and deviation in those rounds that every seed has.

    A seed that has nothing in the column does not count; one that ended early ends the curve, since the mean
    of the others would jump there.

    Raises:
        SpecError: No seed has such a column.
    """
    found: list[dict[int, float]] = []
    missing: SpecError | None = None
    for history in histories:
        try:
            rounds, values = history.column(column)
        except SpecError as error:  # a column of a method's own may lack where a round was never of its kind
            missing = error
            continue
        if len(rounds):
            found.append(dict(zip(rounds.tolist(), values.tolist(), strict=True)))
    if missing is not None and not found:
        raise missing
    common = sorted(set.intersection(*(set(values) for values in found))) if found else []
    table = np.array([[values[round] for round in common] for values in found], dtype=np.float64)
    table = table.reshape(len(found), len(common))
    shared = np.array(common, dtype=np.int64)
    if not common:
        return Band(shared, np.zeros(0), np.zeros(0))
    sd = table.std(axis=0, ddof=1) if len(table) > 1 else np.zeros(len(common))
    return Band(shared, table.mean(axis=0), sd)


def draw_curves(axes: Axes, curves: Curves, column: str, *, against: str = "round") -> None:
    """Draw into axes; ``against="bytes"`` puts the data sent since the start, in MB, on a logarithmic horizontal axis.

    Raises:
        SpecError: No history has such a column.
    """
    shown = quantity(column)
    problem: SpecError | None = None
    drawn = 0
    for number, histories in enumerate(curves.values()):
        try:
            rounds, mean, sd = over_seeds(histories, column)
        except SpecError as error:  # a column of one method only
            problem = error
            continue
        drawn += 1
        across = rounds.astype(np.float64) if against == "round" else sent(histories, rounds)
        sending = across > 0  # nothing has no place on a logarithmic axis
        across, mean, sd = across[sending], mean[sending], sd[sending]
        if not len(across):
            continue
        colour, dash = look(number)
        _line(axes, across, mean * shown.factor, colour, dash)
        if sd.any():
            low, high = (mean - sd) * shown.factor, (mean + sd) * shown.factor
            axes.fill_between(across, low, high, color=colour, alpha=0.18, linewidth=0)
    if problem is not None and not drawn:
        raise problem
    _style(axes, "round" if against == "round" else "sent and received since the start, MB", shown.name)
    if against == "round":
        _whole_rounds(axes)
    elif axes.has_data():
        axes.set_xscale("log")  # methods differ by orders of magnitude


def sent(histories: Sequence[History], rounds: NDArray[np.int64]) -> Floats:
    """Bytes up and down until each of ``rounds``, in MB, as a mean over seeds; (R,)."""
    mean: Floats = np.mean([spent(history, TRAFFIC, rounds) for history in histories], axis=0) * 1e-6
    return mean


def spent(history: History, columns: Sequence[str], rounds: NDArray[np.int64]) -> Floats:
    """What a run has spent until each of ``rounds``: the sum of columns over all rounds up to it, (R,)."""
    total = np.zeros(len(rounds))
    for column in columns:
        when, amount = history.column(column)
        total += np.concatenate([[0.0], np.cumsum(amount)])[np.searchsorted(when, rounds, side="right")]
    return total


def draw_participation(axes: Axes, histories: Sequence[History]) -> None:
    """What became of the invited clients in each round, stacked; over several seeds the mean."""
    invited = over_seeds(histories, "clients_invited")
    base: Floats | None = None
    for column, (name, colour) in FATES.items():
        band = over_seeds(histories, column)
        if len(band.rounds) == 0 or (column != "clients_returned" and not band.mean.any()):
            continue
        base = np.zeros(len(band.rounds)) if base is None else base
        if len(base) != len(band.rounds):  # recorded in other rounds than the rest: cannot be stacked on it
            continue
        edges = np.append(band.rounds - 0.5, band.rounds[-1] + 0.5)
        low, high = (np.append(values, values[-1]) for values in (base, base + band.mean))
        axes.fill_between(edges, low, high, step="post", color=colour, alpha=0.85, linewidth=0, label=name)
        base = base + band.mean
    if len(invited.rounds):
        edges = np.append(invited.rounds - 0.5, invited.rounds[-1] + 0.5)
        axes.step(
            edges,
            np.append(invited.mean, invited.mean[-1]),
            where="post",
            color=INK,
            linewidth=1,
            label="invited",
        )
    _style(axes, "round", "clients")
    axes.set_ylim(bottom=0)
    _whole_rounds(axes)
    _key(axes)


def draw_communication(axes: Axes, histories: Sequence[History]) -> None:
    """Data sent since the start, by clients and to clients; over several seeds the mean."""
    for column, name, colour in (
        ("bytes_up", "by clients", COLOURS[0]),
        ("bytes_down", "to clients", COLOURS[1]),
    ):
        rounds, mean, _ = over_seeds(histories, column)
        if len(rounds):
            _line(axes, rounds, np.cumsum(mean) * 1e-6, colour, label=name)
    _style(axes, "round", "sent since the start, MB")
    axes.set_ylim(bottom=0)
    _whole_rounds(axes)
    _key(axes)


def draw_losses(axes: Axes, histories: Sequence[History]) -> None:
    """Test and training loss; over several seeds mean and deviation."""
    for column, name, colour in (("loss", "test", COLOURS[0]), ("train_loss", "training", COLOURS[1])):
        rounds, mean, sd = over_seeds(histories, column)
        if len(rounds):
            _line(axes, rounds, mean, colour, label=name)
            axes.fill_between(rounds, mean - sd, mean + sd, color=colour, alpha=0.18, linewidth=0)
    _style(axes, "round", "loss")
    _whole_rounds(axes)
    _key(axes)


def look(number: int) -> tuple[str, Dash]:
    """Colour and dash of the ``number``-th label; the dash changes once the colours are used up."""
    return COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]


def _line(
    axes: Axes, across: NDArray[Any], values: Floats, colour: str, dash: Dash = "-", label: str | None = None
) -> None:
    marker = "o" if len(values) <= MARKED else ""  # a single round would not be seen without
    axes.plot(across, values, dash, color=colour, marker=marker, markersize=3, linewidth=1.6, label=label)


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


def _whole_rounds(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))


def _key(axes: Axes) -> None:
    """A legend above the axes, where it hides nothing."""
    handles, names = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            handles, names, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(names), frameon=False, fontsize=8,
            labelcolor=INK, borderaxespad=0.2, handlelength=1.4, columnspacing=1.2,
        )  # fmt: skip


def literal(text: str) -> str:
    """Text that is shown as it is: a dollar sign would start mathematics."""
    return text.replace("$", r"\$")
