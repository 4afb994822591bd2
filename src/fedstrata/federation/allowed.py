"""The list of requests that a job may send to its clients.

Each method, sampler and evaluation declares its requests next to the code that sends them. A site answers only the
requests on the list (``fedstrata.sites.guard``). The command ``fedstrata asks`` prints the list.
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
    """The fields of a ``FederationConfig`` that are known from the spec, before any data are loaded.

    Args:
        training: The settings of local training.
        clients: Number of clients, N.
        strata: Number of strata (groups of samples, such as classes); None if the number is not known.
    """

    training: Training
    clients: int
    strata: int | None = None


Agreed = FederationConfig | Terms
"""The settings that determine the list of requests: a ``FederationConfig``, or ``Terms`` before data are loaded."""


@dataclass(frozen=True)
class Bound:
    """A condition on the value of a request's field, for fields with several accepted values.

    Args:
        description: The accepted values in words, such as ``"from 0 to 1"``.
        holds: A function that takes a value and the round, and returns True if the value is accepted in this round.
    """

    description: str
    holds: Callable[[Any, int], bool] = field(compare=False)

    def __str__(self) -> str:
        return self.description


SHARE = Bound("more than 0, at most 1", lambda value, round: 0 < value <= 1)


def by_round(description: str, value: Callable[[int], Any]) -> Bound:
    """Return a condition that accepts exactly one value of a field in each round.

    Args:
        description: The accepted values in words.
        value: A function that takes a round and returns the value that is accepted in this round.
    """
    return Bound(description, lambda given, round: bool(given == value(round)))


@dataclass(frozen=True)
class SampleLimit:
    """The maximum number of samples that a client uses for one reply, even if the client has more samples.

    Args:
        samples: The maximum number of samples.
        reason: The reason for the limit, as the end of a sentence that begins with "the reply", for example "uses at
            most 32 samples".
    """

    samples: int
    reason: str


@dataclass(frozen=True)
class Allowed:
    """A request that a job may send to each of its clients.

    Args:
        request: The Python class of the request; subclasses are not included.
        where: A mapping from names of the request's fields to accepted values. Use a ``Bound`` for a field with several
            accepted values. Fields that are not in the mapping may have any value.
        times: Maximum number of times that a client answers the request. With None, only the request's ``Order`` or the
            client's data limit how often a client answers.
        per: Whether ``times`` applies to each phase of a round, or to the whole run.
        rounds: The rounds in which the server may send the request: a range, or a function that returns True for these
            rounds. Default: every round.
        limit: The maximum number of samples that a client uses for a reply. Default: all samples of the client.
        rule: The ``RequestRule`` of the request, adapted to the spec. Default: the rule of the request's Python class.
        inside: If this request is an envelope around another request: the ``Allowed`` entry of the other request.
        single: Whether the server may read individual replies even with secure sums, because no reply contains an
            update.

    Raises:
        TypeError: The Python class of the request has no ``RequestRule``.
    """

    request: type[Request]
    where: Mapping[str, Any] = field(default_factory=dict)
    times: int | None = 1
    per: Literal["phase", "run"] = "phase"
    rounds: range | Callable[[int], bool] | None = None
    limit: SampleLimit | None = None
    rule: RequestRule = None  # type: ignore[assignment]  # None: the rule of the request's class
    inside: Allowed | None = None
    single: bool = False

    def __post_init__(self) -> None:
        rule = self.rule or getattr(self.request, "rule", None)
        if rule is None:
            name = self.request.__name__
            raise TypeError(f"{name}.rule is not set. Set it to a RequestRule, which describes the reply to {name}.")
        object.__setattr__(self, "rule", rule)

    @property
    def label(self) -> str:
        """The name of the request in error messages."""
        return f"{self.request.__name__} of {self.inside.label}" if self.inside else self.request.__name__

    @property
    def innermost(self) -> Allowed:
        """The entry of the innermost request; this entry itself if its request does not contain another request."""
        return self if self.inside is None else self.inside.innermost

    def wrong(self, request: Request, round: int) -> str:
        """Return a description of the first field with a wrong value; an empty string if all values are accepted."""
        for name, accepted in self.where.items():
            value = getattr(request, name)
            if not (accepted.holds(value, round) if isinstance(accepted, Bound) else value == accepted):
                return f"{self.request.__name__}.{name} = {_short(value)} does not match the declaration ({accepted})"
        if self.inside is not None:
            return self.inside.wrong(request.request, round)  # type: ignore[attr-defined]
        return ""

    def limit_below(self, privacy: Privacy) -> SampleLimit | None:
        """Return the sample limit of this request if the limit is too small for any client to reply; otherwise None.

        If the limit is below ``privacy.min_samples``, no client may reply, unless the request lets clients move the
        samples of a small batch to a later batch.
        """
        few = self.limit is not None and self.limit.samples < privacy.min_samples
        return self.limit if few and not (self.rule.merges and privacy.gathers) else None

    def comes_in(self, round: int) -> bool:
        """Return True if the server may send the request in a round."""
        if self.rounds is None:
            return True
        return round in self.rounds if isinstance(self.rounds, range) else self.rounds(round)

    def includes(self, request: Request) -> bool:
        """Return True if the Python classes of a request, and of its inner request (if any), match this entry."""
        if type(request) is not self.request:
            return False
        return self.inside is None or self.inside.includes(getattr(request, "request", None))  # type: ignore[arg-type]

    def table(self) -> dict[str, Any]:
        """Return the entry as a dict that can be serialised to JSON."""
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
    """Return the maximum total number of samples in an update's local steps; None if clients train for epochs."""
    training = agreed.training
    if training.local_steps is None:
        return None
    samples = training.local_steps * training.samples_per_step
    product = f"training.local_steps × training.batch_size = {training.local_steps} × {training.batch_size}"
    if training.accumulate > 1:
        product = product.replace(" = ", " × training.accumulate = ") + f" × {training.accumulate}"
    return SampleLimit(samples, f"uses at most {product} = {samples} sample{'s' * (samples > 1)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def joined(*parts: list[Allowed] | None) -> list[Allowed] | None:
    """Concatenate the lists. Return None if any list is None, because some requests are then unknown."""
    lists = [part for part in parts if part is not None]
    return [allowed for part in lists for allowed in part] if len(lists) == len(parts) else None


def declares(cls: type, declaration: str, *hooks: str) -> bool:
    """Return True if a Python class declares all requests that it sends.

    An inherited declaration is ignored if the class overrides a method that sends requests.

    Args:
        cls: The Python class.
        declaration: Name of the attribute or method that declares the requests.
        hooks: Names of the methods that send requests.
    """
    for base in cls.__mro__:
        if declaration in vars(base):
            return True
        if any(hook in vars(base) for hook in hooks):
            return False
    return False
