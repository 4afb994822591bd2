"""Compare two rows or columns of a paper's table, paired by seed, and format the differences as text."""

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
"""A mapping from each unit to two values: the rounding step of numbers, and the range of possible differences."""

Cells = Mapping[tuple[str, str, int], Mapping[str, Any]]
"""A mapping from (row, column, seed) to the results of the run."""


class Comparison(NamedTuple):
    """A comparison of a claim's row (a method) with another row, or with the same row in another column (setting).

    Args:
        column: Name of the column in which the claim's row is compared.
        than: Name of the other row, or of the other column.
        alone: The difference, with a 95 % interval for this comparison only.
        together: The difference, with a wider interval than in ``alone``. With 95 % confidence, the differences
            of all comparisons of the claim lie in these wider intervals.
    """

    column: str
    than: str
    alone: Difference
    together: Difference


def difference_text(difference: Difference, unit: str = "") -> str:
    """Format a difference as text, with its interval or, if there are too few seeds, with the number of seeds.

    Args:
        difference: The difference.
        unit: The unit of the difference; empty to leave the unit out.

    >>> difference_text(Difference(1.5, 3, (0.5, 2.5))), difference_text(Difference(-1.5, 1))
    ('+1.5 [+0.5, +2.5]', '−1.5 (1 seed)')
    """
    if difference.mean is None:
        return "not run"
    unit = unit and f" {unit}"
    if difference.interval is None or difference.n < MIN_SEEDS:
        return f"{signed(difference.mean)}{unit} ({difference.n} seed{'s' * (difference.n != 1)})"
    return f"{signed(difference.mean)} [{', '.join(map(signed, difference.interval))}]{unit}"


def signed(value: float) -> str:
    """Format a difference as text with a sign and one decimal place.

    >>> signed(-1.234), signed(-0.01)
    ('−1.2', '0.0')
    """
    text = f"{value:+.1f}".replace("-", "−")
    return "0.0" if text in ("+0.0", "−0.0") else text


def cells_of(table: Table, known: Results, *, quick: bool = False) -> Cells:
    """Return the results of a table's finished cells. A cell is the run of one row and column with one seed."""
    cells = (cell for cell in table.cells(quick=quick) if cell.hash in known)
    return {(cell.row, cell.column, cell.seed): known[cell.hash] for cell in cells}


def over_seeds(cells: Cells, row: str, column: str, metric: str) -> dict[int, float]:
    """Return the value of a metric for each finished seed of a row and column, as a mapping from seeds to values."""
    return {
        seed: float(result[metric])
        for (r, c, seed), result in cells.items()
        if (r, c) == (row, column) and metric in result
    }


def compared(
    values: Mapping[int, float], baseline: Mapping[int, float], *, together: int = 1, unit: str = "points"
) -> Difference:
    """Compute the mean difference between two rows over their common seeds, with Student's t interval.

    Args:
        values: Results of the first row, as a mapping from seeds to numbers.
        baseline: Results of the second row, which are subtracted, as a mapping from seeds to numbers.
        together: Number of intervals that must hold simultaneously with 95 % confidence.
        unit: Unit of the difference, which is a key of ``UNITS``.
    """
    precision, bounds = UNITS[unit]
    difference = paired_difference(values, baseline, resolution=precision, together=together)
    return replace(difference, interval=cut(difference.interval, bounds))


def predicted(mean: float, sd: float, n: int) -> Range:
    """Return the 95 % prediction interval for one further observation, mean ± t · sd · √(1 + 1/n).

    Args:
        mean: Mean of the n observations.
        sd: Sample standard deviation of the observations.
        n: Number of observations, at least two.
    """
    return t_interval(mean, sd * (n + 1) ** 0.5, n)


def predicted_margin(difference: Difference) -> Range | None:
    """Predict the accuracy difference between two rows if both are run with one more seed.

    Return a 95 % interval in points, or None if the two rows have fewer than ``MIN_SEEDS`` seeds in common.
    """
    if difference.mean is None or difference.n < MIN_SEEDS:
        return None
    sd = max(statistics.stdev(difference.each), UNITS["points"][0] / 6**0.5)
    return predicted(difference.mean, sd, difference.n)
