"""What a job asks its clients, declared beside the code that asks: which requests, when, how often, within what bounds.

A site answers what its job declares and nothing else (``fedstrata.sites.guard``), and ``fedstrata asks`` prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from fedstrata.federation.messages import ModelRequest, Request
from fedstrata.federation.settings import Privacy, Training

Phase = Literal["enrolment", "round", "evaluation"]
"""Before the first round; in a round; after it, to measure a model."""
PHASES: tuple[Phase, ...] = ("enrolment", "round", "evaluation")

Fact = Literal["labels", "sizes"]
"""What an answer may tell in the clear: which labels a client holds, and how many samples."""


class Agreed(Protocol):
    """What declarations depend on: a ``FederationConfig``, or a ``Terms`` before anything is loaded."""

    @property
    def training(self) -> Training:
        """How clients train."""

    @property
    def clients(self) -> int:
        """N."""

    @property
    def classes(self) -> int | None:
        """C; None while it is not known."""


@dataclass(frozen=True)
class Terms:
    """What was agreed, as far as a spec alone tells it; see ``Agreed``."""

    training: Training
    clients: int
    classes: int | None = None


class Rule:
    """What one client may be asked depends on what it was asked before in the same phase.

    One is made for each client and phase; questions that name the same class share it.
    """

    def refusal(self, request: Any) -> str:
        """Why a request may not be answered now; empty where it may."""
        return ""

    def asked(self, request: Any) -> None:
        """It is about to be answered."""

    def answered(self, request: Any, reply: Any) -> None:
        """It was answered so."""


@dataclass(frozen=True)
class Bound:
    """What the value of a field may be, where it is not one value.

    Args:
        description: In words, such as ``"from 0 to 1"``.
        holds: Whether a value will do in a round.
    """

    description: str
    holds: Callable[[Any, int], bool] = field(compare=False)

    def __str__(self) -> str:
        return self.description


SHARE = Bound("more than 0, at most 1", lambda value, round: 0 < value <= 1)


def by_round(description: str, value: Callable[[int], Any]) -> Bound:
    """A value for each round.

    Args:
        description: In words.
        value: The value of a round.
    """
    return Bound(description, lambda found, round: bool(found == value(round)))


@dataclass(frozen=True)
class RequestRule:
    """A request that a job may put to each of its clients.

    Args:
        kind: The request; subclasses of it are other questions.
        description: What leaves the site with the answer: the rest of a sentence that begins with "It sends".
        phase: When.
        times: How often at most; None where a rule, or what the client holds, sets the limit.
        per: Whether ``times`` is of each phase (each round) or of the whole run.
        where: What some of its fields must be: a value, or a ``Bound``.
        first: The first round in which it may come.
        last: The last one; None for the last of the run.
        due: Whether it may come in a round, where it does not in every one.
        rule: What the order of questions must be; see ``Rule``.
        relay: Whether it comes with a travelling model.
        together: Whether clients may answer as a group, whose sums over a batch the server forms. The very same
            question may then come again: a group that breaks begins anew.
        forms: As what the very same may come again, the way it came first; the request itself unless given.
        most: Of how many samples an answer is at most by design, however many a client has; None for all of them.
        because: Why, in words that follow the question's name.
        merges: Whether answers of fewer samples than ``privacy.min_samples`` become one where that holds them back.
        discloses: What the answer says in the clear.
        epsilon: ε of local differential privacy that an answer costs; None for none.
        inside: The question that it carries, where it is an envelope for one.
        after: The name of a question before the first round without whose answer it means something else, and so may
            not come; empty for none.
    """

    kind: type[Request]
    description: str
    phase: Phase = "round"
    times: int | None = 1
    per: Literal["phase", "run"] = "phase"
    where: Mapping[str, Any] = field(default_factory=dict, hash=False)
    first: int = 1
    last: int | None = None
    due: Callable[[int], bool] | None = field(default=None, compare=False)
    rule: type[Rule] | None = None
    relay: bool = False
    together: bool = False
    forms: Callable[[Any], Sequence[Request]] | None = field(default=None, compare=False)
    most: int | None = None
    because: str = ""
    merges: bool = False
    discloses: frozenset[Fact] = frozenset()
    epsilon: float | None = None
    inside: RequestRule | None = None
    after: str = ""

    @property
    def label(self) -> str:
        """What messages call it."""
        return f"{self.kind.__name__} of {self.inside.label}" if self.inside else self.kind.__name__

    def wrong(self, request: Request, round: int) -> str:
        """The first field of a request that is not what was agreed, in words; empty where all are."""
        for name, agreed in self.where.items():
            value = getattr(request, name)
            if not (agreed.holds(value, round) if isinstance(agreed, Bound) else value == agreed):
                return f"{self.kind.__name__}.{name} = {_short(value)}; accepted: {agreed}"
        if self.inside is not None:
            return self.inside.wrong(request.request, round)  # type: ignore[attr-defined]
        return ""

    def withheld(self, privacy: Privacy) -> str:
        """Why no client would ever answer it under such a minimum, in words; empty where some may."""
        if self.most is None or self.most >= privacy.min_samples or (self.merges and privacy.gathers):
            return ""
        return f"{self.label} {self.because}"

    def comes_in(self, round: int) -> bool:
        """Whether it may be put in a round."""
        there = self.first <= round <= (round if self.last is None else self.last)
        return there and (self.due is None or self.due(round))

    def is_of(self, request: Request) -> bool:
        """Whether a request is this question, whatever its fields."""
        if type(request) is not self.kind:
            return False
        return self.inside is None or self.inside.is_of(getattr(request, "request", None))  # type: ignore[arg-type]

    def table(self) -> dict[str, Any]:
        """As JSON holds it."""
        table: dict[str, Any] = {
            "request": self.label,
            "sends": self.description,
            "phase": self.phase,
            "times": self.times,
        }
        if self.per == "run":
            table["per"] = "run"
        where = dict(self.where) | (dict(self.inside.where) if self.inside else {})
        if where:
            table["where"] = {key: str(v) if isinstance(v, Bound) else v for key, v in where.items()}
        if self.first > 1 or self.last is not None:
            table["rounds"] = [self.first, self.last]
        for key in ("relay", "together"):
            if getattr(self, key):
                table[key] = True
        if self.most is not None and not self.merges:
            table["samples"] = self.most
        return table | ({"discloses": sorted(self.discloses)} if self.discloses else {})


def seen(agreed: Agreed) -> dict[str, Any]:
    """Of how many samples an update is at most: what a ``RequestRule`` says of it where local training takes steps."""
    training = agreed.training
    if training.local_steps is None:
        return {}
    most = training.local_steps * training.batch_size
    product = f"training.local_steps × training.batch_size = {training.local_steps} × {training.batch_size}"
    return {"most": most, "because": f"sees {product} = {most} sample{'s' * (most > 1)} at most"}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


Questions = tuple[RequestRule, ...]


def joined(*parts: Iterable[RequestRule] | None) -> Questions | None:
    """All questions of some parts; None where one of them does not declare any."""
    found: list[RequestRule] = []
    for part in parts:
        if part is None:
            return None
        found += part
    return tuple(found)


def asks_no_more(cls: type, declares: str, *others: str) -> bool:
    """Whether a class declares its questions where it was last changed what it asks.

    A subclass that overrides ``others`` below ``declares`` asks what nobody declared.

    Args:
        cls: The class.
        declares: The attribute that holds the declaration.
        others: The attributes that decide what is asked.
    """
    for base in cls.__mro__:
        if declares in vars(base):
            return True
        if any(other in vars(base) for other in others):
            return False
    return False


def about_models(questions: Iterable[RequestRule]) -> list[RequestRule]:
    """Those whose model, or the change that is answered, may travel encoded."""
    return [question for question in questions if issubclass(question.kind, ModelRequest)]
