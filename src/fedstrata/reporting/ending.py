"""Write the last part of the output of ``fedstrata compare``: a short table, and the result in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fedstrata.base.printable import printable
from fedstrata.base.screen import ScreenTable
from fedstrata.base.style import AHEAD, BEHIND
from fedstrata.evaluation.history import History
from fedstrata.reporting import contrasts, tables
from fedstrata.reporting.answer import Answer, answer, rounded, verdict
from fedstrata.reporting.draw import TRAFFIC
from fedstrata.reporting.statistics import MIN_SEEDS, Estimate

if TYPE_CHECKING:
    from rich.text import Text

ENOUGH = 5
"""The number of seeds to suggest if there are too few seeds for an interval."""
MOST = 30
"""The maximum number of seeds to suggest."""


@dataclass(frozen=True)
class Ending:
    """The last part of a comparison's output, which shows the result.

    Args:
        table: The table, with the best method first.
        sentences: The sentences that state the result.
        seeds: The seeds with which to repeat the comparison; empty if no more seeds are needed.
    """

    table: ScreenTable
    sentences: tuple[str, ...]
    seeds: tuple[int, ...] = ()


def ending(runs: Mapping[str, Sequence[History]], *, is_comparable: bool = True, every: bool = False) -> Ending:
    """Return the last part of a comparison's output, which shows the result.

    Args:
        runs: A mapping from each method to the histories of its runs, one per seed.
        is_comparable: Whether all runs use the same data. If false, the methods are not compared.
        every: Whether the table shows all columns instead of only the most important columns.
    """
    comparison = contrasts.contrast(runs)
    said = answer(runs, comparison) if is_comparable else None
    table = _table(runs, comparison if is_comparable else None, every)
    if said is None:
        return Ending(table, ("The runs use different data, so their results are not compared.",))
    sentences = [said.headline, said.best]
    if said.seeds is not None:
        sentences.append(f"If the spread stays the same, {said.seeds} seeds are needed to show this difference.")
    return Ending(table, tuple(filter(None, sentences)), _more_seeds(runs, said))


def _more_seeds(runs: Mapping[str, Sequence[History]], said: Answer) -> tuple[int, ...]:
    """Return the runs' seeds and additional seeds; empty if more seeds are not needed, or if too many are needed."""
    seeds = sorted({history.seed for members in runs.values() for history in members if history.seed is not None})
    wanted = said.seeds or (ENOUGH if len(runs) > 1 and len(seeds) < MIN_SEEDS else 0)
    if not len(seeds) < wanted <= MOST:
        return ()
    others = (seed for seed in range(wanted + len(seeds)) if seed not in seeds)
    return (*seeds, *(seed for seed, _ in zip(others, range(wanted - len(seeds)), strict=False)))


def _table(runs: Mapping[str, Sequence[History]], comparison: contrasts.Contrasts | None, every: bool) -> ScreenTable:
    rows, metric = tables.compare_table(runs), tables.primary(runs)
    key, seeds = f"final_{metric}", max((row.seeds for row in rows), default=0)
    worst = next(iter(tables.worst_first(tables.keys(rows), metric)), None)
    how = rounded(tables.measure(key), seeds)
    sign = -1 if any(metric in history.lower for members in runs.values() for history in members) else 1
    rows.sort(key=lambda row: -sign * mean if (mean := row.cells[key].mean) is not None else float("inf"))
    headings, columns = [how.heading.removeprefix("final ")], [_with_best([row.cells[key] for row in rows], rows, how)]
    if comparison is not None and comparison.baseline is not None:
        headings.append(f"minus {comparison.baseline}")
        differences = {row.label: row for row in comparison.groups.get(key, [])}
        columns.append([_difference(differences.get(row.label), comparison, how) for row in rows])
    traffic = [
        Estimate.over(sum(history.total(column) for column in TRAFFIC) for history in runs[row.label]) for row in rows
    ]
    if sizes := [each.mean for each in traffic if each.mean]:
        sent = tables.Measure("GB sent", 1e-9, 1) if min(sizes) >= 1e9 else tables.Measure("MB sent", 1e-6, 1)
        headings.append(sent.heading)
        columns.append([tables.MISSING if not each.mean else tables.number(each.mean, sent) for each in traffic])
    if worst is not None:
        how = rounded(tables.measure(worst), seeds)
        headings.append(f"{tables.metric_of(worst)} of worst tenth{', %' if how.factor == 100 else ''}")
        sign = -1 if any(tables.metric_of(worst) in history.lower for each in runs.values() for history in each) else 1
        columns.append(_with_best([row.cells[worst] for row in rows], rows, how, spread=False, sign=sign))
    main = len(headings)
    for other in tables.keys(rows):
        if other not in (key, worst):
            headings.append(tables.measure(other).heading)
            columns.append([tables.show(row, other) for row in rows])
    lines = [[row.marked, *cells] for row, *cells in zip(rows, *columns, strict=True)]
    more, note = "--columns all, or report.html", tables.caption(rows)
    return ScreenTable(["", *headings], lines, order=range(1, main + 1), every=every, more=more, note=note)


def _with_best(
    cells: Sequence[Estimate], rows: Sequence[tables.Row], how: tables.Measure, spread: bool = True, sign: int = 0
) -> list[str | Text]:
    """Format the cells of a column. The best cell is bold. If ``sign`` is 0, the first cell is bold."""
    from rich.text import Text

    texts: list[str | Text] = [
        tables.shown(cell if spread else replace(cell, sd=None), how, row.seeds)
        for cell, row in zip(cells, rows, strict=True)
    ]
    means = [cell.mean for cell in cells]
    known = [index for index, mean in enumerate(means) if mean is not None]
    if len(known) > 1:
        best = max(known, key=lambda index: sign * (means[index] or 0.0))
        texts[best] = Text(str(texts[best]), style="bold")
    return texts


def _difference(row: contrasts.Contrast | None, comparison: contrasts.Contrasts, how: tables.Measure) -> str | Text:
    """Format a difference with its interval.

    A coloured sign marks methods that are ahead of the baseline or behind the baseline.
    """
    from rich.text import Text

    if row is None or row.difference is None or row.difference.mean is None:
        return "baseline" if row is not None and row.label == comparison.baseline else tables.MISSING
    text = tables.number(row.difference.mean, how, "+")
    if row.difference.interval is not None:
        text += f" {contrasts.range_text(row.difference.interval, how, '+')}"
    order = verdict(row, comparison.directions[row.key])
    colours = {AHEAD: "green", BEHIND: "red"}
    if order not in colours:
        return printable(text)
    return Text.assemble((order.sign, colours[order]), f" {text}")
