"""Labels beside a baseline: intervals, differences paired by seed, corrected tests; for terminals and papers."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedstrata.base.errors import SpecError, nearest
from fedstrata.evaluation.history import History
from fedstrata.reporting.draw import TRAFFIC, Floats, quantity, spent
from fedstrata.reporting.statistics import FEWEST, RESAMPLES, Difference, Estimate, Range, Test, holm, paired_difference
from fedstrata.reporting.tables import (
    MEASURES,
    MISSING,
    STUCK,
    Measure,
    Row,
    is_target,
    measure,
    number,
    of_stuck,
    reached,
    shown,
)

if TYPE_CHECKING:
    from rich.console import RenderableType


class Budget(NamedTuple):
    """What a run spends: the columns that add up to it, its unit, and the factor from what is recorded."""

    columns: tuple[str, ...]
    unit: str
    factor: float = 1.0


BUDGETS = {
    "bytes": Budget(TRAFFIC, "MB", 1e-6),
    "samples": Budget(("samples",), "samples"),
    "seconds": Budget(("seconds",), "s"),
    "simulated_seconds": Budget(("simulated_seconds",), "simulated s"),
}
"""What accuracies can be compared at equal amounts of."""

FINAL = "final_accuracy"
_AT = "accuracy_at_"


@dataclass(frozen=True)
class Contrast:
    """A measure of a label, and how it differs from the baseline's.

    Args:
        key: The measure.
        label: Whose.
        seeds: How many runs there are.
        value: The measure over them.
        difference: To the baseline, paired by seed; None for the baseline itself, and where there is none.
        stuck: How many of the runs never took a step.
    """

    key: str
    label: str
    seeds: int
    value: Estimate
    difference: Difference | None
    stuck: int = 0

    @property
    def marked(self) -> str:
        """The label, with a mark where a run never took a step."""
        return f"{self.label} {STUCK}" if self.stuck else self.label


@dataclass(frozen=True)
class Contrasts:
    """All that a table compares.

    Args:
        rows: By measure, then by label.
        measures: How each measure is shown, by its key.
        baseline: The label that the others are compared with; None where there is one label alone.
        test: What the p of each difference is of.
        budgets: The amount at which accuracies are compared, by ``accuracy_at_KIND``, in recorded units.
    """

    rows: tuple[Contrast, ...]
    measures: dict[str, Measure]
    baseline: str | None
    test: Test
    budgets: dict[str, float]

    @property
    def groups(self) -> dict[str, list[Contrast]]:
        """The rows of each measure."""
        return {key: [row for row in self.rows if row.key == key] for key in self.measures}


def contrast(
    runs: Mapping[str, Sequence[History]],
    metrics: Sequence[str] = (),
    at: Mapping[str, float | None] | None = None,
    *,
    baseline: str | None = None,
    test: Test = "t",
) -> Contrasts:
    """Compare labels by their final accuracy, and by that at equal bytes and at equal samples, or by what is asked for.

    Accuracy at a budget is that of the last evaluation within it; a run that never spent as much has none.

    Args:
        runs: The histories of each label's seeds.
        metrics: Measures of ``MEASURES``, ``rounds_to_T``, or columns of the records, of which the last value counts.
        at: Amounts of ``BUDGETS`` to compare accuracies at; None for the largest that all runs reached.
        baseline: A label; the first one unless given.
        test: Of the paired differences; its p are corrected by Holm over all of the table.

    Raises:
        SpecError: There is no such label, measure or budget, or a budget that some run recorded nothing of.
    """
    asked = bool(metrics) or at is not None
    if baseline is not None and baseline not in runs:
        raise SpecError("baseline", f"there are: {', '.join(runs)}{nearest(baseline, runs)}", baseline)
    if baseline is None and len(runs) > 1:
        baseline = next(iter(runs))
    budgets = _budgets(runs, dict.fromkeys(("bytes", "samples")) if not asked else at or {}, asked)
    measures, values = dict[str, Measure](), dict[str, dict[str, list[float | None]]]()
    for key in [*(metrics if asked else [FINAL]), *budgets]:
        found = {label: [_value(history, key, budgets) for history in members] for label, members in runs.items()}
        if not asked and found in values.values():
            continue  # where all spend alike, equal bytes are the end of the runs
        if not asked and not any(value is not None for each in found.values() for value in each):
            continue
        values[key], measures[key] = found, _measure(key, budgets, runs)
    rows = [
        Contrast(
            key,
            label,
            len(runs[label]),
            Estimate.over(own),
            _difference(runs, found, label, baseline, test),
            sum(bool(history.warning) for history in runs[label]),
        )
        for key, found in values.items()
        for label, own in found.items()
    ]
    corrected = holm([None if row.difference is None else row.difference.p for row in rows])
    rows = [
        row if row.difference is None else replace(row, difference=replace(row.difference, corrected=p))
        for row, p in zip(rows, corrected, strict=True)
    ]
    budgets = {key: budget for key, budget in budgets.items() if key in measures}
    return Contrasts(tuple(rows), measures, baseline, test, budgets)


def _difference(
    runs: Mapping[str, Sequence[History]],
    values: Mapping[str, Sequence[float | None]],
    label: str,
    baseline: str | None,
    test: Test,
) -> Difference | None:
    if baseline is None or label == baseline:
        return None
    mine, theirs = (
        {run.seed: value for run, value in zip(runs[who], values[who], strict=True) if run.seed is not None}
        for who in (label, baseline)
    )
    return paired_difference(mine, theirs, test)


def _budgets(runs: Mapping[str, Sequence[History]], at: Mapping[str, float | None], asked: bool) -> dict[str, float]:
    """The amount of each budget, by its measure's key."""
    found = {}
    for kind, amount in at.items():
        if kind not in BUDGETS:
            raise SpecError("at", f"expected {', '.join(BUDGETS)}, or one of them = an amount", kind)
        totals = [_spent(history, kind)[-1] for members in runs.values() for history in members if len(history)]
        least = float(min(totals, default=0.0))
        if amount is not None and not amount > 0:
            raise SpecError("at", "expected an amount above 0", f"{kind}={amount:g}")
        if amount is not None or least > 0:
            found[_AT + kind] = least if amount is None else amount
        elif asked:
            raise SpecError("at", f"some run recorded no {kind}", kind)
    return found


def _spent(history: History, kind: str) -> Floats:
    """What was spent until each evaluation; until the end where there was none."""
    rounds, _ = history.column("accuracy")
    return spent(history, BUDGETS[kind].columns, rounds if len(rounds) else np.array([history[-1]["round"]]))


def _value(history: History, key: str, budgets: Mapping[str, float]) -> float | None:
    if key in budgets:
        return accuracy_at(history, key.removeprefix(_AT), budgets[key])
    if key in MEASURES:
        value: float | None = history.summary[key]
        return value
    if is_target(key):
        return reached(history, key)
    return float(history.column(key)[1][-1]) if key in history.columns else None


def accuracy_at(history: History, kind: str, budget: float) -> float | None:
    """The accuracy of the last evaluation within a budget; None where there is none, or the run never spent as much.

    Args:
        history: A run.
        kind: One of ``BUDGETS``.
        budget: As it is recorded: bytes, samples or seconds.
    """
    values = history.column("accuracy")[1]
    if not len(values):
        return None
    end = spent(history, BUDGETS[kind].columns, np.array([history[-1]["round"]]))[0]
    within = np.flatnonzero(_spent(history, kind) <= budget)
    return float(values[within[-1]]) if len(within) and budget <= end else None


def _measure(key: str, budgets: Mapping[str, float], runs: Mapping[str, Sequence[History]]) -> Measure:
    """How a measure is shown.

    Raises:
        SpecError: There is none of that name.
    """
    if key in budgets:
        kind = key.removeprefix(_AT)
        budget = BUDGETS[kind]
        return Measure(f"accuracy at equal {kind.replace('_', ' ')} ({_amount(budgets[key], budget)}), %", 100, 2)
    if key in MEASURES or is_target(key):
        return measure(key)
    columns = dict.fromkeys(name for members in runs.values() for history in members for name in history.columns)
    if key not in columns:
        accepted = list(dict.fromkeys([*MEASURES, "rounds_to_T", *columns]))
        raise SpecError("metric", f"there are: {', '.join(accepted)}{nearest(key, accepted)}", key)
    shown_as = quantity(key)
    return Measure(f"final {shown_as.name}", shown_as.factor, 2 if shown_as.factor == 100 else 4)


def _amount(amount: float, budget: Budget) -> str:
    value = amount * budget.factor
    return f"{value:,.0f} {budget.unit}" if value >= 100 else f"{value:.3g} {budget.unit}"


def range_text(ends: Range | None, how: Measure, sign: str = "") -> str:
    """An interval in the unit of its heading."""
    return MISSING if ends is None else f"[{number(ends[0], how, sign)}, {number(ends[1], how, sign)}]"


def p_text(p: float | None) -> str:
    """A p to three digits."""
    return MISSING if p is None else "<0.001" if p < 0.0005 else f"{p:.3f}"


def _lines(found: Contrasts) -> tuple[list[str], dict[str, list[list[str]]]]:
    """The headings after the label, and the cells of each measure's rows; columns that say nothing are left out."""
    headings = ["mean ± sd", "95 % interval", f"minus {found.baseline}", "95 % interval", "p"]
    groups = {}
    for key, rows in found.groups.items():
        how = found.measures[key]
        groups[how.heading] = [
            [
                row.marked,
                shown(row.value, how, row.seeds),
                range_text(row.value.interval, how),
                MISSING if (d := row.difference) is None or d.mean is None else number(d.mean, how, "+"),
                MISSING if d is None else range_text(d.interval, how, "+"),
                MISSING if d is None else p_text(d.corrected),
            ]
            for row in rows
        ]
    every = [cells for lines in groups.values() for cells in lines]
    kept = [0, 1, *(i for i in range(2, 6) if any(cells[i] != MISSING for cells in every))]
    return [headings[i - 1] for i in kept[1:]], {
        heading: [[cells[i] for i in kept] for cells in lines] for heading, lines in groups.items()
    }


def caption(found: Contrasts) -> str:
    """What the numbers are, how they were tested, and whether there are enough of them; in sentences."""
    return " ".join(_sentences(found))


def _sentences(found: Contrasts) -> Iterator[str]:
    seeds = sorted({row.seeds for row in found.rows})
    if not seeds:
        return
    differences = [row.difference for row in found.rows if row.difference is not None]
    if seeds[-1] == 1:
        yield "One seed: no intervals and no tests."
    else:
        count = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        yield f"Mean ± sample standard deviation over {count} seeds, with the 95 % interval of the mean by Student's t."
    if any(each.interval for each in differences):
        yield (
            f"Differences to {found.baseline} are paired by seed; their 95 % intervals are percentile bootstraps "
            f"({RESAMPLES:,} resamples)."
        )
    tests = sum(each.p is not None for each in differences)
    if tests:
        name = {"t": "paired t-test", "wilcoxon": "Wilcoxon signed-rank test"}[found.test]
        over = "the table's one comparison" if tests == 1 else f"the table's {tests} comparisons"
        yield f"p: two-sided {name}, corrected by Holm over {over}."
    if found.budgets:
        yield "Accuracy at equal amounts is that of the last evaluation within them; a run may have none so early."
    pairs = sorted({each.n for each in differences} or {row.value.n for row in found.rows})
    if seeds[-1] > 1 and pairs[0] < 2:
        yield "Where fewer than two seeds have a number there is no interval and no test."
    if 2 in pairs:
        yield "Two seeds are too few: their bootstrap interval holds the true difference in half of all cases."
    if any(3 <= n < FEWEST["wilcoxon"] for n in pairs) and differences:
        yield "Bootstrap intervals of fewer than six seeds are too narrow: of three they hold in about 75 % of cases."
    if found.test == "wilcoxon" and any(n < FEWEST["wilcoxon"] for n in pairs) and differences:
        yield "Wilcoxon's test needs six pairs that differ: below them its p cannot reach 0.05, and none is given."
    if any(each.p is None and each.n >= FEWEST[found.test] for each in differences):
        yield "No p where (nearly) all pairs differ alike or not at all."
    yield from of_stuck({row.label: row.stuck for row in found.rows})


def to_rich(found: Contrasts) -> RenderableType:
    """A table for each measure, for a terminal of 80 columns."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    headings, groups = _lines(found)
    parts: list[RenderableType] = []
    for title, lines in groups.items():
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        table.add_column("", overflow="fold")
        for heading in headings:
            table.add_column(Text(heading), justify="right", overflow="fold")
        for cells in lines:
            table.add_row(*map(Text, cells))
        parts += [Text(title), table]
    return Group(*parts, Text(caption(found)))


def to_markdown(found: Contrasts) -> str:
    """One table in Markdown, with its caption below."""
    headings, groups = _lines(found)
    lines = [["", "", *headings], ["---", "---", *("---:" for _ in headings)]]
    lines += [[title, *cells] for title, rows in groups.items() for cells in rows]
    text = "".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |\n" for line in lines)
    return f"{text}\n{caption(found)}\n"


def to_latex(found: Contrasts) -> str:
    """A table for a paper, which needs the package booktabs; all text is escaped."""
    headings, groups = _lines(found)
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escape(caption(found))}}}",
        rf"\begin{{tabular}}{{l{'r' * len(headings)}}}",
        r"\toprule",
        " & ".join(["", *map(escape, headings)]) + r" \\",
    ]
    for title, rows in groups.items():
        lines += [r"\midrule", rf"\multicolumn{{{len(headings) + 1}}}{{l}}{{{escape(title)}}} \\"]
        lines += [" & ".join([escape(cells[0]), *map(_mathematics, cells[1:])]) + r" \\" for cells in rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "%": r"\%", "&": r"\&", "#": r"\#", "_": r"\_", "$": r"\$",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$",
    "|": "$|$", "±": r"$\pm$", MISSING: "--",
    STUCK: r"$\dagger$",
    "[": "{[}", "]": "{]}", "*": "{*}",  # at the start of a row they would belong to the end of the one before
}  # fmt: skip


def escape(text: str) -> str:
    r"""Text as LaTeX prints it.

    >>> print(escape("a_b & 50 %"))
    a\_b \& 50 \%
    """
    return "".join(_LATEX.get(letter, letter) for letter in text)


def _mathematics(cell: str) -> str:
    """A cell of numbers, whose signs are mathematics."""
    if cell == MISSING:
        return "--"
    value, bracket, note = cell.partition(" (")
    value = value.replace(",", "{,}").replace("{,} ", ", ")  # a comma between thousands takes no space after it
    value = value.replace("±", r"\pm")
    return f"${value}${escape(bracket + note)}"


def to_csv(found: Mapping[str, Contrasts]) -> str:
    """A row a measure and label, with all digits; what there is none of is empty.

    Args:
        found: By data set.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = "data measure label seeds n mean sd low high baseline pairs difference difference_low difference_high"
    writer.writerow([*names.split(), "test", "p", "p_holm"])
    for data, table in found.items():
        for row in table.rows:
            value, d = row.value, row.difference or Difference(None, 0)
            writer.writerow(
                [data, row.key, row.label, row.seeds, value.n, value.mean, value.sd, *(value.interval or ("", ""))]
                + ([""] * 8 if row.difference is None else
                   [table.baseline, d.n, d.mean, *(d.interval or ("", "")), table.test, d.p, d.corrected])
            )  # fmt: skip
    return text.getvalue()


def to_json(rows: Sequence[Row], found: Contrasts) -> list[dict[str, Any]]:
    """What ``tables.to_json`` gives, and in each compared measure its ``interval``, ``budget`` and ``difference``."""
    from fedstrata.reporting import tables

    plain = tables.to_json(rows)
    for row in found.rows:
        cell = next(each for each in plain if each["label"] == row.label).setdefault(row.key, {})
        cell |= {"mean": row.value.mean, "sd": row.value.sd, "n": row.value.n, "interval": row.value.interval}
        if row.key in found.budgets:
            cell["budget"] = found.budgets[row.key]
        if (d := row.difference) is not None:
            cell["difference"] = {
                "to": found.baseline, "mean": d.mean, "n": d.n, "interval": d.interval,
                "test": found.test, "p": d.p, "p_holm": d.corrected,
            }  # fmt: skip
    return plain
