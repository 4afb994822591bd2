"""Recommend methods to compare for a spec, with reasons and limits, and list the methods that cannot run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from fedstrata.base.errors import DataError, SpecError
from fedstrata.evaluation.summary import percent
from fedstrata.methods.base import METHODS
from fedstrata.methods.recipe import Recipe
from fedstrata.papers.comparing import difference_text
from fedstrata.papers.recommend.columns import BASELINE, CLEAR, FILE, Board, Column, by_distance
from fedstrata.papers.recommend.properties import SHOWN, Properties, measure
from fedstrata.papers.recommend.rounds import sampler_of
from fedstrata.papers.recommend.rules import RULES
from fedstrata.reporting.statistics import Difference
from fedstrata.runs.preparation import Prepared, check_method, prepare
from fedstrata.spec.experiment import Experiment

MOST = len(RULES)
"""Maximum number of recommended methods in addition to FedAvg. If no method is ``ahead``, all rules have a place."""


@dataclass(frozen=True)
class Reason:
    """A reason to include a method in a comparison.

    Args:
        text: One or more sentences that state the reason.
        source: The page, paper or column of the board that supports the reason.
        property: Name of the measured property; empty if the reason comes from the board's results.
        value: Value of the property, or difference from FedAvg in percentage points.
        interval: 95 % interval of the difference; None if the interval is unknown.
        n: Number of seeds; None if the reason is based on a property.
    """

    text: str
    source: str
    property: str = ""
    value: float | None = None
    interval: tuple[float, float] | None = None
    n: int | None = None


@dataclass(frozen=True)
class Advice:
    """The recommended methods for a spec, with reasons.

    Args:
        properties: Measured properties of the spec.
        columns: Columns of the board, in ascending order of their distance from the spec.
        methods: A mapping from each recommended method to the reasons to include it in a comparison.
        ahead: Number of methods that are significantly better than FedAvg in a column similar to the spec. These
            methods come first in ``methods``.
        behind: Methods that are significantly worse than FedAvg in a similar column, as a mapping from each method to
            its result. These methods are not recommended.
        refused: Methods that cannot run with this spec, as a mapping from each method to the error message.
        limits: Sentences about the limits of the recommendation.
    """

    properties: Properties
    columns: Sequence[Column]
    methods: Mapping[str, Sequence[Reason]]
    ahead: int
    behind: Mapping[str, Reason]
    refused: Mapping[str, str]
    limits: Sequence[str] = field(default_factory=list)

    @property
    def compared(self) -> list[str]:
        """The methods that a comparison should include, with FedAvg first."""
        return [*([] if BASELINE in self.refused else [BASELINE]), *self.methods]

    def to_json(self) -> dict[str, Any]:
        """Return the recommendation as a dict of JSON values."""
        return {
            "properties": asdict(self.properties),
            "columns": [
                {
                    "column": each.name,
                    "distance": each.distance,
                    "differs": each.clear,
                    "properties": asdict(each.properties),
                }
                for each in self.columns
            ],
            "methods": [
                {"method": name, "ahead": place < self.ahead, "reasons": [asdict(reason) for reason in reasons]}
                for place, (name, reasons) in enumerate(self.methods.items())
            ],
            "behind": {name: asdict(reason) for name, reason in self.behind.items()},
            "refused": dict(self.refused),
            "limits": list(self.limits),
        }


def recommend(spec: Experiment, file: Path = FILE) -> Advice:
    """Measure the properties of a spec, and recommend methods to compare.

    Args:
        spec: The experiment. Its method affects only how clients are invited in the simulation; see ``sampler_of``.
        file: Path of the file with the board's results.

    Raises:
        SpecError: A setting of the spec is wrong.
        DataError: The data set of the spec is missing.
    """
    prepared = prepare(spec)
    measured, board, limits = measure(prepared), Board.read(file), simplifications(prepared)
    columns: list[Column] = []
    if board is not None:
        try:
            columns = by_distance(board, measured)
        except (DataError, SpecError) as error:
            limits = [f"The properties of the board's columns cannot be measured: {error}", *limits]
    advice = advise(measured, columns, refused(prepared))
    return replace(advice, limits=[*known(board, columns, advice.ahead), *limits])


def refused(prepared: Prepared) -> dict[str, str]:
    """Find the methods that cannot run with a spec. Return a mapping from each such method to the error message."""
    problems: dict[str, str] = {}
    for name in METHODS:
        try:
            spec = prepared.spec if prepared.spec.method.name == name else prepared.spec.replace(method=name)
            check_method(spec, prepared.config, prepared.data, prepared.held)
        except SpecError as error:
            problems[name] = error.problem if error.value == name else str(error)
    return problems


def advise(measured: Properties, columns: Sequence[Column], refused: Mapping[str, str]) -> Advice:
    """Choose the methods to compare, with reasons.

    Methods that are significantly better than FedAvg in the nearest column come first, and significantly worse methods
    are left out. A column that is not similar to the spec (see ``Column.alike``) does not affect the choice. Then
    come the methods of ``RULES``: the first method of each rule, then the second method of each rule, and so on.

    Args:
        measured: Measured properties of the spec.
        columns: Columns of the board, in ascending order of their distance from the spec.
        refused: Methods that cannot run with the spec, as a mapping from each method to the error message.
    """
    results = {
        name: each
        for column in columns[:1]
        for name, each in column.differences.items()
        if name in METHODS and name not in refused and each.mean is not None
    }
    evidence = {name: _result(each, columns[0]) for name, each in results.items()}
    orders = {name: each.order() for name, each in results.items()} if columns and columns[0].alike else {}
    ahead = [name for name, order in orders.items() if order == "above"]
    ahead.sort(key=lambda name: -(results[name].mean or 0.0))
    behind = {name: evidence[name] for name, order in orders.items() if order == "below"}
    reasons = _reasons(measured)
    chosen = [name for name in dict.fromkeys([*ahead, *reasons]) if name not in refused and name not in behind][:MOST]
    methods = {name: [*([evidence[name]] if name in evidence else []), *reasons.get(name, [])] for name in chosen}
    return Advice(measured, columns, methods, len(ahead[:MOST]), behind, refused)


def _reasons(measured: Properties) -> dict[str, list[Reason]]:
    """Return the reasons that the rules give for each method. The first method of each rule comes before all others."""
    holding = [rule for rule in RULES if rule.holds(measured)]
    order = [name for names in zip_longest(*(rule.methods for rule in holding)) for name in names if name is not None]
    reasons: dict[str, list[Reason]] = {name: [] for name in order}
    for rule in holding:
        value, (label, _, unit) = float(getattr(measured, rule.key)), SHOWN[rule.key]
        text = f"The property {label!r} is {shown(value, unit)} (rule: at least {shown(rule.least, unit)})."
        for name, claim in rule.methods.items():
            reasons[name].append(Reason(f"{text} {claim.text}", claim.source, rule.key, value))
    return reasons


def _result(difference: Difference, column: Column) -> Reason:
    """Express a method's result on the board as a reason."""
    n, order = difference.n, difference.order()
    verdicts = {
        "not significant": " The difference is not significant.",
        "too few seeds": " There are too few seeds to judge this difference.",
    }
    seeds = "" if difference.interval is None else f", with {n} seeds"
    change = f"{difference_text(difference, 'points')}{seeds}."
    text = f"With this method instead of FedAvg, the accuracy in the nearest column of the board changes by {change}"
    text += verdicts.get(order, "")
    return Reason(text, f"board, {column.name}", "", difference.mean, difference.interval, n)


def known(board: Board | None, columns: Sequence[Column], ahead: int) -> list[str]:
    """Return sentences about the limits of the recommendation, such as the small number of results.

    Args:
        board: Results of the board; None if there are no results.
        columns: Measured columns of the board, with the nearest column first.
        ahead: Number of methods that are significantly better than FedAvg in the nearest column.
    """
    ranking = "The order of the methods is not a ranking."
    convention = "The limits at which a property becomes a reason are conventions, not results of experiments."
    if board is None:
        source = "Results of the board do not exist. All reasons come from measured properties and cited sources."
        return [source, ranking, convention]
    cells = [cell for column in board.columns.values() for cell in column["methods"].values()]
    seeds = sorted({len(cell["seeds"]) for cell in cells})
    sets = sorted({spec.data.name for spec in board.specs().values()})
    span = " to ".join(map(str, dict.fromkeys([seeds[0], seeds[-1]]))) if seeds else "0"
    size = f"{counted(len(board.columns), 'column')} on {counted(len(sets), 'data set')} ({', '.join(sets)})"
    sentences = [f"The board has {size}, with {span} seeds per method."]
    if columns and columns[0].alike:
        first = (
            "none of the methods" if not ahead else "the first method" if ahead == 1 else f"the first {ahead} methods"
        )
        verb = "are" if ahead > 1 else "is"
        sentences.append(f"In the column {columns[0].name}, {first} {verb} significantly more accurate than FedAvg.")
    elif columns:
        number = counted(len(columns[0].clear), "property", "properties")
        differs = f"differs from your spec by more than {CLEAR:.2f} in {number}"
        unused = "The results of this column therefore do not decide which methods come first."
        sentences.append(f"The nearest column, {columns[0].name}, {differs}. {unused}")
    return [*sentences, ranking, convention]


def simplifications(prepared: Prepared) -> list[str]:
    """Return sentences about parts of the spec that were ignored when its properties were measured."""
    spec, sampler = prepared.spec, sampler_of(prepared)
    sentences = []
    if spec.availability.deadline is not None:
        sentences.append(
            "The simulation ignores availability.deadline. In a run, more clients may therefore be absent."
        )
    own = spec.method.client_sampler if isinstance(spec.method, Recipe) else None
    if own is not sampler:
        method = spec.method.name
        sentences.append(f"Which clients {method} invites depends on training. The simulation invites random clients.")
    if not prepared.data.task.has_classes:
        task = prepared.data.task.name
        sentences.append(f"The task {task!r} does not have classes, so properties of classes are unknown.")
    return sentences


def counted(number: int, noun: str, plural: str = "") -> str:
    """Format a number and its noun, in the singular or plural.

    >>> counted(1, "column"), counted(2, "column"), counted(2, "property", "properties")
    ('1 column', '2 columns', '2 properties')
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def shown(value: float | None, unit: str) -> str:
    """Format the value of a property as text.

    >>> shown(None, "share"), shown(0.125, "share"), shown(0.125, "index")
    ('unknown', '12 %', '0.12')
    >>> shown(2000.0, "number"), shown(3.4, "number")
    ('2,000', '3.4')
    """
    if value is None:
        return "unknown"
    if unit == "share":
        return percent(value, 0)
    return f"{value:.2f}" if unit == "index" else f"{value:,.0f}" if float(value).is_integer() else f"{value:.1f}"
