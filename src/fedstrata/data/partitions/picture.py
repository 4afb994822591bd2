"""Show how many samples of each label every client has, as a picture or as a table for the terminal."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedstrata.base import style
from fedstrata.base.arrays import Ints
from fedstrata.base.printable import printable
from fedstrata.base.screen import ScreenTable
from fedstrata.data.dataset import Dataset
from fedstrata.data.partitions.base import Assignment

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BUBBLES = 100
"""The maximum number of clients in a bubble chart. The number of labels must not exceed half this number."""
NAMED = 20
"""The maximum number of clients whose names are written below a picture."""
COLUMNS = 1000
"""The maximum number of clients that a picture shows. With more clients, the picture shows clients at regular
intervals."""
LARGEST = 0.95
"""The width of the largest bubble, as a fraction of the height of a row."""
SHADE = style.SCALE.light


def draw_partition(assignment: Assignment, dataset: Dataset, path: Path | str) -> None:
    """Write a picture that shows each client's number of samples, in total and for each label.

    For up to 100 clients and 50 labels, the picture has a bubble per client and label. The bubble's area is
    proportional to the number of samples. Otherwise, the picture is a heat map of at most 1,000 clients, sorted by
    their most frequent label.

    Args:
        assignment: The division of the samples among the clients.
        dataset: The data set that was divided.
        path: The file, with a suffix that determines the format, such as ``.png``.
    """
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    table = assignment.counts(*dataset.strata_or_one)
    clients, classes = table.shape
    title = f"{printable(dataset.name)}: {int(table.sum()):,} samples of {classes} labels at {clients:,} clients"
    bubbles = clients <= BUBBLES and classes <= BUBBLES // 2
    xlabel = "client"
    if not bubbles:
        order = np.lexsort((-table.max(axis=1), table.argmax(axis=1)))
        xlabel = "clients, sorted by their most frequent label"
        if clients > COLUMNS:
            order = order[np.linspace(0, clients - 1, COLUMNS).astype(np.int64)]
            xlabel += f" ({COLUMNS:,} of them)"
        table = table[order]
    width = float(np.clip(0.16 * len(table) + 2.2, 5.5, 14))
    height = float(np.clip(0.28 * classes, 2.2, 8.5))
    figure = Figure(figsize=(width, height + 1.8), dpi=130, layout="constrained")
    top, main = figure.subplots(2, 1, sharex=True, height_ratios=(1.0, max(height, 1.0)))
    _draw_sizes(top, table.sum(axis=1))
    edge = 0.1
    if bubbles:
        column = 72 * (width - 1.6) / len(table)
        # Bubbles of neighbouring clients may overlap, but bubbles of neighbouring labels may not.
        widest = LARGEST * min(2.5 * column, 72 * height / classes)
        _draw_bubbles(main, table, widest)
        edge = max(edge, widest / column / 2 - 0.4)
    else:
        # Colours follow the square root of the counts, so that small counts are visible beside large ones.
        norm = PowerNorm(0.5, vmin=0, vmax=max(int(table.max()), 1))
        scale = LinearSegmentedColormap.from_list("samples", [style.PAPER.light, SHADE])
        image = main.imshow(table.T, aspect="auto", cmap=scale, interpolation="nearest", norm=norm)
        figure.colorbar(image, ax=main, label="samples", pad=0.01)
    main.set_xlim(-0.5 - edge, len(table) - 0.5 + edge)
    main.set_ylim(-0.6, classes - 0.4)
    if assignment.codes is not None and bubbles and len(table) <= NAMED:
        main.set_xticks(range(len(table)), map(_short, assignment.names(dataset)), rotation=30, ha="right")
    else:
        main.xaxis.set_major_locator(MaxNLocator(10, integer=True, min_n_ticks=1))
    main.set_xlabel(xlabel)
    main.set_ylabel("label")
    if classes <= 30:
        main.set_yticks(range(classes), map(_short, _names(dataset, classes)))
    top.set_title(textwrap.fill(title, int(10 * width)), loc="left", fontsize=10)
    figure.savefig(path)


def _short(name: str) -> str:
    name = printable(name)
    return name if len(name) <= 16 else name[:15] + "…"


def _draw_sizes(axes: Axes, sizes: Ints) -> None:
    axes.bar(np.arange(len(sizes)), sizes, width=0.8 if len(sizes) <= BUBBLES else 1.0, color=SHADE)
    axes.set_ylabel("samples")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(labelbottom=False)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_bubbles(axes: Axes, table: Ints, widest: float) -> None:
    """Draw bubbles with areas proportional to the numbers of samples. The largest bubble is ``widest`` points wide."""
    client, label = np.nonzero(table)
    amounts = table[client, label]
    largest = max(int(amounts.max(initial=1)), 1)
    area = np.maximum(amounts / largest * widest**2, 0.6)
    axes.set_axisbelow(True)
    axes.grid(color=style.GRID.light, linewidth=0.6)
    axes.scatter(client, label, s=area, color=SHADE, alpha=0.8, linewidths=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"largest bubble: {largest:,} samples", loc="right", fontsize=8, color=style.SOFT.light)


def render_table(assignment: Assignment, dataset: Dataset, rows: int = 30, every: bool = False) -> ScreenTable:
    """Return a table for the terminal that shows each client's number of samples per label.

    Args:
        assignment: The division of the samples among the clients.
        dataset: The data set that was divided.
        rows: The number of clients to show. Three more rows show minimum, mean and maximum over all clients.
        every: Whether to print all columns even if the terminal is narrow.

    Returns:
        The table. For up to 12 labels, the table has a column per label. With more labels, two columns show how many
        labels each client has, and what percentage of its samples has the client's most frequent label.
    """
    counts = assignment.counts(*dataset.strata_or_one)
    sizes, classes = counts.sum(axis=1), counts.shape[1]
    each = classes <= 12
    if each:
        heads, body = _names(dataset, classes), counts.astype(np.float64)
    else:
        heads = ["number of labels", "most frequent label, %"]
        share = counts.max(axis=1) / np.maximum(sizes, 1) * 100
        body = np.stack([(counts > 0).sum(axis=1), share], axis=1)
    values = np.column_stack([sizes, body])
    title = f"{dataset.name}: {int(sizes.sum()):,} samples at {len(sizes):,} clients"
    shown = min(rows, len(sizes))
    names = assignment.names(dataset)
    lines = list[list[str]]()
    for client in range(shown):
        first, *rest = (f"{value:,.0f}" for value in values[client])
        lines.append([names[client], first, *("·" if each and text == "0" else text for text in rest)])
    lines.append([])
    for word, summary in (("min", values.min(0)), ("mean", values.mean(0)), ("max", values.max(0))):
        lines.append([word, *(f"{value:,.{1 if word == 'mean' and value < 10 else 0}f}" for value in summary)])
    note = "" if shown == len(sizes) else f"The first {shown} of {len(sizes):,} clients."
    return ScreenTable(["client", "samples", *heads], lines, every=every, title=title, note=note)


def _names(dataset: Dataset, strata: int) -> list[str]:
    return ["all samples"] * strata if dataset.strata is None else list(dataset.stratum_names)
