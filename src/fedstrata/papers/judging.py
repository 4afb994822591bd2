"""What may be said of a table's results, and of a paper's claims.

Differences are paired by seed. An order is stated only from three seeds on, and only where the interval of the
difference leaves out zero: Student's t, held together at 95 % over all comparisons that the table makes (Bonferroni).
The p-values beside it are corrected over the same family by Holm.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import product
from typing import Any, Literal

from fedstrata.base.errors import SpecError
from fedstrata.papers.readings import Reading, readings
from fedstrata.papers.running import Results
from fedstrata.papers.tables import CLAIMS, PAPERS, Table, tables
from fedstrata.reporting.statistics import Range, holm, paired_difference, t_interval
from fedstrata.spec.experiment import parse_toml

FEWEST = 3
"""Seeds below which no order is stated."""
POINT = 0.01
"""To what accuracies are rounded, in percent."""
POINTS: Range = (-100.0, 100.0)
"""Between which two accuracies can differ."""

Order = Literal["above", "below", "no order shown", "too few seeds", "not run"]
Verdict = Literal[
    "holds", "in part", "not", "not shown", "not yet", "cannot be tested with this data", "out of reach of two cores"
]
Cells = Mapping[tuple[str, str, int], Mapping[str, Any]]
"""Results by row, column and seed."""


@dataclass(frozen=True)
class Comparison:
    """A row beside another one.

    Args:
        column: In which setting.
        row: The row.
        than: What it is compared with.
        seeds: That both have.
        mean: Mean difference in points of the table's metric; None where there is none.
        interval: Its interval, held over all comparisons of the table together and cut at what is possible; None for
            fewer than two seeds.
        p: Of the paired t-test, corrected by Holm over the same; None for fewer than three seeds.
    """

    column: str
    row: str
    than: str
    seeds: int
    mean: float | None
    interval: Range | None
    p: float | None

    @property
    def order(self) -> Order:
        """What may be said."""
        return order_of(self.seeds, self.interval)

    def __str__(self) -> str:
        """The difference in words."""
        return difference_text(self.mean, self.interval, self.seeds)


def difference_text(mean: float | None, interval: Range | None, seeds: int) -> str:
    """A difference with its interval, or how many seeds it is of.

    >>> difference_text(1.5, (0.5, 2.5), 3), difference_text(-1.5, None, 1)
    ('+1.5 [+0.5, +2.5]', '−1.5 (1 seed)')
    """
    if mean is None:
        return "not run"
    if interval is None or seeds < FEWEST:
        return f"{signed(mean)} ({seeds} seed{'s' * (seeds != 1)})"
    return f"{signed(mean)} [{signed(interval[0])}, {signed(interval[1])}]"


def signed(value: float) -> str:
    """A difference with its sign.

    >>> signed(-1.234), signed(-0.01)
    ('−1.2', '0.0')
    """
    text = f"{value:+.1f}".replace("-", "−")
    return "0.0" if text in ("+0.0", "−0.0") else text


def order_of(seeds: int, interval: Range | None) -> Order:
    """What may be said of a difference.

    >>> order_of(3, (0.5, 2.5)), order_of(3, (-0.5, 2.5)), order_of(2, (0.5, 2.5))
    ('above', 'no order shown', 'too few seeds')
    """
    if seeds == 0:
        return "not run"
    if seeds < FEWEST or interval is None:
        return "too few seeds"
    return "above" if interval[0] > 0 else "below" if interval[1] < 0 else "no order shown"


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
    pairs = table.comparisons()
    found = [
        paired_difference(over_seeds(cells, row, c, table.metric), over_seeds(cells, than, c, table.metric))
        for c, row, than in pairs
    ]
    # What is not tested yet counts as tested in vain: what is stated today must not fall with the next cell.
    corrected = holm([1.0 if each.p is None or each.n < FEWEST else each.p for each in found])
    result = []
    for (column, row, than), each, p in zip(pairs, found, corrected, strict=True):
        values = over_seeds(cells, row, column, table.metric), over_seeds(cells, than, column, table.metric)
        interval = cut(paired_interval(*values, resolution=POINT, together=len(pairs)))
        enough = each.p is not None and each.n >= FEWEST
        result.append(Comparison(column, row, than, each.n, each.mean, interval, p if enough else None))
    return result


def cut(interval: Range | None, to: Range = POINTS) -> Range | None:
    """What of an interval is possible; a t interval of few seeds may be wider.

    >>> cut((-186.7, 3.5)), cut(None)
    ((-100.0, 3.5), None)
    """
    return None if interval is None else (max(interval[0], to[0]), min(interval[1], to[1]))


def needed(seeds: int, comparisons: int) -> float:
    """How many times its standard deviation over the seeds a difference must be for its order to be stated.

    Args:
        seeds: Pairs.
        comparisons: That the table makes.

    >>> round(needed(3, 1), 2), round(needed(5, 9), 2)
    (2.48, 2.43)
    """
    return t_interval(0.0, 1.0, seeds, together=comparisons)[1]


def paired_interval(
    values: Mapping[int, float], baseline: Mapping[int, float], *, resolution: float, together: int = 1
) -> Range | None:
    """The t interval of the mean difference of the seeds that both have; None for fewer than two.

    Args:
        values: By seed.
        baseline: By seed.
        resolution: To what both are rounded. Their differences deviate by resolution / √6 for that alone, and are not
            taken to deviate less: three that are equal by chance would have no interval at all.
        together: How many such intervals hold all together.
    """
    differences = [values[seed] - baseline[seed] for seed in values if seed in baseline]
    if len(differences) < 2:
        return None
    sd = max(statistics.stdev(differences), resolution / 6**0.5)
    return t_interval(statistics.fmean(differences), sd, len(differences), together=together)


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


Part = tuple[str, float | None, Range | None, int]
"""What a difference is of, its mean, its interval and its seeds."""


def _listed(parts: Sequence[Part]) -> str:
    """Differences by what they are of; of many, how many have which order, and the least and the largest."""
    if all(seeds == 0 for *_, seeds in parts):
        return "not run"
    if len(parts) <= MOST:
        texts = [(label, difference_text(mean, interval, seeds)) for label, mean, interval, seeds in parts]
        return "; ".join(f"{label}: {text}" if label else text for label, text in texts)
    orders = Counter(order_of(seeds, interval) for _, _, interval, seeds in parts)
    means = [mean for _, mean, *_ in parts if mean is not None]
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
    found += [_turned(each) for each in there if each.than == row and each.row in others]
    found = [each for each in found if each.column in columns]
    if len(found) != len([1 for c in columns for o in others if {row, o} <= set(table.rows_of(c))]):
        raise SpecError(f"{claim.paper}/claims", f"{claim.about['table']} does not compare them all", claim.says)
    parts: list[Part] = []
    for each in found:
        where = [each.column] * (len(table.columns) > 1) + [f"− {each.than}"] * (len(others) > 1)
        parts.append((" ".join(where), each.mean, each.interval, each.seeds))
    text = f"{row} − {others[0] if len(others) == 1 else 'others'}: {_listed(parts)}"
    return Judgement(claim, _verdict([each.order for each in found]), text, _command(table))


def _turned(each: Comparison) -> Comparison:
    """The same comparison seen from the other row."""
    interval = None if each.interval is None else (-each.interval[1], -each.interval[0])
    return Comparison(
        each.column, each.than, each.row, each.seeds, None if each.mean is None else -each.mean, interval, each.p
    )


def _near(claim: Claim, known: Results, quick: bool) -> Judgement:
    """A row in some columns no worse than in another column by more than some points."""
    table = tables()[f"{claim.paper}/{claim.about['table']}"]
    row, reference, within = claim.about["row"], claim.about["reference"], float(claim.about["within"])
    cells = cells_of(table, known, quick=quick)
    columns = [column for column in table.columns if column != reference and row in table.rows_of(column)]
    orders: list[Order] = []
    parts: list[Part] = []
    for column in columns:
        mine, theirs = (over_seeds(cells, row, c, table.metric) for c in (column, reference))
        found = paired_difference(mine, theirs)
        interval = cut(paired_interval(mine, theirs, resolution=POINT, together=len(columns)))
        order = order_of(found.n, None if interval is None else (interval[0] + within, interval[1] + within))
        orders.append(order)
        parts.append((column, found.mean, interval, found.n))
    text = f"{row} − {row} with {reference}: {_listed(parts)}; as good: at most {within:g} below"
    return Judgement(claim, _verdict(orders), text, _command(table))


def _margin(claim: Claim, known: Results, quick: bool) -> Judgement:
    """A row no more than some points below another, in all columns of a table."""
    table = tables()[f"{claim.paper}/{claim.about['table']}"]
    row, than, within = claim.about["row"], claim.about["than"], float(claim.about["within"])
    found = [
        each for each in compared(table, cells_of(table, known, quick=quick)) if (each.row, each.than) == (row, than)
    ]
    orders = []
    for each in found:
        interval = None if each.interval is None else (each.interval[0] + within, each.interval[1] + within)
        orders.append(order_of(each.seeds, interval))
    parts = [(each.column, each.mean, each.interval, each.seeds) for each in found]
    text = f"{row} − {than}: {_listed(parts)}; as good: at most {within:g} below"
    return Judgement(claim, _verdict(orders), text, _command(table))


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
    orders: list[Order] = []
    parts: list[Part] = []
    for label, other, over in groups:
        both: dict[int, list[tuple[float, float]]] = {}
        for seed, column in product(table.seeds, over):
            curve, baseline = (cells.get((r, column, seed), {}).get("curve") for r in (row, other))
            if curve and baseline:
                both.setdefault(seed, []).append(figures(curve, baseline))
        whole = {seed: pairs for seed, pairs in both.items() if len(pairs) == len(over)}
        mine, theirs = ({s: statistics.fmean(pair[i] for pair in pairs) for s, pairs in whole.items()} for i in (0, 1))
        found = paired_difference(mine, theirs)
        interval = paired_interval(mine, theirs, resolution=resolution, together=len(groups))
        orders.append(order_of(found.n, interval))
        where = [label] * (bool(label) and len(columns) > 1) + [f"− {other}"] * (len(others) > 1)
        parts.append((" ".join(where), found.mean, interval, found.n))
    text = f"{says(others[0] if len(others) == 1 else 'others')}: {_listed(parts)}"
    if claim.about.get("pooled"):
        text += f"; mean over {', '.join(columns)}"
    return Judgement(claim, _verdict(orders, "below"), text, _command(table))


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
