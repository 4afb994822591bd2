"""Verdicts on the claims of papers, from the results of their tables.

The statistics are those of ``fedstrata.reporting.statistics.planned_differences``.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from fedstrata.base.errors import SpecError
from fedstrata.papers.readings import readings
from fedstrata.papers.running import Results
from fedstrata.papers.tables import CLAIMS, PAPERS, Table, tables
from fedstrata.reporting.statistics import MIN_SEEDS, Difference, Order, Range, planned_differences, t_interval
from fedstrata.spec.experiment import parse_toml

POINT = 0.01
"""The unit to which accuracies are rounded, in percentage points."""
POINTS: Range = (-100.0, 100.0)
"""The smallest and the largest possible difference of two accuracies, in percentage points."""

Verdict = Literal[
    "holds", "in part", "not", "not shown", "not yet", "cannot be tested with this data", "out of reach of two cores"
]
Cells = Mapping[tuple[str, str, int], Mapping[str, Any]]
"""A mapping from row, column and seed to the results of the run."""


class Comparison(NamedTuple):
    """A comparison of two rows in one column of a table.

    Args:
        column: The column.
        row: The row.
        than: The row with which it is compared.
        difference: The difference of the table's metric, ``row`` minus ``than``; its interval and p-value are corrected
            over all comparisons of the table.
    """

    column: str
    row: str
    than: str
    difference: Difference


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
    """Return the results of those cells of a table that were run."""
    cells = (cell for cell in table.cells(quick=quick) if cell.hash in known)
    return {(cell.row, cell.column, cell.seed): known[cell.hash] for cell in cells}


def over_seeds(cells: Cells, row: str, column: str, metric: str) -> dict[int, float]:
    """Return a mapping from each seed of a row and column to the value of a metric."""
    return {
        seed: float(result[metric])
        for (r, c, seed), result in cells.items()
        if (r, c) == (row, column) and metric in result
    }


def compared(table: Table, cells: Cells) -> list[Comparison]:
    """Return all comparisons of a table, including those whose cells were not run."""
    comparisons = table.comparisons()
    values = partial(over_seeds, cells, metric=table.metric)
    pairs = [(values(row, column), values(than, column)) for column, row, than in comparisons]
    differences = planned_differences(pairs, resolution=POINT, bounds=POINTS)
    return [Comparison(*each, difference) for each, difference in zip(comparisons, differences, strict=True)]


def needed(seeds: int, comparisons: int) -> float:
    """Return the smallest mean difference for which "above" or "below" is stated.

    Its unit is the standard deviation of the differences over the seeds.

    Args:
        seeds: The number of seeds.
        comparisons: The number of comparisons of the table.

    >>> round(needed(3, 1), 2), round(needed(5, 9), 2)
    (2.48, 2.43)
    """
    return t_interval(0.0, 1.0, seeds, together=comparisons)[1]


@dataclass(frozen=True)
class Claim:
    """A quantitative claim in the abstract or the conclusion of a paper, in our words.

    Args:
        paper: The paper, a key of ``PAPERS``.
        statement: The claim.
        where: The place of the claim: ``abstract``, ``conclusion`` or both.
        kind: The way in which it is judged: a key of ``TABLE_KINDS``, ``reading``, ``page`` or ``untestable``; see
            ``KINDS``.
        about: The parameters of this kind of judgement, such as the table and the row.
    """

    paper: str
    statement: str
    where: str
    kind: str
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Judgement:
    """The verdict on a claim.

    Args:
        claim: The claim.
        verdict: Whether the claim holds in our results.
        evidence: The figures on which the verdict is based, as text.
        command: The command that computes the figures.
    """

    claim: Claim
    verdict: Verdict
    evidence: str
    command: str


def claims() -> list[Claim]:
    """Read the claims of all papers.

    Raises:
        SpecError: A file names an unknown kind.
    """
    claims = []
    for paper in PAPERS:
        content = parse_toml(files(__package__).joinpath(paper, CLAIMS).read_text(encoding="utf-8"))
        for about in content["claims"]:
            claim = Claim(paper, about.pop("statement"), about.pop("where"), about.pop("kind"), about)
            if claim.kind not in KINDS:
                raise SpecError(f"{paper}/claims", f"expected one of {', '.join(KINDS)}", claim.kind)
            claims.append(claim)
    return claims


def judged(claim: Claim, known: Results, *, quick: bool = False) -> Judgement:
    """Judge a claim by the available results; ``quick`` means that these are of experiments at small scale."""
    about = claim.about
    if claim.kind == "reading":
        reading = readings()[about["reading"]]
        verdict: Verdict = about["verdicts"][reading.holds] if "verdicts" in about else reading.holds
        return Judgement(claim, verdict, reading.figure, "fedstrata reproduce --show")
    if claim.kind == "page":
        return Judgement(claim, about["verdict"], about["evidence"], about["command"])
    if claim.kind == "untestable":
        return Judgement(claim, about.get("verdict", "cannot be tested with this data"), about["why"], "–")
    case = _Case(claim, known, quick)
    return Judgement(claim, *TABLE_KINDS[claim.kind](case), f"fedstrata reproduce {case.name}")


class _Case:
    """A claim that compares a row of a table with other rows, and the results of the table."""

    def __init__(self, claim: Claim, known: Results, quick: bool) -> None:
        self.claim, self.about, self.name = claim, claim.about, f"{claim.paper}/{claim.about['table']}"
        self.table = tables()[self.name]
        self.cells = cells_of(self.table, known, quick=quick)
        self.row: str = self.about["row"]
        than = self.about.get("than", [])
        self.others: list[str] = [than] if isinstance(than, str) else than
        self.other = self.others[0] if len(self.others) == 1 else "others"
        """The name of the other row or rows in the text of the evidence."""
        self.columns: list[str] = self.about.get("columns", list(self.table.columns))

    def has(self, column: str, *rows: str) -> bool:
        """Return True if a column has all these rows."""
        return set(rows) <= set(self.table.rows_of(column))

    def values(self, row: str, column: str, metric: str = "") -> dict[int, float]:
        """Return a mapping from each seed to the value of a metric. Default: the metric of the table."""
        return over_seeds(self.cells, row, column, metric or self.table.metric)

    def label(self, column: str, other: str, *, all_columns: int) -> str:
        """Return a text that names a comparison with another row in a column.

        It leaves out the column or the other row if it is the same in all comparisons of the claim.
        """
        where = [column] * (bool(column) and all_columns > 1)
        return " ".join(where + [f"− {other}"] * (len(self.others) > 1))


Part = tuple[str, Difference]
"""The name of a difference, and the difference."""


def _verdict(orders: Sequence[Order], wanted: Order = "above") -> Verdict:
    """Return the verdict on a claim, which says that all comparisons have the order ``wanted``.

    >>> _verdict(["above", "above"]), _verdict(["above", "not run"]), _verdict(["above", "below", "not run"])
    ('holds', 'not yet', 'in part')
    >>> _verdict(["no order shown", "below"]), _verdict(["no order shown"]), _verdict(["below", "too few seeds"])
    ('not', 'not shown', 'not yet')
    """
    right = sum(order == wanted for order in orders)
    open = sum(order in ("not run", "too few seeds") for order in orders)
    if right == len(orders):
        return "holds"
    if right and right + open < len(orders):
        return "in part"
    if open:
        return "not yet"
    return "not shown" if set(orders) == {"no order shown"} else "not"


MOST = 4
"""The most comparisons that the evidence of a claim lists one by one; if there are more, it summarises them."""


def _listed(parts: Sequence[Part]) -> str:
    """Return differences as text, each with its name.

    If there are more than ``MOST``, return the count of each order, and the smallest and the largest difference.
    """
    if all(difference.n == 0 for _, difference in parts):
        return "not run"
    if len(parts) <= MOST:
        return "; ".join(f"{label}: " * bool(label) + difference_text(each) for label, each in parts)
    orders = Counter(each.order() for _, each in parts)
    means = [each.mean for _, each in parts if each.mean is not None]
    text = ", ".join(f"{count} {order}" for order, count in orders.items())
    return f"of {len(parts)}: {text}; from {signed(min(means))} to {signed(max(means))}"


def _above(case: _Case) -> tuple[Verdict, str]:
    """Judge whether a row is above the other rows in all columns of the claim."""
    row, others = case.row, case.others
    comparisons = [each for each in compared(case.table, case.cells) if each.column in case.columns]
    wanted = [each for each in comparisons if each.row == row and each.than in others]
    reverse = [each for each in comparisons if each.than == row and each.row in others]
    wanted += [Comparison(each.column, row, each.row, -each.difference) for each in reverse]
    if len(wanted) != sum(case.has(column, row, other) for column in case.columns for other in others):
        problem = f"{case.about['table']} does not compare them all"
        raise SpecError(f"{case.claim.paper}/claims", problem, case.claim.statement)
    count = len(case.table.columns)
    parts = [(case.label(each.column, each.than, all_columns=count), each.difference) for each in wanted]
    return _verdict([each.difference.order() for each in wanted]), f"{row} − {case.other}: {_listed(parts)}"


def _near(case: _Case) -> tuple[Verdict, str]:
    """Judge whether a row's metric is, in each column, at most ``within`` points below that in a reference column."""
    row, reference = case.row, case.about["reference"]
    columns = [column for column in case.table.columns if column != reference and case.has(column, row)]
    pairs = [(case.values(row, column), case.values(row, reference)) for column in columns]
    differences = planned_differences(pairs, resolution=POINT, bounds=POINTS)
    return _within(case, f"{row} with {reference}", list(zip(columns, differences, strict=True)))


def _margin(case: _Case) -> tuple[Verdict, str]:
    """Judge whether a row is at most ``within`` points below another row, in all columns of a table."""
    comparisons = compared(case.table, case.cells)
    parts = [(each.column, each.difference) for each in comparisons if (each.row, each.than) == (case.row, case.other)]
    return _within(case, case.other, parts)


def _within(case: _Case, other: str, parts: Sequence[Part]) -> tuple[Verdict, str]:
    within = float(case.about["within"])
    text = f"{case.row} − {other}: {_listed(parts)}; as good: at most {within:g} below"
    return _verdict([each.order(within) for _, each in parts]), text


COUNTED = {"bytes_up": "bytes of the clients' answers", "bytes_down": "bytes to the clients"}
"""Metrics that are counts, with a description of each. They are compared directly, without a test over seeds."""


def _ratio(case: _Case) -> tuple[Verdict, str]:
    """Judge whether the ratio of a row's count (see ``COUNTED``) to another row's is from ``least`` to ``most``."""
    row, other, metric = case.row, case.other, case.about["metric"]
    by_column = []
    for column in (column for column in case.table.columns if case.has(column, row, other)):
        theirs, mine = case.values(other, column, metric), case.values(row, column, metric).items()
        by_column.append([value / theirs[seed] for seed, value in mine if theirs.get(seed)])
    ratios = [ratio for of_column in by_column for ratio in of_column]
    if not ratios:
        return "not yet", "not run"
    text = f"{COUNTED[metric]}, {row} / {other}: {statistics.fmean(ratios):.3f}"
    most, least = case.about.get("most", max(ratios)), case.about.get("least", min(ratios))
    within: Verdict = "holds" if least <= min(ratios) and max(ratios) <= most else "not"
    return within if all(by_column) else "not yet", text


Curve = Sequence[float]
"""The accuracy in each evaluated round."""


def _sooner(case: _Case) -> tuple[Verdict, str]:
    """Judge whether a row reaches the best accuracy of each other row in fewer rounds than that row."""

    def rounds(curve: Curve, other: Curve) -> tuple[float, float]:
        best = max(other)
        return 1 + next((i for i, value in enumerate(curve) if value >= best), len(curve)), 1 + other.index(best)

    return _less(case, rounds, 1.0, f"rounds to the best accuracy of {case.other}, {case.row} − {case.other}")


def _steadier(case: _Case) -> tuple[Verdict, str]:
    """Judge whether the accuracy of a row has a smaller standard deviation over its last rounds than the other rows."""
    last = int(case.about["rounds"])

    def deviations(curve: Curve, other: Curve) -> tuple[float, float]:
        return statistics.stdev(curve[-last:]), statistics.stdev(other[-last:])

    return _less(case, deviations, POINT, f"deviation over the last {last} rounds, {case.row} − {case.other}")


def _less(
    case: _Case, figures: Callable[[Curve, Curve], tuple[float, float]], resolution: float, description: str
) -> tuple[Verdict, str]:
    """Judge whether a figure that is computed from a row's curve is smaller than the figure of each other row.

    It must be smaller in all columns that have both rows. The claim can set ``pooled``: then only the mean over these
    columns is judged. This is for runs with few evaluations, where the correction for many columns would make all
    intervals too wide for a verdict.

    Args:
        case: The claim.
        figures: A function that takes the curves of the row and of another row, and returns their figures.
        resolution: The unit to which the figures are rounded.
        description: A description of the figures, for the evidence.
    """
    columns = {other: [c for c in case.columns if case.has(c, case.row, other)] for other in case.others}
    if pooled := bool(case.about.get("pooled")):
        groups = [("", other, of_both) for other, of_both in columns.items()]
    else:
        groups = [(c, other, [c]) for c in case.columns for other in case.others if c in columns[other]]
    pairs, labels = [], []
    for label, other, over in groups:
        mine, theirs = dict[int, float](), dict[int, float]()
        for seed in case.table.seeds:
            cells = [[case.cells.get((row, column, seed), {}) for row in (case.row, other)] for column in over]
            curves = [[cell.get("curve", ()) for cell in pair] for pair in cells]
            if curves and all(curve and baseline for curve, baseline in curves):
                both = [figures(curve, baseline) for curve, baseline in curves]
                mine[seed], theirs[seed] = map(statistics.fmean, zip(*both, strict=True))
        pairs.append((mine, theirs))
        labels.append(case.label(label, other, all_columns=len(case.columns)))
    differences = planned_differences(pairs, resolution=resolution)
    text = f"{description}: {_listed(list(zip(labels, differences, strict=True)))}"
    if pooled:
        text += f"; mean over {', '.join(case.columns)}"
    return _verdict([each.order() for each in differences], "below"), text


TABLE_KINDS: Mapping[str, Callable[[_Case], tuple[Verdict, str]]] = {
    "above": _above,
    "near": _near,
    "margin": _margin,
    "ratio": _ratio,
    "sooner": _sooner,
    "steadier": _steadier,
}
"""A mapping from each kind of claim about a table to the function that judges it."""

KINDS = (*TABLE_KINDS, "reading", "page", "untestable")
"""The kinds of claims. A ``reading`` is judged by a figure that follows from the rules of a paper, a ``page`` by
results on another page of the documentation, and an ``untestable`` claim cannot be judged here."""
