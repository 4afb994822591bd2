"""Judge the claims of the four papers, using our results for the papers' tables.

A claim may need several comparisons, for example with each baseline in each setting. These comparisons form the claim's
family. Other comparisons in the same table do not belong to the family. A claim is confirmed if each comparison of its
family supports the claim at the 5 % level, without a correction. This intersection–union test confirms a false claim
with a probability of at most 5 %. For statements about individual comparisons, we apply a Bonferroni correction over
the family. We do not correct for the number of claims.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Literal, get_args

from fedstrata.base.errors import SpecError
from fedstrata.papers.comparing import (
    Comparison,
    cells_of,
    compared,
    difference_text,
    over_seeds,
    predicted_margin,
    signed,
)
from fedstrata.papers.readings import readings
from fedstrata.papers.running import Results
from fedstrata.papers.tables import CLAIMS, METRICS, PAPERS, tables
from fedstrata.reporting.statistics import MIN_SEEDS, Difference, Order
from fedstrata.spec.experiment import parse_toml

Verdict = Literal["confirmed", "partly", "contradicted", "inconclusive", "not tested", "not testable here"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True)
class Claim:
    """A quantitative claim of a paper, in our words.

    Args:
        paper: Name of the paper, which is a key of ``PAPERS``.
        statement: Text of the claim.
        where: Parts of the paper that state the claim, such as ``abstract, conclusion``.
        kind: How the claim is judged: one of ``KINDS``.
        about: Parameters of the judgement, such as the table and the row. A claim that is shown on the first page of
            the results also has ``headline`` (a short statement) and ``data`` (the name of the data set).
    """

    paper: str
    statement: str
    where: str
    kind: str
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Judgement:
    """A verdict on a claim, with the numbers on which the verdict is based.

    Args:
        claim: Claim that is judged.
        verdict: Whether our results support the claim: one of ``VERDICTS``.
        evidence: Text with the numbers on which the verdict is based. This text completes the sentence in ``measure``.
        command: Command that computes these numbers.
        measure: Beginning of a sentence that names the measured quantity; empty if ``evidence`` is a whole sentence.
        decisive: The claim's comparisons that have enough seeds. Each comparison comes with its difference, whose
            interval determines the verdict.
    """

    claim: Claim
    verdict: Verdict
    evidence: str
    command: str
    measure: str = ""
    decisive: Sequence[tuple[Comparison, Difference]] = ()


def claims() -> list[Claim]:
    """Read the claims of all papers.

    Raises:
        SpecError: A file contains a claim of an unknown kind.
    """
    claims = []
    for paper in PAPERS:
        for about in _file(paper)["claims"]:
            claim = Claim(paper, about.pop("statement"), about.pop("where"), about.pop("kind"), about)
            if claim.kind not in KINDS:
                problem = f"is not a kind of claim. Use one of: {', '.join(KINDS)}"
                raise SpecError(f"{paper}/claims.kind", problem, claim.kind)
            claims.append(claim)
    return claims


def summary(paper: str) -> str:
    """Return the sentence in ``docs/results`` that summarises our results for a paper."""
    return str(_file(paper)["summary"])


def _file(paper: str) -> dict[str, Any]:
    return parse_toml(files(__package__).joinpath(paper, CLAIMS).read_text(encoding="utf-8"))


def judged(claim: Claim, known: Results, *, quick: bool = False) -> Judgement:
    """Judge a claim by the available results. If ``quick`` is true, the results come from small experiments."""
    about = claim.about
    if claim.kind == "reading":
        reading = readings()[about["reading"]]
        verdict: Verdict = about.get("verdicts", {}).get(reading.verdict, reading.verdict)
        return Judgement(claim, verdict, reading.figure, "fedstrata reproduce --show", reading.description)
    if claim.kind == "page":
        return Judgement(claim, about["verdict"], about["evidence"], about["command"])
    if claim.kind == "untestable":
        return Judgement(claim, "not testable here", about["why"], "–")
    return TABLE_KINDS[claim.kind](_Case(claim, known, quick))


Place = tuple[str, str]
"""A place in a table: a row and a column."""
Curve = Sequence[float]
"""One number per round, such as the accuracies that the results store under the key ``curve``."""
Figures = Callable[[Any, Any], tuple[float, float]]
"""A function that takes the results of two rows, and returns the two numbers to compare."""


class _Case:
    """A claim that compares one row of a table with other rows, together with the results of the table."""

    def __init__(self, claim: Claim, known: Results, quick: bool) -> None:
        self.claim, self.about, self.name = claim, claim.about, f"{claim.paper}/{claim.about['table']}"
        self.table = tables()[self.name]
        self.cells = cells_of(self.table, known, quick=quick)
        self.row: str = self.about["row"]
        than = self.about.get("than", [])
        self.others: list[str] = [than] if isinstance(than, str) else than
        self.other = f"`{self.others[0]}`" if len(self.others) == 1 else "each baseline"
        """The name of the other row or rows, as it appears in texts about the claim."""
        self.both = f"`{self.row}` and {self.other}"
        self.instead = f"With `{self.row}` instead of {self.other.replace('each', 'a')}"
        """Two phrases about the compared rows, which appear in texts about the claim."""
        self.columns: list[str] = self.about.get("columns", list(self.table.columns))

    def places(self) -> list[tuple[Place, Place]]:
        """Return the pairs of places (row, column) that the claim compares.

        In each column, the claim's row is compared with each of the other rows.

        Raises:
            SpecError: One of the other rows has no column in common with the claim's row.
        """
        places = [
            ((self.row, column), (other, column))
            for column in self.columns
            for other in self.others
            if {self.row, other} <= set(self.table.rows_of(column))
        ]
        if {other for _, (other, _) in places} != set(self.others):
            problem = "this claim compares rows that have no results in a common column. Set 'row' and 'than' "
            problem += f"to rows of the table {self.name} that share a column."
            raise SpecError(f"{self.claim.paper}/claims", problem, self.claim.statement)
        return places

    def judged(
        self,
        texts: tuple[str, str],
        places: Sequence[tuple[Place, Place]],
        key: str,
        figures: Figures = lambda mine, theirs: (mine, theirs),
        wanted: Order = "above",
        unit: str = "points",
    ) -> Judgement:
        """Judge whether all differences between compared places have the sign that the claim states.

        Args:
            texts: Two introductions. The first begins a sentence that ends with one or two differences.
                The second is a whole sentence before three or more differences.
            places: Pairs of places that the claim compares. A place is a row and a column.
            key: Key of the result that is passed to ``figures``.
            figures: Function that takes the results of both places, and returns the two numbers to compare.
            wanted: The order that the claim states: the first number is ``above`` or ``below`` the second number.
            unit: Unit of the difference, which is a key of ``UNITS``.
        """
        comparisons = []
        for mine, theirs in places:
            pairs = {s: (self.cells.get((*mine, s), {}), self.cells.get((*theirs, s), {})) for s in self.table.seeds}
            both = {seed: figures(a[key], b[key]) for seed, (a, b) in pairs.items() if key in a and key in b}
            sides = [{seed: figure[side] for seed, figure in both.items()} for side in (0, 1)]
            alone, together = (compared(*sides, together=count, unit=unit) for count in (1, len(places)))
            than = theirs[0] if theirs[0] != mine[0] else theirs[1]
            comparisons.append(Comparison(mine[1], than, alone, together))
        return self.judgement(texts, comparisons, wanted, unit)

    def judgement(
        self, texts: tuple[str, str], comparisons: Sequence[Comparison], wanted: Order = "above", unit: str = "points"
    ) -> Judgement:
        """Judge whether all comparisons have the sign that the claim states; see ``judged`` for the arguments."""
        within = float(self.about.get("within", 0.0))
        verdict = _verdict(comparisons, wanted, within)
        tested = [each for each in comparisons if each.alone.n >= MIN_SEEDS]
        decisive = [(each, each.alone if verdict == "confirmed" else each.together) for each in tested]
        measure, evidence = "The claim is", f"not tested yet, because fewer than {MIN_SEEDS} seeds are finished"
        if len(tested) > MOST:
            measure = texts[1]
            evidence = f"{_counted([each for _, each in decisive], wanted, within)} {unit}"
        elif tested:
            measure = texts[0]
            columns, others = (len({each[place] for each in comparisons}) for place in (0, 1))
            labels = [
                f" from `{a.than}` to `{a.column}`"
                if a.than in self.table.columns
                else f" with `{a.column}`" * (columns > 1) + f" (baseline `{a.than}`)" * (others > 1)
                for a in tested
            ]
            changes = [difference_text(each) for _, each in decisive]
            evidence = " and ".join(f"{a} {unit}{label}" for a, label in zip(changes, labels, strict=True))
        if tested and within:
            measure = f"A comparison supports the claim if its whole interval is above −{within:g} points. {measure}"
        if tested and (untested := len(comparisons) - len(tested)):
            are = "is" if untested == 1 else "are"
            evidence += f". Of {len(comparisons)} comparisons, {untested} {are} not tested yet"
        return Judgement(self.claim, verdict, evidence, f"fedstrata reproduce {self.name}", measure, decisive)

    def by_metrics(self, judge: Callable[[str], Judgement]) -> Judgement:
        """Judge accuracies with the table's metric. If a second metric leads to another verdict, the evidence says so.

        Args:
            judge: Function that takes a key of ``METRICS``, and judges the claim by this metric.
        """
        metric = self.table.metric
        other_metric = "last10" if metric == "final" else "final"
        judgement, other = judge(metric), judge(other_metric)
        if other.verdict in (judgement.verdict, "not tested"):
            return judgement
        more = f"This verdict is based on the {METRICS[metric]}. "
        more += f"Based on the {METRICS[other_metric]}, the verdict would be "
        return replace(judgement, evidence=f"{judgement.evidence}. {more}*{other.verdict}*: {other.evidence}")


def _verdict(comparisons: Iterable[Comparison], wanted: Order = "above", within: float = 0.0) -> Verdict:
    """Return the verdict on a claim that all differences are above 0, or that all differences are below 0.

    Args:
        comparisons: The comparisons of the claim.
        wanted: Whether the claim states that differences are above or below 0.
        within: Tolerance of the claim: intervals are compared with −``within`` instead of 0.
    """
    alone = [each.alone.order(within) for each in comparisons]
    together = [each.together.order(within) for each in comparisons]
    right, open = alone.count(wanted), sum(order in ("not run", "too few seeds") for order in alone)
    if right == len(alone):
        return "confirmed"
    if wanted in together and right + open < len(alone):
        return "partly"
    if open:
        return "not tested"
    return "inconclusive" if set(together) == {"not significant"} else "contradicted"


MOST = 2
"""Maximum number of comparisons that a claim's evidence lists. If there are more, a summary replaces them."""


def _counted(differences: Sequence[Difference], wanted: Order, within: float) -> str:
    """Describe how many differences support a claim, with the smallest and the largest difference."""
    supports, opposite = ("supports the claim", "support the claim"), ("shows the opposite", "show the opposite")
    names = {wanted: supports, "not significant": ("is inconclusive", "are inconclusive")}
    counts = Counter(names.get(each.order(within), opposite) for each in differences)
    texts = [f"{count} {name[count > 1]}" for name, count in sorted(counts.items(), reverse=True)]
    text = f"Of {len(differences)} comparisons, {', '.join(texts[:-1])} and {texts[-1]}"
    if len(texts) == 1:
        text = f"All {texts[0].replace(' ', ' comparisons ', 1)}"
    ends = sorted(differences, key=lambda difference: difference.mean or 0.0)
    return f"{text}. The differences range from {difference_text(ends[0])} to {difference_text(ends[-1])}"


def _above(case: _Case) -> Judgement:
    """Judge whether a row is more accurate than other rows in all columns, with a tolerance of ``within`` points."""
    texts = f"{case.instead}, the accuracy changes by", f"We compare the accuracies of {case.both}."
    return case.by_metrics(lambda metric: case.judged(texts, case.places(), metric))


def _near(case: _Case) -> Judgement:
    """Judge whether the accuracy in each column is at most ``within`` points lower than in a reference column."""
    row, reference = case.row, case.about["reference"]
    columns = [column for column in case.columns if column != reference and row in case.table.rows_of(column)]
    places = [((row, column), (row, reference)) for column in columns]
    texts = (
        f"The accuracy of `{row}` changes by",
        f"In each setting, we compare the accuracy of `{row}` with its accuracy in the setting `{reference}`.",
    )
    return case.by_metrics(lambda metric: case.judged(texts, places, metric))


def _margin(case: _Case) -> Judgement:
    """Judge whether a published margin between two rows lies in our 95 % prediction interval for one more seed.

    If a paper leaves open what its number means, ``published`` contains several margins. If all margins lie outside the
    interval, the claim is contradicted. If all margins lie inside the interval, and the 95 % interval of our mean
    margin does not contain 0, the claim is confirmed. Otherwise, the claim is inconclusive.
    """
    ((mine, theirs),) = case.places()
    published = [float(margin) for margin in case.about["published"]]
    pair = f"the accuracy of `{mine[0]}` minus the accuracy of `{theirs[0]}`"
    margins = f"margin is {' or '.join(map(signed, published))} points ({pair})"
    margins = f"The paper leaves open whether its {margins}" if len(published) > 1 else f"The paper's {margins}"
    command = f"fedstrata reproduce {case.name}"

    def judge(metric: str) -> Judgement:
        difference = compared(*(over_seeds(case.cells, *place, metric) for place in (mine, theirs)))
        if (interval := predicted_margin(difference)) is None:
            return Judgement(case.claim, "not tested", "", command)
        low, high = interval
        inside = [low <= margin <= high for margin in published]
        verdict: Verdict = "inconclusive" if any(inside) else "contradicted"
        if all(inside) and difference.order() in ("above", "below"):
            verdict = "confirmed"
        one_more = f"The 95 % prediction interval for one more seed is [{signed(low)}, {signed(high)}], "
        one_more += f"which {'contains' if any(inside) else 'does not contain'} the paper's margin"
        text = f"Our mean margin is {difference_text(difference, 'points')}. {one_more}"
        decisive = [(Comparison(mine[1], theirs[0], difference, difference), difference)]
        return Judgement(case.claim, verdict, text, command, decisive=decisive)

    judgement = case.by_metrics(judge)
    return replace(judgement, evidence=". ".join(filter(None, (margins, judgement.evidence))))


def _gains(case: _Case) -> Judgement:
    """Judge whether a row's gain in accuracy over another row is larger in the first column than in the second."""
    more, less = case.columns
    text = f"The gain of `{case.row}` over {case.other} changes by"

    def judge(metric: str) -> Judgement:
        gains = []
        for column in (more, less):
            mine, theirs = (over_seeds(case.cells, row, column, metric) for row in (case.row, *case.others))
            gains.append({seed: mine[seed] - theirs[seed] for seed in mine.keys() & theirs.keys()})
        difference = compared(*gains)
        return case.judgement((text, text), [Comparison(more, less, difference, difference)])

    return case.by_metrics(judge)


MEASURES = {"train_loss": "training loss of the last 10 rounds", "diversity": "mean diversity Λ of the local models"}
"""Keys and descriptions of the results that are compared by their ratio."""


def _change(case: _Case) -> Judgement:
    """Judge whether a measure of a row (see ``MEASURES``) is lower, or higher, than the same measure of other rows."""

    def percent(mine: float | Curve, theirs: float | Curve) -> tuple[float, float]:
        a, b = (each if isinstance(each, float) else statistics.fmean(each[-10:]) for each in (mine, theirs))
        return 100 * a / b, 100.0

    metric, wanted = case.about["metric"], case.about["wanted"]
    texts = f"{case.instead}, the {MEASURES[metric]} changes by", f"We compare the {MEASURES[metric]} of {case.both}."
    return case.judged(texts, case.places(), metric, percent, wanted, "%")


COUNTED = {"bytes_up": "send", "bytes_down": "receive"}
"""Metrics that are compared without a statistical test, and the verb that says what clients do with the bytes."""


def _ratio(case: _Case) -> Judgement:
    """Judge whether the ratio of two rows' counts (see ``COUNTED``) is between ``least`` and ``most``."""
    metric = case.about["metric"]
    by_place = []
    for mine, theirs in case.places():
        baseline = over_seeds(case.cells, *theirs, metric)
        values = over_seeds(case.cells, *mine, metric).items()
        by_place.append([value / baseline[seed] for seed, value in values if baseline.get(seed)])
    ratios = [ratio for of_place in by_place for ratio in of_place]
    verdict: Verdict = "not tested"
    if ratios and all(by_place):
        most, least = case.about.get("most", max(ratios)), case.about.get("least", min(ratios))
        verdict = "confirmed" if least <= min(ratios) and max(ratios) <= most else "contradicted"
    text = "an unknown number of bytes, because no runs are finished"
    if ratios:
        mean = statistics.fmean(ratios)
        text = f"{mean:,.0f}" if mean >= 10 else f"{mean:.3f}"
        text += f" times as many bytes as with {case.other}"
        text += f" (the mean over {len(by_place)} settings)" if len(by_place) > 1 else ""
    measure = f"With `{case.row}`, clients {COUNTED[metric]}"
    return Judgement(case.claim, verdict, text, f"fedstrata reproduce {case.name}", measure)


def _sooner(case: _Case) -> Judgement:
    """Judge whether a row reaches an accuracy in fewer rounds than every other row.

    This accuracy is the lower of the two runs' best accuracies, because both runs reach it. The other run's best
    accuracy would not be a fair target, because a maximum of many noisy values is high by chance.
    """

    def rounds(curve: Curve, other: Curve) -> tuple[float, float]:
        goal = min(max(curve), max(other))
        mine, theirs = (1 + next(i for i, value in enumerate(each) if value >= goal) for each in (curve, other))
        return mine, theirs

    goal = "the same accuracy (the best accuracy of the weaker run)"
    texts = (
        "The target is the best accuracy of the weaker run, which both runs reach. "
        f"{case.instead}, the number of rounds to reach this target changes by",
        f"We compare how many rounds {case.both} need to reach {goal}.",
    )
    return case.judged(texts, case.places(), "curve", rounds, "below", "rounds")


def _steadier(case: _Case) -> Judgement:
    """Judge whether the accuracy's standard deviation over the last rounds is lower for a row than for other rows."""
    last = int(case.about["rounds"])

    def deviations(curve: Curve, other: Curve) -> tuple[float, float]:
        return statistics.stdev(curve[-last:]), statistics.stdev(other[-last:])

    texts = (
        f"{case.instead}, the standard deviation of the accuracy over the last {last} rounds changes by",
        f"For {case.both}, we compare the standard deviation of the accuracy over the last {last} rounds.",
    )
    return case.judged(texts, case.places(), "curve", deviations, "below")


TABLE_KINDS: Mapping[str, Callable[[_Case], Judgement]] = {
    "above": _above,
    "near": _near,
    "margin": _margin,
    "gains": _gains,
    "change": _change,
    "ratio": _ratio,
    "sooner": _sooner,
    "steadier": _steadier,
}
"""A mapping from each kind of claim about a table to the function that judges claims of this kind."""

KINDS = (*TABLE_KINDS, "reading", "page", "untestable")
"""All kinds of claims.

A ``reading`` claim is judged by a number that follows from a paper's formulas or algorithms, without training. A
``page`` claim is judged by results on another page of the documentation. An ``untestable`` claim cannot be judged by
any experiment, or at least not with our data and hardware.
"""
