"""Verdicts on a paper's claims, from its tables' results; ``report.statistics`` has the procedure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import product
from typing import Any, Literal, NamedTuple

from fedstrata.base.errors import SpecError
from fedstrata.papers.readings import Reading, readings
from fedstrata.papers.running import Results
from fedstrata.papers.tables import CLAIMS, PAPERS, Table, tables
from fedstrata.reporting.statistics import MIN_SEEDS, Difference, Order, Range, planned_differences, t_interval
from fedstrata.spec.experiment import parse_toml

POINT = 0.01
"""To what accuracies are rounded, in percent."""
POINTS: Range = (-100.0, 100.0)
"""Between which two accuracies can differ."""

Verdict = Literal[
    "holds", "in part", "not", "not shown", "not yet", "cannot be tested with this data", "out of reach of two cores"
]
Cells = Mapping[tuple[str, str, int], Mapping[str, Any]]
"""Results by row, column and seed."""


class Comparison(NamedTuple):
    """A row beside another one.

    Args:
        column: In which setting.
        row: The row.
        than: What it is compared with.
        difference: In points of the table's metric, as one of all comparisons of the table.
    """

    column: str
    row: str
    than: str
    difference: Difference


def difference_text(difference: Difference) -> str:
    """Return a difference with its interval, or how many seeds it is of.

    >>> difference_text(Difference(1.5, 3, (0.5, 2.5))), difference_text(Difference(-1.5, 1))
    ('+1.5 [+0.5, +2.5]', '−1.5 (1 seed)')
    """
    if difference.mean is None:
        return "not run"
    if difference.interval is None or difference.n < MIN_SEEDS:
        return f"{signed(difference.mean)} ({difference.n} seed{'s' * (difference.n != 1)})"
    return f"{signed(difference.mean)} [{', '.join(map(signed, difference.interval))}]"


def signed(value: float) -> str:
    """A difference with its sign.

    >>> signed(-1.234), signed(-0.01)
    ('−1.2', '0.0')
    """
    text = f"{value:+.1f}".replace("-", "−")
    return "0.0" if text in ("+0.0", "−0.0") else text


def cells_of(table: Table, known: Results, *, quick: bool = False) -> Cells:
    """The results of a table's cells."""
    there = ((cell, known.get(cell.hash)) for cell in table.cells(quick=quick))
    return {(cell.row, cell.column, cell.seed): result for cell, result in there if result is not None}


def over_seeds(cells: Cells, row: str, column: str, metric: str) -> dict[int, float]:
    """A metric's value of each seed that has one."""
    return {
        seed: float(result[metric])
        for (r, c, seed), result in cells.items()
        if (r, c) == (row, column) and metric in result
    }


def compared(table: Table, cells: Cells) -> list[Comparison]:
    """All comparisons that a table makes, run or not."""
    comparisons = table.comparisons()
    pairs = [
        (over_seeds(cells, row, c, table.metric), over_seeds(cells, than, c, table.metric))
        for c, row, than in comparisons
    ]
    found = planned_differences(pairs, resolution=POINT, bounds=POINTS)
    return [Comparison(*each, difference) for each, difference in zip(comparisons, found, strict=True)]


def needed(seeds: int, comparisons: int) -> float:
    """How many times its standard deviation over the seeds a difference must be for its order to be stated.

    Args:
        seeds: Pairs.
        comparisons: That the table makes.

    >>> round(needed(3, 1), 2), round(needed(5, 9), 2)
    (2.48, 2.43)
    """
    return t_interval(0.0, 1.0, seeds, together=comparisons)[1]


@dataclass(frozen=True)
class Claim:
    """A quantitative claim of an abstract or a conclusion, in our words.

    Args:
        paper: Whose.
        says: What is claimed.
        where: ``abstract``, ``conclusion`` or both.
        kind: How it is judged: see ``KINDS``.
        about: What that needs to know.
    """

    paper: str
    says: str
    where: str
    kind: str
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Judgement:
    """What became of a claim.

    Args:
        claim: The claim.
        verdict: Whether it holds here.
        evidence: The figures.
        command: What makes them.
    """

    claim: Claim
    verdict: Verdict
    evidence: str
    command: str


def claims() -> list[Claim]:
    """All of them.

    Raises:
        SpecError: A file is wrong.
    """
    found = []
    for paper in PAPERS:
        content = parse_toml(files(__package__).joinpath(paper, CLAIMS).read_text(encoding="utf-8"))
        for each in content["claims"]:
            about = {key: value for key, value in each.items() if key not in ("says", "where", "kind")}
            if each["kind"] not in KINDS:
                raise SpecError(f"{paper}/claims", f"expected one of {', '.join(KINDS)}", each["kind"])
            found.append(Claim(paper, each["says"], each["where"], each["kind"], about))
    return found


def judged(claim: Claim, known: Results, *, quick: bool = False) -> Judgement:
    """What becomes of a claim with these results."""
    return KINDS[claim.kind](claim, known, quick)


def _verdict(orders: Sequence[Order], wanted: Order = "above") -> Verdict:
    """Of comparisons that should all have one order.

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
"""Comparisons that a claim's evidence shows one by one."""


Part = tuple[str, Difference]
"""What a difference is of, and the difference."""


def _listed(parts: Sequence[Part]) -> str:
    """Differences by what they are of; of many, how many have which order, and the least and the largest."""
    if all(difference.n == 0 for _, difference in parts):
        return "not run"
    if len(parts) <= MOST:
        return "; ".join(f"{label}: " * bool(label) + difference_text(each) for label, each in parts)
    orders = Counter(each.order() for _, each in parts)
    means = [each.mean for _, each in parts if each.mean is not None]
    text = ", ".join(f"{count} {order}" for order, count in orders.items())
    return f"of {len(parts)}: {text}; from {signed(min(means))} to {signed(max(means))}"


def _above(claim: Claim, known: Results, quick: bool) -> Judgement:
    """A row above others in columns of a table."""
    row, than = claim.about["row"], claim.about["than"]
    others = [than] if isinstance(than, str) else than
    table = tables()[f"{claim.paper}/{claim.about['table']}"]
    columns = claim.about.get("columns", list(table.columns))
    there = compared(table, cells_of(table, known, quick=quick))
    found = [each for each in there if each.row == row and each.than in others]
    found += [
        Comparison(each.column, row, each.row, -each.difference)
        for each in there
        if each.than == row and each.row in others
    ]
    found = [each for each in found if each.column in columns]
    if len(found) != len([1 for c in columns for o in others if {row, o} <= set(table.rows_of(c))]):
        raise SpecError(f"{claim.paper}/claims", f"{claim.about['table']} does not compare them all", claim.says)
    parts: list[Part] = []
    for each in found:
        where = [each.column] * (len(table.columns) > 1) + [f"− {each.than}"] * (len(others) > 1)
        parts.append((" ".join(where), each.difference))
    text = f"{row} − {others[0] if len(others) == 1 else 'others'}: {_listed(parts)}"
    return Judgement(claim, _verdict([each.difference.order() for each in found]), text, _command(table))


def _near(claim: Claim, known: Results, quick: bool) -> Judgement:
    """A row in some columns no worse than in another column by more than some points."""
    table = tables()[f"{claim.paper}/{claim.about['table']}"]
    row, reference, within = claim.about["row"], claim.about["reference"], float(claim.about["within"])
    cells = cells_of(table, known, quick=quick)
    columns = [column for column in table.columns if column != reference and row in table.rows_of(column)]
    theirs = over_seeds(cells, row, reference, table.metric)
    pairs = [(over_seeds(cells, row, column, table.metric), theirs) for column in columns]
    found = planned_differences(pairs, resolution=POINT, bounds=POINTS)
    parts = list(zip(columns, found, strict=True))
    text = f"{row} − {row} with {reference}: {_listed(parts)}; as good: at most {within:g} below"
    return Judgement(claim, _verdict([each.order(within) for _, each in parts]), text, _command(table))


def _margin(claim: Claim, known: Results, quick: bool) -> Judgement:
    """A row no more than some points below another, in all columns of a table."""
    table = tables()[f"{claim.paper}/{claim.about['table']}"]
    row, than, within = claim.about["row"], claim.about["than"], float(claim.about["within"])
    parts = [
        (each.column, each.difference)
        for each in compared(table, cells_of(table, known, quick=quick))
        if (each.row, each.than) == (row, than)
    ]
    text = f"{row} − {than}: {_listed(parts)}; as good: at most {within:g} below"
    return Judgement(claim, _verdict([each.order(within) for _, each in parts]), text, _command(table))


COUNTED = {"bytes_up": "bytes of the clients' answers", "bytes_down": "bytes to the clients"}
"""What is counted and not judged by seeds."""


def _ratio(claim: Claim, known: Results, quick: bool) -> Judgement:
    """A figure of a row at most, or at least, so many times another row's: nothing that chance decides."""
    table = tables()[f"{claim.paper}/{claim.about['table']}"]
    row, than, metric = claim.about["row"], claim.about["than"], claim.about["metric"]
    cells = cells_of(table, known, quick=quick)
    columns = [column for column in table.columns if {row, than} <= set(table.rows_of(column))]
    both = [(over_seeds(cells, row, c, metric), over_seeds(cells, than, c, metric)) for c in columns]
    by_column = [[mine[seed] / theirs[seed] for seed in mine if theirs.get(seed)] for mine, theirs in both]
    ratios = [ratio for of in by_column for ratio in of]
    if not ratios:
        return Judgement(claim, "not yet", "not run", _command(table))
    text = f"{COUNTED[metric]}, {row} / {than}: {statistics.fmean(ratios):.3f}"
    most, least = claim.about.get("most", max(ratios)), claim.about.get("least", min(ratios))
    within: Verdict = "holds" if least <= min(ratios) and max(ratios) <= most else "not"
    return Judgement(claim, within if all(by_column) else "not yet", text, _command(table))


def _sooner(claim: Claim, known: Results, quick: bool) -> Judgement:
    """A row reaches the best accuracy of others in fewer rounds than they do."""

    def rounds(curve: Curve, other: Curve) -> tuple[float, float]:
        best = max(other)
        return 1 + next((i for i, value in enumerate(curve) if value >= best), len(curve)), 1 + other.index(best)

    row = claim.about["row"]
    return _less(
        claim, known, quick, rounds, 1.0, lambda whose: f"rounds to the best accuracy of {whose}, {row} − {whose}"
    )


def _steadier(claim: Claim, known: Results, quick: bool) -> Judgement:
    """A row's accuracy deviates less over its last rounds than others' does."""
    row, last = claim.about["row"], int(claim.about["rounds"])

    def deviations(curve: Curve, other: Curve) -> tuple[float, float]:
        return statistics.stdev(curve[-last:]), statistics.stdev(other[-last:])

    says = f"deviation over the last {last} rounds, {row} −"
    return _less(claim, known, quick, deviations, POINT, lambda whose: f"{says} {whose}")


Curve = Sequence[float]
"""Accuracies, round by round."""


def _less(
    claim: Claim,
    known: Results,
    quick: bool,
    figures: Callable[[Curve, Curve], tuple[float, float]],
    resolution: float,
    says: Callable[[str], str],
) -> Judgement:
    """A figure of a row's curve is below that of others, in all columns that have both, or on average over them.

    Where a few evaluations are all that a run has, no interval that holds over many columns can be short enough: such
    claims are ``pooled``.

    Args:
        claim: The claim.
        known: The results.
        quick: At small scale.
        figures: The row's figure and another one's, of their curves.
        resolution: To what the figures are rounded.
        says: What they are, of what they are compared with.
    """
    table = tables()[f"{claim.paper}/{claim.about['table']}"]
    row, than = claim.about["row"], claim.about["than"]
    others = [than] if isinstance(than, str) else than
    cells = cells_of(table, known, quick=quick)
    columns = claim.about.get("columns", list(table.columns))
    has = {other: [c for c in columns if {row, other} <= set(table.rows_of(c))] for other in others}
    if claim.about.get("pooled"):
        groups = [("", other, there) for other, there in has.items()]
    else:
        groups = [(c, other, [c]) for c in columns for other in others if c in has[other]]
    pairs, labels = [], []
    for label, other, over in groups:
        both: dict[int, list[tuple[float, float]]] = {}
        for seed, column in product(table.seeds, over):
            curve, baseline = (cells.get((r, column, seed), {}).get("curve") for r in (row, other))
            if curve and baseline:
                both.setdefault(seed, []).append(figures(curve, baseline))
        whole = {seed: pairs for seed, pairs in both.items() if len(pairs) == len(over)}
        mine, theirs = ({s: statistics.fmean(pair[i] for pair in of) for s, of in whole.items()} for i in (0, 1))
        pairs.append((mine, theirs))
        where = [label] * (bool(label) and len(columns) > 1) + [f"− {other}"] * (len(others) > 1)
        labels.append(" ".join(where))
    found = planned_differences(pairs, resolution=resolution)
    text = f"{says(others[0] if len(others) == 1 else 'others')}: {_listed(list(zip(labels, found, strict=True)))}"
    if claim.about.get("pooled"):
        text += f"; mean over {', '.join(columns)}"
    return Judgement(claim, _verdict([each.order() for each in found], "below"), text, _command(table))


def _reading(claim: Claim, known: Results, quick: bool) -> Judgement:
    """A figure that is computed, not run."""
    found: Reading = readings()[claim.about["reading"]]
    verdict: Verdict = claim.about["verdicts"][found.holds] if "verdicts" in claim.about else found.holds
    return Judgement(claim, verdict, found.figure, "fedstrata reproduce --show")


def _page(claim: Claim, known: Results, quick: bool) -> Judgement:
    """What another page has measured."""
    return Judgement(claim, claim.about["verdict"], claim.about["evidence"], claim.about["command"])


def _untestable(claim: Claim, known: Results, quick: bool) -> Judgement:
    """What would need other data or more than two cores."""
    return Judgement(claim, claim.about.get("verdict", "cannot be tested with this data"), claim.about["why"], "–")


def _command(table: Table) -> str:
    return f"fedstrata reproduce {table.paper}/{table.name}"


KINDS: Mapping[str, Callable[[Claim, Results, bool], Judgement]] = {
    "above": _above,
    "near": _near,
    "margin": _margin,
    "ratio": _ratio,
    "sooner": _sooner,
    "steadier": _steadier,
    "reading": _reading,
    "page": _page,
    "untestable": _untestable,
}
"""How claims are judged."""
