"""Compare methods with a baseline, using differences paired by seed, and write tables of the comparisons."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fedstrata.base.arrays import Floats
from fedstrata.base.errors import SpecError, nearest, not_among
from fedstrata.base.printable import csv_cell, printable
from fedstrata.base.screen import ScreenTable
from fedstrata.evaluation.history import History, column_of
from fedstrata.reporting import tables
from fedstrata.reporting.draw import TRAFFIC, Curves, quantity, spent
from fedstrata.reporting.statistics import (
    FEWEST,
    MIN_SEEDS,
    Difference,
    Estimate,
    Range,
    Test,
    cut,
    paired_difference,
)


class Budget(NamedTuple):
    """A resource that each run uses, such as bytes sent.

    Args:
        columns: The columns to add up in each round's record. The sum is the amount of the resource used in the round.
        unit: The unit in which the amount is shown.
        axis: The title of the axis that shows the amount in charts.
        factor: The factor that converts recorded values to the shown unit.
    """

    columns: tuple[str, ...]
    unit: str
    axis: str
    factor: float = 1.0


BUDGETS = {
    "bytes": Budget(TRAFFIC, "MB", "sent and received, MB", 1e-6),
    "samples": Budget(("samples",), "samples", "samples trained"),
    "seconds": Budget(("seconds",), "s", "time, s"),
    "simulated_seconds": Budget(("simulated_seconds",), "simulated s", "simulated time, s"),
}
"""The resources, such as bytes; metrics can be compared at equal amounts of a resource."""

LESS = ("train_loss", "samples", "seconds", "simulated_seconds", *TRAFFIC)
"""The columns that are not metrics, and for which lower values are better."""

SHOWN = 10
"""The maximum number of columns listed in an error about an unknown measure."""

_AT = "_at_"


@dataclass(frozen=True)
class Contrast:
    """The values of one measure for one method, and the difference from the baseline.

    Args:
        key: The key of the measure, such as ``final_accuracy``.
        label: The label of the method's runs.
        seeds: The number of the method's runs.
        value: The estimate of the measure over these runs.
        difference: The difference from the baseline, paired by seed; None for the baseline itself, or without a
            baseline.
        stuck: The number of runs that broke down: from some round to the end, the server could not use any reply.
        kept: A string that names the round of the saved model; see ``tables.kept``.
    """

    key: str
    label: str
    seeds: int
    value: Estimate
    difference: Difference | None
    stuck: int = 0
    kept: str | None = None

    @property
    def marked(self) -> str:
        """The label of the method, with the mark ``STUCK`` if at least one run broke down."""
        return f"{self.label} {tables.STUCK}" if self.stuck else self.label


@dataclass(frozen=True)
class Contrasts:
    """A table of comparisons of all methods with a baseline.

    Args:
        rows: The comparisons, sorted by measure and then by label.
        measures: A mapping from the key of each measure to its display settings.
        baseline: The label of the method with which all other methods are compared; None if there is only one method.
        test: The significance test for the p-values.
        budgets: A mapping from each key ``M_at_KIND`` to an amount of the resource KIND, in recorded units. Methods
            are compared by the value of the primary metric M in the last evaluation before a run exceeds this amount.
        directions: A mapping from the key of each measure to 1 if higher values are better, -1 if lower values are
            better, and otherwise 0.
    """

    rows: tuple[Contrast, ...]
    measures: dict[str, tables.Measure]
    baseline: str | None
    test: Test
    budgets: dict[str, float]
    directions: dict[str, int]

    @property
    def groups(self) -> dict[str, list[Contrast]]:
        """A mapping from the key of each measure, such as the accuracy, to the table rows about this measure."""
        return {key: [row for row in self.rows if row.key == key] for key in self.measures}


def contrast(
    runs: Curves,
    metrics: Sequence[str] = (),
    at: Mapping[str, float | None] | None = None,
    *,
    baseline: str | None = None,
    test: Test = "t",
) -> Contrasts:
    """Compare the runs of each method with the runs of a baseline, by measures such as the final accuracy.

    A measure can be limited to a budget, such as a number of bytes. The measure's value then comes from the last
    evaluation within the budget. A run does not have a value if it spent less than the budget in total.

    Args:
        runs: A mapping from each method to the histories of its runs, one per seed.
        metrics: The measures to compare: ``final_M`` or ``best_M`` for a metric M, ``rounds_to_T`` for a target T, keys
            of ``MEASURES``, or columns of the records (in the round of the saved model). Default: the primary metric at
            the end of the runs, and at equal numbers of bytes and of samples.
        at: A mapping from keys of ``BUDGETS`` to the amounts at which the primary metric is compared. None stands for
            the largest amount that every run reached.
        baseline: The label of the method with which all other methods are compared. Default: the first label.
        test: The test of paired differences. All differences of a measure are judged together: intervals hold
            simultaneously, and p-values are corrected for the number of differences (Bonferroni).

    Raises:
        SpecError: A label, measure or budget is unknown, or a run did not record the budget's resource.
    """
    asked = bool(metrics) or at is not None
    if baseline is not None and baseline not in runs:
        raise SpecError(
            "baseline",
            not_among("is not a label of these runs", baseline, runs),
            baseline,
        )
    if baseline is None and len(runs) > 1:
        baseline = next(iter(runs))
    budgets = _budgets(runs, dict.fromkeys(("bytes", "samples")) if not asked else at or {}, asked)
    measures, values = dict[str, tables.Measure](), dict[str, dict[str, list[float | None]]]()
    for key in [*(metrics if asked else [f"final_{tables.primary(runs)}"]), *budgets]:
        by_label = {label: [_value(history, key, budgets) for history in members] for label, members in runs.items()}
        is_known = any(value is not None for each in by_label.values() for value in each)
        # If all runs spend the same amount, the value at this budget is the final value, and is not shown twice.
        if not asked and (by_label in values.values() or not is_known):
            continue
        values[key], measures[key] = by_label, _measure(key, budgets, runs)
    rows = [
        Contrast(
            key,
            label,
            len(runs[label]),
            Estimate.over(of_label, measures[key].bounds),
            _difference(runs, by_label, label, baseline, test, measures[key].bounds),
            sum(bool(history.warning) for history in runs[label]),
            tables.kept(runs[label]),
        )
        for key, by_label in values.items()
        for label, of_label in by_label.items()
    ]
    budgets = {key: budget for key, budget in budgets.items() if key in measures}
    lower = {metric for members in runs.values() for history in members for metric in history.lower}
    directions = {key: _direction(key, lower) for key in measures}
    return Contrasts(tuple(rows), measures, baseline, test, budgets, directions)


def _difference(
    runs: Curves,
    values: Mapping[str, Sequence[float | None]],
    label: str,
    baseline: str | None,
    test: Test,
    bounds: Range,
) -> Difference | None:
    if baseline is None or label == baseline:
        return None
    by_seed = [
        {run.seed: value for run, value in zip(runs[each], values[each], strict=True) if run.seed is not None}
        for each in (label, baseline)
    ]
    difference = paired_difference(by_seed[0], by_seed[1], test, together=len(runs) - 1)
    largest = bounds[1] - bounds[0]
    return replace(difference, interval=cut(difference.interval, (-largest, largest)))


def _budgets(runs: Mapping[str, Sequence[History]], at: Mapping[str, float | None], asked: bool) -> dict[str, float]:
    """Return a mapping from each measure at a budget, such as ``accuracy_at_bytes``, to the amount of the budget."""
    budgets, metric = {}, tables.primary(runs)
    for kind, amount in at.items():
        if kind not in BUDGETS:
            raise SpecError(
                "at", f"is not a budget. Use one of: {', '.join(BUDGETS)}, with or without an amount (bytes=5e7).", kind
            )
        totals = [_spent(history, kind, metric)[-1] for members in runs.values() for history in members if len(history)]
        least = float(min(totals, default=0.0))
        if amount is not None and not amount > 0:
            raise SpecError("at", "the amount of a budget must be above 0.", f"{kind}={amount:g}")
        if amount is not None or least > 0:
            budgets[f"{metric}{_AT}{kind}"] = least if amount is None else amount
        elif asked:
            raise SpecError("at", f"at least one run did not record {kind}. Use another budget.", kind)
    return budgets


def _spent(history: History, kind: str, metric: str) -> Floats:
    """Return the amount of a resource that a run had spent at each evaluation of a metric.

    If the metric was not evaluated, the only value is the amount of the whole run.
    """
    rounds, _ = history.points(column_of(metric))
    return spent(history, BUDGETS[kind].columns, rounds if len(rounds) else np.array([history[-1]["round"]]))


def _value(history: History, key: str, budgets: Mapping[str, float]) -> float | None:
    if key in budgets:
        metric, _, kind = key.rpartition(_AT)
        return value_at(history, kind, budgets[key], metric)
    if key in tables.MEASURES or tables.is_of_metric(key):
        return tables.value(history, key)
    return tables.reached(history, key) if tables.is_target(key) else history.final(key)


def value_at(history: History, kind: str, budget: float, metric: str = "accuracy") -> float | None:
    """Return a metric's value in the last evaluation before a run exceeds a budget.

    The value is None if the metric was not evaluated within the budget, or if the whole run spent less than the budget.

    Args:
        history: A run.
        kind: A key of ``BUDGETS``.
        budget: The amount, in bytes, samples or seconds.
        metric: The metric, on the test set.
    """
    values = history.points(column_of(metric))[1]
    if not len(values):
        return None
    end = spent(history, BUDGETS[kind].columns, np.array([history[-1]["round"]]))[0]
    within = np.flatnonzero(_spent(history, kind, metric) <= budget)
    return float(values[within[-1]]) if len(within) and budget <= end else None


def _measure(key: str, budgets: Mapping[str, float], runs: Curves) -> tables.Measure:
    """Return the display settings of a measure in a table: heading, factor and digits.

    Raises:
        SpecError: The measure is unknown.
    """
    if key in budgets:
        metric, _, kind = key.rpartition(_AT)
        how, budget = tables.measure(f"final_{metric}"), BUDGETS[kind]
        at = f"{metric} at equal {kind.replace('_', ' ')} ({_amount(budgets[key], budget)})"
        return replace(how, heading=at + how.heading.removeprefix(f"final {metric}"))
    columns = dict.fromkeys(name for members in runs.values() for history in members for name in history.columns)
    of_metric = tables.is_of_metric(key) and column_of(key.partition("_")[2]) in columns
    if key in tables.MEASURES or tables.is_target(key) or of_metric or key == f"final_{tables.primary(runs)}":
        return tables.measure(key)
    if key not in columns:
        named, others = [*tables.MEASURES, "rounds_to_T"], [name for name in columns if name not in tables.MEASURES]
        rest = f", … ({len(others)} columns of metrics.jsonl)" if len(others) > SHOWN else ""
        problem = (
            f"is not a result of these runs{nearest(key, [*named, *others])} "
            f"Use one of: {', '.join([*named, *others[:SHOWN]])}{rest}."
        )
        raise SpecError("metric", problem, key)
    shown_as = quantity(key)
    digits = 2 if shown_as.factor == 100 else 4
    return tables.Measure(f"final {shown_as.name}", shown_as.factor, digits, tables.bounds(key))


def _amount(amount: float, budget: Budget) -> str:
    value = amount * budget.factor
    return f"{value:,.0f} {budget.unit}" if value >= 100 else f"{value:.3g} {budget.unit}"


def range_text(ends: Range | None, how: tables.Measure, sign: str = "") -> str:
    """Format an interval in the unit of its column."""
    return (
        tables.MISSING
        if ends is None
        else f"[{tables.number(ends[0], how, sign)}, {tables.number(ends[1], how, sign)}]"
    )


def p_text(p: float | None) -> str:
    """Format a p-value with three digits."""
    return tables.MISSING if p is None else "<0.001" if p < 0.0005 else f"{p:.3f}"


def _lines(table: Contrasts) -> tuple[list[str], dict[str, list[list[str]]]]:
    """Return the headings and rows of a table as strings, without columns that are empty in all rows.

    Returns:
        The headings of the columns to the right of the labels, and a mapping from each measure's heading to the
        measure's rows.
    """
    headings = ["", "mean ± sd", "95 % interval", f"minus {table.baseline}", "95 % interval", "p"]
    groups = {}
    for key, rows in table.groups.items():
        how = table.measures[key]
        groups[how.heading] = [
            [
                row.marked,
                tables.shown(row.value, how, row.seeds),
                range_text(row.value.interval, how),
                tables.MISSING if (d := row.difference) is None or d.mean is None else tables.number(d.mean, how, "+"),
                tables.MISSING if d is None else range_text(d.interval, how, "+"),
                tables.MISSING if d is None else p_text(d.corrected),
            ]
            for row in rows
        ]
    every = [cells for lines in groups.values() for cells in lines]
    kept = [0, 1, *(i for i in range(2, 6) if any(cells[i] != tables.MISSING for cells in every))]
    selected = {title: [[cells[i] for i in kept] for cells in lines] for title, lines in groups.items()}
    return [headings[i] for i in kept[1:]], selected


def caption(table: Contrasts) -> str:
    """Return sentences that explain the numbers and tests in the table, and that warn if there are too few seeds."""
    return " ".join(_sentences(table))


def _sentences(table: Contrasts) -> Iterator[str]:
    seeds = sorted({row.seeds for row in table.rows})
    if not seeds:
        return
    differences = [row.difference for row in table.rows if row.difference is not None]
    if seeds[-1] == 1:
        yield "With one seed, intervals and tests are not possible."
    else:
        interval = ", with the 95 % interval of the mean by Student's t" if seeds[-1] >= MIN_SEEDS else ""
        yield f"Mean ± sample standard deviation over {_span(seeds)} seeds{interval}."
    together = len({row.label for row in table.rows}) - 1
    if any(each.interval for each in differences):
        how = f"hold simultaneously for all {together} differences of a measure (Student's t, Bonferroni)"
        how = how if together > 1 else "are Student's t"
        yield f"Differences from {table.baseline} are paired by seed. Their 95 % intervals {how}."
    if any(each.p is not None for each in differences):
        name = {"t": "paired t-test", "wilcoxon": "Wilcoxon signed-rank test"}[table.test]
        times = f", multiplied by {together} (Bonferroni)" if together > 1 else ""
        yield f"p-values: two-sided {name}{times}."
    if table.budgets:
        metric = next(iter(table.budgets)).rpartition(_AT)[0].capitalize()
        yield f"{metric} at an equal budget is the value of the last evaluation within the budget."
    pairs = sorted({each.n for each in differences} or {row.value.n for row in table.rows})
    if seeds[-1] > 1 and pairs[0] < MIN_SEEDS:
        yield "Intervals need at least three seeds, and tests at least two."
    if table.test == "wilcoxon" and any(n < FEWEST["wilcoxon"] for n in pairs) and differences:
        yield "Wilcoxon's test needs six pairs that differ. With fewer pairs, p cannot be below 0.05 and is not shown."
    if any(each.p is None and each.n >= FEWEST[table.test] for each in differences):
        yield "Intervals and p-values are missing if all pairs have the same difference."
    yield from tables.of_kept({row.label: row.kept for row in table.rows})
    yield from tables.of_stuck({row.label: row.stuck for row in table.rows})


def to_screen(table: Contrasts, every: bool = False) -> ScreenTable:
    """Return the table for a terminal. If ``every`` is True, the table has all columns even in a narrow terminal."""
    headings, groups = _lines(table)
    rows = [row for title, lines in groups.items() for row in ([title], *lines)]
    # The intervals of the means are the least important columns. A narrow terminal leaves them out first.
    order = sorted(range(1, len(headings) + 1), key=lambda column: (column == 2 and len(headings) > 2, column))
    return ScreenTable(["", *headings], rows, order=order, every=every, note=caption(table))


def to_markdown(table: Contrasts) -> str:
    """Return the table in Markdown, with the caption below."""
    headings, groups = _lines(table)
    rows = [[title, *cells] for title, lines in groups.items() for cells in lines]
    return f"{tables.markdown_table(['', '', *headings], rows, left=2)}\n{printable(caption(table))}\n"


def to_latex(table: Contrasts) -> str:
    """Return a LaTeX table (with the package booktabs) that has one row per method and one column per measure.

    The best mean of each measure is bold. Intervals, differences and tests are in a comment above the table.
    """
    groups = table.groups
    columns = [_latex_column(table, key, rows) for key, rows in groups.items()]
    labels = [escape(row.marked) for row in next(iter(groups.values()), [])]
    seeds = sorted({row.seeds for row in table.rows})
    over = "" if seeds[-1:] in ([], [1]) else f"Mean ± standard deviation over {_span(seeds)} seeds."
    bold = (
        "The best mean of each measure is bold." if any(r"\mathbf" in cell for each in columns for cell in each) else ""
    )
    kept = tables.of_kept({row.label: row.kept for row in table.rows})
    stuck = tables.of_stuck({row.label: row.stuck for row in table.rows})
    comment = "".join(f"% {line}".rstrip() + "\n" for line in to_markdown(table).splitlines())
    caption = escape(" ".join(filter(None, [over, bold, *kept, *stuck])))
    headings = ["", *(escape(table.measures[key].heading) for key in groups)]
    return comment + latex_table(caption, headings, zip(labels, *columns, strict=True))


def latex_table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a LaTeX table in the style of booktabs. All strings must already be escaped."""
    lines = [
        r"% Needs \usepackage{booktabs} in the preamble.",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{caption}}}",
        rf"\begin{{tabular}}{{l{'r' * (len(headings) - 1)}}}",
        r"\toprule",
        " & ".join(headings) + r" \\",
        r"\midrule",
        *(" & ".join(cells) + r" \\" for cells in rows),
    ]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def _latex_column(table: Contrasts, key: str, rows: Sequence[Contrast]) -> list[str]:
    """Return the cells of a measure, with the best mean in bold. A method with a missing value is never the best."""
    how, sign = table.measures[key], table.directions[key]
    means = {
        row.label: sign * row.value.mean for row in rows if row.value.mean is not None and row.value.n == row.seeds
    }
    best = tables.number(sign * max(means.values()), how) if means and sign and len(rows) > 1 else None
    cells = []
    for row in rows:
        cell = _mathematics(tables.shown(row.value, how, row.seeds))
        if row.label in means and tables.number(sign * means[row.label], how) == best:
            mean, space, rest = cell.strip("$").partition(r" \pm")
            cell = rf"$\mathbf{{{mean}}}{space}{rest}$"
        cells.append(cell)
    return cells


def _direction(key: str, lower: Collection[str]) -> int:
    """Return 1 if higher values of a measure are better, -1 if lower values are better, and otherwise 0.

    Args:
        key: The measure.
        lower: The metrics for which lower values are better.
    """
    metric = tables.metric_of(key.partition(_AT)[0])
    if metric in lower or metric in LESS or tables.is_target(key):
        return -1
    return 1 if metric in tables.SHARES or tables.is_of_metric(key) or key.startswith(("test.", "validation.")) else 0


def _span(seeds: Sequence[int]) -> str:
    return f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"


_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "%": r"\%", "&": r"\&", "#": r"\#", "_": r"\_", "$": r"\$",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$",
    "|": "$|$", "±": r"$\pm$", tables.MISSING: "--",
    "−": "$-$", tables.STUCK: r"$\dagger$",
    "[": "{[}", "]": "{]}", "*": "{*}",  # At a row's start, LaTeX reads brackets as an argument of the previous \\.
}  # fmt: skip


def escape(text: str) -> str:
    r"""Escape text for LaTeX.

    >>> print(escape("a_b & 50 %"))
    a\_b \& 50 \%
    """
    return "".join(_LATEX.get(letter, letter) for letter in printable(text))


def _mathematics(cell: str) -> str:
    """Format a cell with numbers in the mathematics mode of LaTeX."""
    if cell == tables.MISSING:
        return "--"
    value, bracket, note = cell.partition(" (")
    # LaTeX must add a space after the comma in an interval, but not after a comma between thousands.
    value = value.replace(",", "{,}").replace("{,} ", ", ")
    value = value.replace("±", r"\pm").replace("−", "-")
    return f"${value}${escape(bracket + note)}"


def to_csv(comparisons: Mapping[str, Contrasts]) -> str:
    """Return CSV with one row per data set, measure and method. Numbers are not rounded; missing ones are left empty.

    Args:
        comparisons: A mapping from the name of each data set to its comparisons.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = "data measure label seeds n mean sd low high baseline pairs difference difference_low difference_high"
    writer.writerow([*names.split(), "test", "p", "p_corrected"])
    for data, table in comparisons.items():
        for row in table.rows:
            value, d = row.value, row.difference or Difference(None, 0)
            cells = (
                [data, row.key, row.label, row.seeds, value.n, value.mean, value.sd, *(value.interval or ("", ""))]
                + ([""] * 8 if row.difference is None else
                   [table.baseline, d.n, d.mean, *(d.interval or ("", "")), table.test, d.p, d.corrected])
            )  # fmt: skip
            writer.writerow(map(csv_cell, cells))
    return text.getvalue()


def to_json(rows: Sequence[tables.Row], table: Contrasts) -> list[dict[str, Any]]:
    """Return the rows as ``tables.to_json`` does, with the keys ``interval``, ``budget`` and ``difference`` added."""
    plain = tables.to_json(rows)
    for row in table.rows:
        cell = next(each for each in plain if each["label"] == row.label).setdefault(row.key, {})
        cell |= {"mean": row.value.mean, "sd": row.value.sd, "n": row.value.n, "interval": row.value.interval}
        if row.key in table.budgets:
            cell["budget"] = table.budgets[row.key]
        if (d := row.difference) is not None:
            cell["difference"] = {
                "to": table.baseline, "mean": d.mean, "n": d.n, "interval": d.interval,
                "test": table.test, "p": d.p, "p_corrected": d.corrected,
            }  # fmt: skip
    return plain
