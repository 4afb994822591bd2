"""What a job may ask its clients, listed beside the code that asks.

A site answers the requests that its job lists and no others (``fedstrata.sites.guard``). ``fedstrata asks`` prints the
list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import Request, RequestRule
from fedstrata.federation.settings import Privacy, Training


@dataclass(frozen=True)
class Terms:
    """The part of a ``FederationConfig`` that a spec contains.

    Args:
        training: How clients train.
        clients: N.
        classes: C; None if it is not known.
    """

    training: Training
    clients: int
    classes: int | None = None


Agreed = FederationConfig | Terms
"""What the lists depend on: known exactly once the data are loaded, and by its terms before."""


@dataclass(frozen=True)
class Bound:
    """The accepted values of a field that may have more than one value.

    Args:
        description: The values in words, such as ``"from 0 to 1"``.
        holds: Whether a value is accepted in a round.
    """

    description: str
    holds: Callable[[Any, int], bool] = field(compare=False)

    def __str__(self) -> str:
        return self.description


SHARE = Bound("more than 0, at most 1", lambda value, round: 0 < value <= 1)


def by_round(description: str, value: Callable[[int], Any]) -> Bound:
    """Return the bound of a field that has one value per round.

    Args:
        description: The values in words.
        value: The value of a round.
    """
    return Bound(description, lambda given, round: bool(given == value(round)))


@dataclass(frozen=True)
class SampleLimit:
    """The number of samples that a reply is computed from at most, however many a client has.

    Args:
        samples: The number.
        reason: Why, in words that follow the name of the request.
    """

    samples: int
    reason: str


@dataclass(frozen=True)
class Allowed:
    """A request that a job may put to each of its clients.

    Args:
        request: The class; its subclasses are not included.
        where: What fields of the request must be: a value, or a ``Bound``.
        times: How often the request may come; None if its order, or what the client holds, is the limit.
        per: Whether ``times`` is per phase (so per round) or per run.
        rounds: The rounds in which the request may come, as a range or as a test; every round by default.
        limit: The number of samples behind a reply at most; all samples of the client by default.
        rule: The rule of the class, or a copy of it with what depends on the spec.
        inside: The request that this one carries, if it is an envelope.

    Raises:
        TypeError: The class of the request has no rule.
    """

    request: type[Request]
    where: Mapping[str, Any] = field(default_factory=dict)
    times: int | None = 1
    per: Literal["phase", "run"] = "phase"
    rounds: range | Callable[[int], bool] | None = None
    limit: SampleLimit | None = None
    rule: RequestRule = None  # type: ignore[assignment]  # the rule of the class
    inside: Allowed | None = None

    def __post_init__(self) -> None:
        rule = self.rule or getattr(self.request, "rule", None)
        if rule is None:
            name = self.request.__name__
            raise TypeError(
                f"{name}.rule is not set. Set it to a RequestRule, which says what the reply to {name} sends."
            )
        object.__setattr__(self, "rule", rule)

    @property
    def label(self) -> str:
        """The name of the request in messages."""
        return f"{self.request.__name__} of {self.inside.label}" if self.inside else self.request.__name__

    def wrong(self, request: Request, round: int) -> str:
        """Return in words the first field of a request that is not accepted; empty if all are."""
        for name, accepted in self.where.items():
            value = getattr(request, name)
            if not (accepted.holds(value, round) if isinstance(accepted, Bound) else value == accepted):
                return f"{self.request.__name__}.{name} = {_short(value)}; accepted: {accepted}"
        if self.inside is not None:
            return self.inside.wrong(request.request, round)  # type: ignore[attr-defined]
        return ""

    def limit_below(self, privacy: Privacy) -> SampleLimit | None:
        """Return the limit that keeps all clients from answering with such a minimum of samples; None if some may."""
        few = self.limit is not None and self.limit.samples < privacy.min_samples
        return self.limit if few and not (self.rule.merges and privacy.gathers) else None

    def comes_in(self, round: int) -> bool:
        """Return True if the request may come in a round."""
        if self.rounds is None:
            return True
        return round in self.rounds if isinstance(self.rounds, range) else self.rounds(round)

    def includes(self, request: Request) -> bool:
        """Return True if this is the entry of a request, whatever the request's fields."""
        if type(request) is not self.request:
            return False
        return self.inside is None or self.inside.includes(getattr(request, "request", None))  # type: ignore[arg-type]

    def table(self) -> dict[str, Any]:
        """Return the entry as JSON holds it."""
        rule = self.rule
        table = dict[str, Any](request=self.label, sends=rule.description, phase=rule.phase, times=self.times)
        if self.per == "run":
            table["per"] = "run"
        where = dict(self.where) | (dict(self.inside.where) if self.inside else {})
        if where:
            table["where"] = {key: str(v) if isinstance(v, Bound) else v for key, v in where.items()}
        if isinstance(self.rounds, range):
            table["rounds"] = [self.rounds.start, self.rounds.stop - 1]
        for key in ("relay", "together"):
            if getattr(rule, key):
                table[key] = True
        if self.limit is not None and not rule.merges:
            table["samples"] = self.limit.samples
        return table | ({"discloses": sorted(rule.discloses)} if rule.discloses else {})


def step_limit(agreed: Agreed) -> SampleLimit | None:
    """Return the limit of an update by local steps; None if clients train epochs."""
    training = agreed.training
    if training.local_steps is None:
        return None
    samples = training.local_steps * training.batch_size
    product = f"training.local_steps × training.batch_size = {training.local_steps} × {training.batch_size}"
    return SampleLimit(samples, f"sees {product} = {samples} sample{'s' * (samples > 1)} at most")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def joined(*parts: list[Allowed] | None) -> list[Allowed] | None:
    """Return the lists of all parts as one; None if a part does not list its requests."""
    lists = [part for part in parts if part is not None]
    return [allowed for part in lists for allowed in part] if len(lists) == len(parts) else None


def declares(cls: type, declaration: str, *hooks: str) -> bool:
    """Return True if a class declares its requests at least where it last overrides a hook.

    A subclass that overrides a hook below the declaration may ask what is not declared.

    Args:
        cls: The class.
        declaration: The attribute that holds the declaration.
        hooks: The attributes that decide what is asked.
    """
    for base in cls.__mro__:
        if declaration in vars(base):
            return True
        if any(hook in vars(base) for hook in hooks):
            return False
    return False
