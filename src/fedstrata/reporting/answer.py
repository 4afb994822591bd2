"""Describe the result of a comparison in sentences: the best method, its lead, the interval, and the cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from fedstrata.base.style import AHEAD, BEHIND, NO_ORDER, Verdict
from fedstrata.evaluation.history import History
from fedstrata.reporting import tables
from fedstrata.reporting.contrasts import Contrast, Contrasts
from fedstrata.reporting.draw import TRAFFIC
from fedstrata.reporting.statistics import MIN_SEEDS, seeds_needed

NAMED = 3
"""The maximum number of methods listed in a sentence."""
FINE = 10
"""With at least this number of seeds, percentages have two decimal places."""


@dataclass(frozen=True)
class Answer:
    """The result of a comparison, described in sentences.

    Args:
        headline: A sentence that says which methods are ahead of the baseline.
        best: A sentence about the best method: its difference from the baseline (with the interval), and its cost.
        seeds: The number of seeds needed to make the best method's difference significant, if mean and standard
            deviation stay the same. None if the difference is already significant, or if the number is unknown.
    """

    headline: str
    best: str
    seeds: int | None = None


def verdict(row: Contrast, direction: int) -> Verdict:
    """Return the verdict on a method: ahead of the baseline, behind the baseline, or "no order shown".

    Args:
        row: The comparison of the method with the baseline.
        direction: 1 if higher values are better, -1 if lower values are better, and 0 in all other cases. For the
            direction 0, the verdict is always "no order shown".
    """
    order = row.difference.order() if row.difference is not None else "not run"
    sign = direction * {"above": 1, "below": -1}.get(order, 0)
    return AHEAD if sign > 0 else BEHIND if sign < 0 else NO_ORDER


def answer(runs: Mapping[str, Sequence[History]], comparison: Contrasts) -> Answer:
    """Describe the result for the comparison's first measure, which is usually the final primary metric.

    Args:
        runs: A mapping from each method to the histories of its runs, one per seed.
        comparison: The comparison of the runs.
    """
    key = next(iter(comparison.measures), "")
    rows = {row.label: row for row in comparison.groups.get(key, []) if row.value.mean is not None}
    if not rows:
        return Answer("None of the runs has a result.", "")
    sign = comparison.directions[key] or 1
    ranked = sorted(rows.values(), key=lambda row: -sign * (row.value.mean or 0.0))
    how, baseline, best = comparison.measures[key], comparison.baseline, ranked[0]
    metric = how.heading.removesuffix(", %")
    value = worded(best.value.mean or 0.0, how)
    if baseline is None:
        over = f", mean of {best.value.n} seeds" if best.value.n > 1 else ""
        return Answer(f"{best.label}: {metric} {value}{over}.", "")
    orders = {label: verdict(row, comparison.directions[key]) for label, row in rows.items()}
    ahead = [row.label for row in ranked if orders[row.label] is AHEAD]
    behind = [row.label for row in ranked if orders[row.label] is BEHIND]
    verb = {True: "are", False: "is"}
    sentences = []
    if ahead:
        sentences.append(f"{names(ahead)} {verb[len(ahead) > 1]} ahead of {baseline}.")
    elif (fewest := min(row.value.n for row in ranked)) < MIN_SEEDS:
        sentences.append(f"{fewest} seed{'s are' if fewest > 1 else ' is'} too few to rank the methods.")
    else:
        sentences.append(f"No method is shown to be ahead of {baseline}.")
    if behind:
        sentences.append(f"{names(behind)} {verb[len(behind) > 1]} behind.")
    parts, difference = [f"{'Highest' if sign > 0 else 'Lowest'} {metric}: {best.label}, {value}"], best.difference
    if difference is not None and difference.mean is not None:
        unit = " points" if how.factor == 100 else ""
        text = f"{number(difference.mean, how, '+')}{unit}"
        if difference.interval is not None:
            text += f"; 95 % interval {' to '.join(number(end, how, '+') for end in difference.interval)}"
        parts.append(f" ({text})")
        parts.append(_cost(runs, best.label, baseline))
    needed = None
    if difference is not None and orders[best.label] is NO_ORDER and len(set(difference.each)) > 1:
        needed = seeds_needed(difference, together=len(runs) - 1)
    return Answer(" ".join(sentences), "".join(parts) + ".", needed)


def names(labels: Sequence[str]) -> str:
    """Join names in a phrase such as ``a, b and 3 others``."""
    *first, last = [*labels[:NAMED], f"{len(labels) - NAMED} others"] if len(labels) > NAMED + 1 else labels
    return f"{', '.join(first)} and {last}" if first else last


def worded(value: float, how: tables.Measure) -> str:
    """Format a value with its unit, such as ``95.5 %``."""
    return f"{number(value, how)} %" if how.factor == 100 else number(value, how)


def rounded(how: tables.Measure, seeds: int) -> tables.Measure:
    """Return a copy of a measure's display settings, with the number of decimal places that ``number`` uses."""
    return replace(how, digits=(1 if seeds < FINE else 2) if how.factor == 100 else min(how.digits, 3))


def number(value: float, how: tables.Measure, sign: str = "", seeds: int = 1) -> str:
    """Format a number with few decimal places: one for percentages, and up to three for other measures.

    Args:
        value: The number, in the recorded unit.
        how: The display settings of the measure.
        sign: ``"+"`` to show the sign of positive numbers, too.
        seeds: The number of seeds over which ``value`` is averaged. With at least ``FINE`` seeds, percentages have two
            decimal places.

    >>> number(-0.0125, tables.measure("final_accuracy"), "+"), number(0.25, tables.measure("final_auroc"))
    ('−1.2', '0.250')
    """
    text = f"{value * how.factor:{sign},.{rounded(how, seeds).digits}f}"
    return (text if float(text.replace(",", "")) else text.replace("-", "+" if sign else "")).replace("-", "−")


def _cost(runs: Mapping[str, Sequence[History]], label: str, baseline: str) -> str:
    """Describe how many bytes a method sent, compared with the baseline; empty if bytes were not recorded."""
    sent, baseline_sent = (
        fmean(sum(history.total(column) for column in TRAFFIC) for history in runs[each]) for each in (label, baseline)
    )
    if not sent or not baseline_sent:
        return ""
    ratio = sent / baseline_sent
    text = f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2f}" if abs(ratio - 1) < 0.1 else f"{ratio:.2g}"
    return f", for {'the same' if abs(ratio - 1) < 0.005 else f'{text} times the'} bytes in total"
