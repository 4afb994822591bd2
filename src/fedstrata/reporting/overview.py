"""Prepare the report's first screen: cards of the best methods, and a table that includes a plot of differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedstrata.base.style import BEHIND
from fedstrata.evaluation.history import History, column_of, target_text
from fedstrata.reporting import tables
from fedstrata.reporting.answer import names, number, verdict
from fedstrata.reporting.contrasts import Contrast, Contrasts
from fedstrata.reporting.draw import TRAFFIC, spent
from fedstrata.reporting.runs import Run, histories
from fedstrata.reporting.statistics import Estimate

LAST = 10
"""The number of last evaluations of a run. The standard deviation over these evaluations is the run's steadiness."""
WIDE = 250
"""The width of the plot of differences, in pixels."""
BAR = 56
"""The width of the longest bar, in pixels."""
CUT = 3.0
"""The plot cuts rows that are longer than ``CUT`` times the upper quartile of the rows' lengths."""
UNITS = (("GB", 1e-9), ("MB", 1e-6), ("kB", 1e-3))
"""The units of amounts of data and their factors, beginning with the largest unit."""

Estimates = dict[str, Estimate]
"""The type of a mapping from each method's label to an estimate."""


def display(key: str) -> tables.Measure:
    """Return how the report displays a measure: accuracies in percent, other measures with up to 3 digits."""
    how = tables.measure(key)
    if how.factor == 1 and tables.metric_of(key).endswith("accuracy"):
        return replace(how, heading=f"{how.heading}, %", factor=100, digits=2)
    return replace(how, digits=min(how.digits, 3))


@dataclass(frozen=True)
class Column:
    """A column of the report's first table.

    Args:
        heading: The name of the column.
        unit: The unit, which is shown below the name.
        values: The estimate of each method.
        text: A function that formats a mean.
        better: 1 if higher values are better, and -1 if lower values are better.
        bars: Whether each cell has a bar.
    """

    heading: str
    unit: str
    values: Estimates
    text: Callable[[float], str]
    better: int
    bars: bool = False

    def best(self, labels: Sequence[str]) -> list[str]:
        """Return the methods with the best value.

        A method is never the best if another method has more known values.
        """
        known = {label: each for label in labels if (each := self.values[label]).mean is not None}
        most = max((each.n for each in known.values()), default=0)
        texts = {
            label: (self.better * each.mean, self.text(each.mean))
            for label, each in known.items()
            if each.n == most and each.mean is not None
        }
        top = max((value for value, _ in texts.values()), default=None)
        best = {text for value, text in texts.values() if value == top}
        return [label for label, (_, text) in texts.items() if text in best]


def overview(runs: Mapping[str, Sequence[Run]], comparison: Contrasts, labels: Sequence[str]) -> dict[str, Any]:
    """Return the values for the template's cards and first table.

    Args:
        runs: A mapping from each method to its runs, one per seed.
        comparison: The comparison of the runs. The first measure of the comparison must be the final value of the
            primary metric.
        labels: The methods' labels, sorted from the best method to the worst.
    """
    members = histories(runs)
    key = next(iter(comparison.measures))
    rows = {row.label: row for row in comparison.groups[key]}
    how = replace(comparison.measures[key], digits=min(comparison.measures[key].digits, 3))
    better = comparison.directions[key] or 1
    metric, _, unit = how.heading.partition(", ")
    seeds = max(row.seeds for row in rows.values())
    values = {label: rows[label].value for label in labels}
    main = Column(metric, unit, values, lambda x: number(x, how, "", seeds), better)
    target = target_of(members)
    others = [
        column
        for column in (_worst(members, key), *_traffic(members, target), _rounds(members, target))
        if column is not None
    ]
    columns = [main, *(column for column in others if len(runs) == 1 or not _is_constant(column, labels))]
    drawn = None
    if comparison.baseline is not None and any(row.difference and row.difference.each for row in rows.values()):
        drawn = _drawn([rows[label] for label in labels], how.factor)
    return {
        "baseline": comparison.baseline,
        "heads": [(column.heading, column.unit) for column in columns],
        "rows": [_row(label, rows, columns, labels, how, comparison, drawn) for label in labels],
        "drawn": drawn,
        "unit": "points" if how.factor == 100 else "",
        "intervals": any(row.difference is not None and row.difference.interval for row in rows.values()),
        "cards": list(_cards(members, rows, main, others, comparison.directions[key])),
        "caption": list(_captions(rows, [each for each in others if each not in columns], labels, comparison)),
    }


def target_of(members: Mapping[str, Sequence[History]]) -> float | None:
    """Return the hardest target of the primary metric that at least half of the methods reached with every seed.

    Without such a target, return the hardest target that any run reached; None if no run reached a target.
    """
    metric = tables.primary(members)
    runs = [history for each in members.values() for history in each]
    lower = any(metric in history.lower for history in runs)
    targets = {
        target
        for history in runs
        for target in (history.targets if metric == "accuracy" else history.metric_targets.get(metric, ()))
    }
    some = None
    for target in sorted(targets, reverse=not lower):
        reached = [
            [history.rounds_to_target(target, metric) is not None for history in each] for each in members.values()
        ]
        if 2 * sum(map(all, reached)) >= len(members):
            return target
        if some is None and any(map(any, reached)):
            some = target
    return some


def _row(
    label: str,
    rows: Mapping[str, Contrast],
    columns: Sequence[Column],
    labels: Sequence[str],
    how: tables.Measure,
    comparison: Contrasts,
    drawn: dict[str, Any] | None,
) -> dict[str, Any]:
    row, difference = rows[label], rows[label].difference
    said, words = "", ""
    if difference is not None and difference.mean is not None:
        said = number(difference.mean, how, "+", row.seeds)
        words = f"{said}{' points' if how.factor == 100 else ''}"
        if difference.interval is not None:
            low, high = (number(end, how, "+", row.seeds) for end in difference.interval)
            words += f"; 95 % interval {low} to {high}"
        words += f"; {'seeds' if len(difference.each) > 1 else 'one seed'}: "
        words += ", ".join(number(each, how, "+", row.seeds) for each in difference.each)
    order = verdict(row, comparison.directions[row.key])
    return {
        "label": label,
        "marked": row.marked,
        "baseline": label == comparison.baseline,
        "minus": said,
        "value": "" if difference is None or difference.mean is None else f"{difference.mean:.10g}",
        "words": words,
        "verdict": order,
        "chip": order.words.replace(" ", "-").removesuffix("-shown"),
        "marks": None if drawn is None else drawn["rows"].get(label),
        "cells": [_cell(column, label, row.seeds, labels, first=column is columns[0]) for column in columns],
    }


def _cell(column: Column, label: str, seeds: int, labels: Sequence[str], *, first: bool) -> dict[str, Any]:
    value = column.values[label]
    if value.mean is None:
        return {"text": tables.MISSING, "more": "", "value": "", "best": False, "bar": None}
    more = ""
    if first and value.sd is not None and (spread := column.text(value.sd)).strip("0."):
        more = f"± {spread}"
    more += f" ({value.n} of {seeds})" if value.n < seeds else ""
    largest = max(each.mean for each in column.values.values() if each.mean is not None) if column.bars else 0
    return {
        "text": column.text(value.mean),
        "more": more.strip(),
        "value": f"{value.mean:.10g}",
        "best": len(labels) > 1 and label in column.best(labels),
        "bar": round(BAR * value.mean / largest, 1) if largest else None,
    }


def _is_constant(column: Column, labels: Sequence[str]) -> bool:
    """Return True if all methods have the same text and the same number of seeds in the column."""
    texts = {tables.MISSING if (mean := column.values[label].mean) is None else column.text(mean) for label in labels}
    return len(texts) == 1 and len({column.values[label].n for label in labels}) == 1


def _worst(members: Mapping[str, Sequence[History]], key: str) -> Column | None:
    """Return the column with the mean of a metric, preferably the primary metric, over the worst tenth of clients."""
    columns = dict.fromkeys(name for each in members.values() for history in each for name in history.columns)
    known = tables.worst_first(columns, tables.metric_of(key))
    lower = {name for each in members.values() for run in each for name in run.lower}
    if not known:
        return None
    how, of = display(known[0]), tables.metric_of(known[0])
    unit = "%" if how.factor == 100 else of
    values = {label: Estimate.over(run.final(known[0]) for run in each) for label, each in members.items()}
    return Column("worst tenth", unit, values, lambda x: number(x, how), -1 if of in lower else 1)


def _traffic(members: Mapping[str, Sequence[History]], target: float | None) -> list[Column]:
    """Return the column with the amount of transferred data until the target, or in total if ``target`` is None.

    The result is empty if bytes were not recorded.
    """

    def bytes_of(history: History) -> float | None:
        if target is None:
            return sum(history.total(column) for column in TRAFFIC)
        round = history.rounds_to_target(target, history.primary)
        return None if round is None else float(spent(history, TRAFFIC, np.array([round]))[0])

    values = {label: Estimate.over(bytes_of(history) for history in each) for label, each in members.items()}
    means = [each.mean for each in values.values() if each.mean is not None]
    if not any(means):
        return []
    unit, factor = next(
        (unit, factor) for unit, factor in UNITS if max(means) * factor >= (1 if unit == "GB" else 0.1) or unit == "kB"
    )
    least, largest = min(means) * factor, max(means) * factor
    digits = 1 if least >= 1 or (least >= 0.1 and largest >= 10) else 2
    until = "in total" if target is None else f"to {_target(members, target)}"
    return [Column(unit, until, values, lambda x: f"{x * factor:,.{digits}f}", -1, bars=True)]


def _rounds(members: Mapping[str, Sequence[History]], target: float | None) -> Column | None:
    if target is None:
        return None
    values = {
        label: Estimate.over(history.rounds_to_target(target, history.primary) for history in each)
        for label, each in members.items()
    }
    return Column("rounds", f"to {_target(members, target)}", values, lambda x: f"{x:,.0f}", -1)


def _target(members: Mapping[str, Sequence[History]], target: float) -> str:
    metric = tables.primary(members)
    return f"{target * 100:g} %" if metric == "accuracy" else f"{metric} {target_text(target)}"


def _cards(
    members: Mapping[str, Sequence[History]],
    rows: Mapping[str, Contrast],
    main: Column,
    others: Sequence[Column],
    direction: int,
) -> Iterator[tuple[str, str, str]]:
    """Yield each card's title, methods and value. No card shows a method as steadiest if it is behind the baseline."""
    labels = [label for label, row in rows.items() if row.value.mean is not None]
    steady = [label for label in labels if verdict(rows[label], direction) is not BEHIND and not rows[label].stuck]
    accuracy, alone = main.heading == "final accuracy", len(rows) == 1
    best = "most accurate" if accuracy else f"{'highest' if main.better > 0 else 'lowest'} {main.heading}"
    named = [(main.heading if alone else best, main, " %" if main.unit else "")]
    for column in others:
        if column.heading == "worst tenth":
            words = "worst tenth of the clients"
            named.append((words if alone else f"fairest: {words}", column, f" {column.unit}"))
        elif column.bars:
            named.insert(1, (f"{'' if alone else 'fewest '}bytes {column.unit}", column, f" {column.heading}"))
    primary = tables.primary(members)
    spreads = {label: Estimate.over(_spread(run, column_of(primary)) for run in members[label]) for label in steady}
    how = display(f"final_{primary}")
    spread = Column("", "", spreads, lambda x: f"± {number(x, how)}", -1)
    words = f"last {LAST} evaluations"
    named.append((words if alone else f"steadiest: {words}", spread, " points" if how.factor == 100 else ""))
    for title, column, unit in named:
        if top := column.best(steady if column is spread else labels):
            yield title, names(top), f"{column.text(column.values[top[0]].mean or 0.0)}{unit}"


def _spread(history: History, column: str) -> float | None:
    """Return the standard deviation of a column over the last evaluations; None if there are not enough evaluations."""
    values = history.points(column)[1]
    return float(values[-LAST:].std(ddof=1)) if len(values) >= LAST else None


def _drawn(rows: Sequence[Contrast], factor: float) -> dict[str, Any]:
    """Return the positions (in pixels) of differences, intervals and seeds in the plot, with one scale for all rows."""
    reaches = {}
    for row in rows:
        if (difference := row.difference) is not None and difference.mean is not None:
            reaches[row.label] = (difference, [*difference.each, *(difference.interval or ())])
    extents = sorted(max(map(abs, values)) for _, values in reaches.values())
    limit = CUT * extents[math.ceil(0.75 * len(extents)) - 1] or extents[-1]
    within = [min(max(value, -limit), limit) for _, values in reaches.values() for value in values]
    low, high = min(0.0, *within) * factor, max(0.0, *within) * factor
    margin = 0.06 * (high - low) or 1.0
    low, high = low - margin, high + margin

    def place(value: float) -> float:
        share: float = min(max((value * factor - low) / (high - low), 0.0), 1.0)
        return round(WIDE * share, 1)

    return {
        "wide": WIDE,
        "zero": place(0.0),
        "ticks": [
            (place(tick / factor), f"{tick:+.6g}".replace("-", "−") if tick else "0") for tick in _ticks(low, high)
        ],
        "rows": {
            label: {
                "mean": place(difference.mean or 0.0),
                "line": [place(end) for end in difference.interval] if difference.interval else None,
                "seeds": [place(each) for each in difference.each],
                "cut": [any(v * factor < low for v in values), any(v * factor > high for v in values)],
            }
            for label, (difference, values) in reaches.items()
        },
    }


def _ticks(low: float, high: float) -> list[float]:
    """Return at most eight ticks between two ends: multiples of a step such as 0.5, 1 or 2.

    >>> _ticks(-1.3, 4.2)
    [-1.0, 0.0, 1.0, 2.0, 3.0, 4.0]
    """
    power = 10 ** math.floor(math.log10(high - low))
    step = next(step for step in (power * each for each in (0.1, 0.2, 0.5, 1, 2)) if (high - low) / step <= 7)
    return [float(f"{n * step:.12g}") for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _captions(
    rows: Mapping[str, Contrast], left_out: Sequence[Column], labels: Sequence[str], comparison: Contrasts
) -> Iterator[str]:
    """Yield the sentences below the first table."""
    seeds = sorted({row.seeds for row in rows.values()})
    differences = [row.difference for row in rows.values() if row.difference is not None]
    if seeds[-1] > 1:
        over = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        yield f"Means over {over} seeds, ± the sample standard deviation."
    if any(each.interval for each in differences):
        how = f"hold simultaneously for all {len(rows) - 1} differences (Student's t, Bonferroni)"
        how = how if len(rows) > 2 else "are Student's t"
        yield f"Differences are paired by seed. Their 95 % intervals {how}."
    elif differences:
        yield "Intervals need at least three seeds."
    equal = [row.label for row in rows.values() if (d := row.difference) is not None and d.each and not any(d.each)]
    if equal:
        verb = "has" if len(equal) == 1 else "have"
        yield f"{names(equal)} {verb} the same value as {comparison.baseline} with every seed."
    for column in left_out:
        if (mean := column.values[labels[0]].mean) is not None:
            yield f"Equal for all methods: {column.heading} {column.unit}, {column.text(mean)}."
    yield from tables.of_kept({row.label: row.kept for row in rows.values()})
    yield from tables.of_stuck({row.label: row.stuck for row in rows.values()})
    if len(rows) > 1:
        yield "Bold: the best value of a column, even if the difference is not significant."
