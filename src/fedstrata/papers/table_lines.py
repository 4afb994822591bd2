"""Format a paper's table as Markdown, with the published numbers, our results and the number of missing runs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from fedstrata.papers.comparing import (
    Cells,
    cells_of,
    compared,
    difference_text,
    over_seeds,
    predicted,
    predicted_margin,
    signed,
)
from fedstrata.papers.published import Row
from fedstrata.papers.running import Results
from fedstrata.papers.tables import METRICS, Table
from fedstrata.reporting.statistics import MIN_SEEDS, Difference, Estimate, cut


def folded(summary: str, lines: Sequence[str], kind: str = "") -> list[str]:
    """Return a collapsed HTML element that shows ``summary``.

    The expanded element also shows ``lines``. Blank lines around ``lines`` make Markdown renderers process these
    lines inside the HTML.

    Args:
        summary: HTML text that is always visible.
        lines: Lines of Markdown that are visible when the element is expanded.
        kind: CSS class of the element.
    """
    start = f'<details class="{kind}">' if kind else "<details>"
    return [f"{start}<summary>{summary}</summary>", "", *lines, "", "</details>"]


def lines_of_table(name: str, table: Table, results: Results, *, quick: bool) -> list[str]:
    """Return the rows of a table that have enough seeds, as Markdown, and the number of missing runs."""
    shown = rows_of(table, results, quick=quick)
    if not shown:
        return []
    cells = cells_of(table, results, quick=quick)
    least = 1 if quick else MIN_SEEDS
    also = [key for key in SHOWN if any(result.get(key) for result in cells.values())]
    values = partial(over_seeds, cells, metric=table.metric)
    paired = {(c, a, b): compared(values(a, c), values(b, c)) for c, a, b in table.comparisons()}
    differences = {place: difference_text(each) for place, each in paired.items() if each.n >= least}
    heads = ["setting", "method", "paper", f"paper: − {table.baseline}", "ours", "seeds"]
    rows = [[*heads, *(SHOWN[key] for key in also), f"ours: − {table.baseline}"]]
    outside, margins = dict[str, list[str]](), dict[str, list[str]]()
    for column, row, paper, estimate in shown:
        if _is_outside(paper, estimate):
            outside.setdefault(column, []).append(f"`{row}`")
        if _margin_is_outside(table, row, column, paired.get((column, row, table.baseline))):
            margins.setdefault(column, []).append(f"`{row}`")
        figures = [*_published(table, row, column), _here(estimate), _seeds(cells, row, column)]
        figures += [_mean(cells, row, column, key) for key in also]
        rows.append([column, row, *figures, differences.get((column, row, table.baseline), "")])
    origin = f"Source in the paper: {table.source}. Repeat the runs with `fedstrata reproduce {name}`."
    lines = [origin, "", table.notes.strip(), "", *markdown(rows)]
    more = [[c, f"{a} − {b}", text] for (c, a, b), text in differences.items() if b != table.baseline]
    if more:
        lines += ["", *markdown([["setting", "also compared", "difference"], *more])]
    for what, places in (("number", outside), (f"difference from `{table.baseline}`", margins)):
        if places:
            text = "We computed the range in which we expect the result of one more seed (95 % prediction interval). "
            text += f"In these rows, the paper's {what} is outside this range"
            listed = (f"- `{column}`: {', '.join(methods)}" for column, methods in places.items())
            lines += ["", f"{text}:", "", *listed]
    lines += _taken_over([result for result in cells.values() if "source" in result])
    lines += _on_gpus(cells.values())
    missing = "" if quick else missing_runs(table, results)
    return [f"{missing} runs are missing.", ""] * bool(missing) + folded(
        f"{len(rows) - 1} rows: {METRICS[table.metric]}, %", lines
    )


def rows_of(table: Table, results: Results, *, quick: bool = False) -> list[Row]:
    """Return a table's rows with enough seeds; an empty list if at most half of all rows have enough seeds."""
    cells = cells_of(table, results, quick=quick)
    places = [(column, row) for column in table.columns for row in table.rows_of(column)]
    ours = {(c, r): Estimate.over(over_seeds(cells, r, c, table.metric).values()) for c, r in places}
    enough = [place for place in places if ours[place].n >= (1 if quick else MIN_SEEDS)]
    if 2 * len(enough) <= len(places):
        return []
    return [Row(c, r, table.published.get(r, {}).get(c), ours[c, r]) for c, r in enough]


def missing_runs(table: Table, results: Results) -> str:
    """Return the number of missing runs as text, such as ``3 of 9``; an empty text if all runs are finished."""
    missing = [cell.hash not in results for cell in table.cells()]
    return f"{sum(missing)} of {len(missing)}" * any(missing)


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table. The first row contains the headings. Empty columns are left out."""
    filled = [column for column in zip(*rows, strict=True) if any(column[1:])]
    lines = [f"| {' | '.join(row)} |" for row in zip(*filled, strict=True)]
    return [*lines[:1], *["|" + "---|" * len(filled)] * bool(filled), *lines[1:]]


def _published(table: Table, row: str, column: str) -> tuple[str, str]:
    """Return a paper's number for a row and column, and its difference from the paper's baseline, as strings."""
    figure, baseline = (table.published.get(each, {}).get(column) for each in (row, table.baseline))
    if figure is None:
        return "", ""
    return f"{figure:.2f}", "" if baseline is None or row == table.baseline else signed(figure - baseline)


def _is_outside(published: float | None, estimate: Estimate) -> bool:
    """Return True if a paper's number lies outside the 95 % prediction interval for a further run of our experiment.

    The interval is mean ± t · sd · √(1 + 1/n), over our n runs.
    """
    if published is None or estimate.mean is None or estimate.sd is None or estimate.n < MIN_SEEDS:
        return False
    low, high = predicted(estimate.mean, estimate.sd, estimate.n)
    return not low <= published <= high


def _margin_is_outside(table: Table, row: str, column: str, difference: Difference | None) -> bool:
    """Return True if a paper's difference from the baseline lies outside our prediction interval."""
    published, baseline = (table.published.get(each, {}).get(column) for each in (row, table.baseline))
    interval = predicted_margin(difference) if difference else None
    if published is None or baseline is None or interval is None:
        return False
    return not interval[0] <= published - baseline <= interval[1]


def _seeds(cells: Cells, row: str, column: str) -> str:
    """Return the number of finished seeds, with a † if some results come from an earlier version of fedstrata."""
    results = [result for (r, c, _), result in cells.items() if (r, c) == (row, column)]
    return (str(len(results)) if results else "") + ("†" if any("source" in result for result in results) else "")


def _taken_over(results: list[Mapping[str, Any]]) -> list[str]:
    """Return a note about the results that come from an earlier version of fedstrata.

    The note says how much the accuracies of the first rounds change if the current version repeats these rounds.
    """
    if not results:
        return []
    sources = ", ".join(sorted({f"`{result['source']}`" for result in results}))
    line = (
        f"† {len(results)} of these runs were made with an earlier version of fedstrata and the same specs ({sources})."
    )
    if repeated := [result["repeated"] for result in results if "repeated" in result]:
        rounds, points = min(each["rounds"] for each in repeated), max(each["points"] for each in repeated)
        line += (
            f" We repeated {len(repeated)} of these runs with the current version, for the first {rounds} rounds. "
            f"The accuracies changed by at most {points} points. The table leaves out runs whose accuracy changed by "
            "more than one point."
        )
    return ["", line]


def _on_gpus(results: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a note about the results of runs whose clients trained on a GPU."""
    names = [gpu for result in results if (gpu := result.get("versions", {}).get("gpu"))]
    return ["", f"Clients trained on a GPU ({', '.join(sorted(set(names)))}) in {len(names)} runs."] if names else []


SHOWN = {
    "expected_samples": "samples kept",
    "hops": "hops per round",
    "strata": "strata, round 1",
    "undrawn": "strata without a draw, %",
    "purity": "purity, %",
    "macro": "macro accuracy, %",
    "diversity": "Λ",
}
"""A mapping from result keys to headings of additional columns.

A table shows such a column only if the table's results contain the key.
"""


def _mean(cells: Cells, row: str, column: str, key: str) -> str:
    values = over_seeds(cells, row, column, key).values()
    mean = statistics.fmean(values) if values else None
    return "" if mean is None else f"{mean:,.0f}" if mean >= 100 else f"{mean:.3g}"


def _here(estimate: Estimate) -> str:
    if estimate.mean is None:
        return ""
    interval = cut(estimate.interval, (0.0, 100.0))
    if interval is None or estimate.n < MIN_SEEDS:
        return f"{estimate.mean:.2f}"
    return f"{estimate.mean:.2f} [{interval[0]:.1f}, {interval[1]:.1f}]"
