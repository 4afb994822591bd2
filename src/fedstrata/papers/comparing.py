"""Compare the results of two rows or columns of a paper's table, paired by seed, and write the differences as text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from fedstrata.papers.running import Results
from fedstrata.papers.tables import Table
from fedstrata.reporting.statistics import (
    MIN_SEEDS,
    UNBOUNDED,
    Difference,
    Range,
    cut,
    paired_difference,
    t_interval,
)

UNITS: Mapping[str, tuple[float, Range]] = {
    "points": (0.01, (-100.0, 100.0)),
    "rounds": (1.0, UNBOUNDED),
    "%": (0.01, (-100.0, math.inf)),
}
"""A mapping from each unit to the rounding of the compared numbers, and the bounds of their difference."""

Cells = Mapping[tuple[str, str, int], Mapping[str, Any]]
"""A mapping from row, column and seed to the results of the run."""


class Comparison(NamedTuple):
    """A comparison of a claim's row (a method) with another row, or with the same row in another column (setting).

    Args:
        column: The column.
        than: The other row or column of the comparison.
        alone: The difference with a 95 % interval that refers only to this comparison.
        together: The difference with a wider interval. The wider intervals of all comparisons of the claim hold at the
            same time with 95 % confidence.
    """

    column: str
    than: str
    alone: Difference
    together: Difference


def difference_text(difference: Difference) -> str:
    """Return a difference as text, with its interval or, if there are too few seeds, with the number of seeds.

    >>> difference_text(Difference(1.5, 3, (0.5, 2.5))), difference_text(Difference(-1.5, 1))
    ('+1.5 [+0.5, +2.5]', '−1.5 (1 seed)')
    """
    if difference.mean is None:
        return "not run"
    if difference.interval is None or difference.n < MIN_SEEDS:
        return f"{signed(difference.mean)} ({difference.n} seed{'s' * (difference.n != 1)})"
    return f"{signed(difference.mean)} [{', '.join(map(signed, difference.interval))}]"


def signed(value: float) -> str:
    """Return a difference as text with its sign, rounded to one decimal.

    >>> signed(-1.234), signed(-0.01)
    ('−1.2', '0.0')
    """
    text = f"{value:+.1f}".replace("-", "−")
    return "0.0" if text in ("+0.0", "−0.0") else text


def cells_of(table: Table, known: Results, *, quick: bool = False) -> Cells:
    """Return the results of a table's finished cells. A cell is a row, a column and a seed."""
    cells = (cell for cell in table.cells(quick=quick) if cell.hash in known)
    return {(cell.row, cell.column, cell.seed): known[cell.hash] for cell in cells}


def over_seeds(cells: Cells, row: str, column: str, metric: str) -> dict[int, float]:
    """Return a mapping from each finished seed of a row and column to the value of a metric."""
    return {
        seed: float(result[metric])
        for (r, c, seed), result in cells.items()
        if (r, c) == (row, column) and metric in result
    }


def compared(
    values: Mapping[int, float], baseline: Mapping[int, float], *, together: int = 1, unit: str = "points"
) -> Difference:
    """Compute the mean difference of two rows over the seeds that both rows have, with Student's t interval.

    Args:
        values: A mapping from each seed to the result of a row.
        baseline: A mapping from each seed to the result of the other row.
        together: The number of intervals that must hold at the same time with 95 % confidence.
        unit: The unit of the difference, which is a key of ``UNITS``.
    """
    precision, bounds = UNITS[unit]
    difference = paired_difference(values, baseline, resolution=precision, together=together)
    return replace(difference, interval=cut(difference.interval, bounds))


def predicted(mean: float, sd: float, n: int) -> Range:
    """Return the 95 % prediction interval for one more number, mean ± t · sd · √(1 + 1/n).

    Args:
        mean: The mean of n numbers.
        sd: The sample standard deviation of these numbers.
        n: The number of numbers, at least two.
    """
    return t_interval(mean, sd * (n + 1) ** 0.5, n)


def predicted_margin(difference: Difference) -> Range | None:
    """Return the 95 % prediction interval for the difference in accuracy of one more pair of runs, in points.

    The value is None for fewer than ``MIN_SEEDS`` pairs.
    """
    if difference.mean is None or difference.n < MIN_SEEDS:
        return None
    sd = max(statistics.stdev(difference.each), UNITS["points"][0] / 6**0.5)
    return predicted(difference.mean, sd, difference.n)
