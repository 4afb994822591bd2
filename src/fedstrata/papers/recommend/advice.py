"""Advise on methods: which methods to compare and why, which methods cannot run, and the limits of the advice."""

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

MOST = 5
"""The largest number of methods that are advised in addition to FedAvg."""


@dataclass(frozen=True)
class Reason:
    """A reason to compare a method.

    Args:
        text: The reason, as sentences.
        source: The page, paper or column of the board that supports the reason.
        property: The measured property; empty for a result of the board.
        value: The value of the property, or the difference from FedAvg in percentage points.
        interval: The 95 % interval of the difference; None if the interval is unknown.
        n: The number of seeds; None for a property.
    """

    text: str
    source: str
    property: str = ""
    value: float | None = None
    interval: tuple[float, float] | None = None
    n: int | None = None


@dataclass(frozen=True)
class Advice:
    """The advice for a spec.

    Args:
        properties: The measured properties of the spec.
        columns: The columns of the board, beginning with the nearest column.
        methods: The reasons for each advised method.
        ahead: The number of methods that are ahead of FedAvg in a similar column. These methods come first in
            ``methods``.
        behind: The methods that are not advised because they are behind FedAvg in the nearest column, with reasons.
        refused: A mapping from each method that cannot run with this spec to the error.
        limits: Sentences about the limits of the advice.
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
        """The methods that a comparison should include, beginning with FedAvg."""
        return [*([] if BASELINE in self.refused else [BASELINE]), *self.methods]

    def to_json(self) -> dict[str, Any]:
        """Return all facts of the advice as JSON values for programs."""
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
    """Measure a spec, and advise which methods to compare.

    Args:
        spec: The experiment. The spec's method determines only how clients are invited; see ``sampler_of``.
        file: The results of the board.

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
            limits = [f"The columns of the board cannot be measured: {error}", *limits]
    advice = advise(measured, columns, refused(prepared))
    return replace(advice, limits=[*known(board, columns, advice.ahead), *limits])


def refused(prepared: Prepared) -> dict[str, str]:
    """Return the methods that cannot run with a spec, each with the error."""
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

    If the nearest column is similar (``Column.alike``), its methods ahead of FedAvg come first, and its methods behind
    FedAvg are left out. Methods that the rules name come next. Each rule adds its first method before any rule adds its
    second method.

    Args:
        measured: The measured properties of the spec.
        columns: The columns of the board, beginning with the nearest column.
        refused: The methods that cannot run with the spec, with the errors.
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
    """Return the reasons that the rules give, by method: the first methods of all rules, then the second methods."""
    holding = [rule for rule in RULES if rule.holds(measured)]
    order = [name for names in zip_longest(*(rule.methods for rule in holding)) for name in names if name is not None]
    reasons: dict[str, list[Reason]] = {name: [] for name in order}
    for rule in holding:
        value, (label, _, unit) = float(getattr(measured, rule.key)), SHOWN[rule.key]
        text = f"The property {label!r} is {shown(value, unit)}, at least {shown(rule.least, unit)}."
        for name, claim in rule.methods.items():
            reasons[name].append(Reason(f"{text} {claim.text}", claim.source, rule.key, value))
    return reasons


def _result(difference: Difference, column: Column) -> Reason:
    """Return a result of the board as a reason."""
    n, order = difference.n, difference.order()
    verdicts = {
        "not significant": " The difference is not significant.",
        "too few seeds": " Too few seeds to show an order.",
    }
    seeds = "" if difference.interval is None else f", {n} seeds"
    text = f"Accuracy minus the accuracy of FedAvg in the nearest column: {difference_text(difference)} points{seeds}."
    text += verdicts.get(order, "")
    return Reason(text, f"board, {column.name}", "", difference.mean, difference.interval, n)


def known(board: Board | None, columns: Sequence[Column], ahead: int) -> list[str]:
    """Return sentences about the small number of results on which the advice is based.

    Args:
        board: The results of the board; None if the board has no results.
        columns: The measured columns, beginning with the nearest column.
        ahead: The number of methods that are ahead of FedAvg in the nearest column.
    """
    ranking = "The order of the methods is not a ranking."
    convention = "The limits from which a property counts as a reason are conventions, not results."
    if board is None:
        source = "No results of the board exist. All reasons come from measured properties and the cited sources."
        return [source, ranking, convention]
    cells = [cell for column in board.columns.values() for cell in column["methods"].values()]
    seeds = sorted({len(cell["seeds"]) for cell in cells})
    sets = sorted({spec.data.name for spec in board.specs().values()})
    span = " to ".join(map(str, dict.fromkeys([seeds[0], seeds[-1]]))) if seeds else "0"
    size = f"{counted(len(board.columns), 'column')} on {counted(len(sets), 'data set')} ({', '.join(sets)})"
    sentences = [f"The board has {size}, with {span} seeds per method."]
    if columns and columns[0].alike:
        first = "no method" if not ahead else "the first method" if ahead == 1 else f"the first {ahead} methods"
        verb = "are" if ahead > 1 else "is"
        sentences.append(f"In the column {columns[0].name}, {first} {verb} shown to be ahead of FedAvg.")
    elif columns:
        differs = f"differs by more than {CLEAR:.2f} in {counted(len(columns[0].clear), 'property', 'properties')}"
        unused = "Its results therefore do not decide which methods come first."
        sentences.append(f"The nearest column, {columns[0].name}, {differs}. {unused}")
    return [*sentences, ranking, convention]


def simplifications(prepared: Prepared) -> list[str]:
    """Return sentences about everything that the measurement leaves out."""
    spec, sampler = prepared.spec, sampler_of(prepared)
    sentences = []
    if spec.availability.deadline is not None:
        sentences.append("The simulation ignores availability.deadline, so more clients can be absent.")
    own = spec.method.client_sampler if isinstance(spec.method, Recipe) else None
    if own is not sampler:
        sentences.append(f"Invitations of {spec.method.name} depend on training. The simulation invites at random.")
    if not prepared.data.task.has_classes:
        sentences.append(f"The task {prepared.data.task.name!r} has no classes, so properties of classes are unknown.")
    return sentences


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun.

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
