"""Settings that validate themselves, and registries that find them by name.

Whatever a spec can name (a method, a partition, a model of availability, a sampler …) is a frozen pydantic model: its
fields are its settings, and what it does are its methods. ``Registry`` turns ``{"name": "dirichlet", "alpha": 0.1}``
into one, imports it only then, and takes ``"module:Class"`` for the user's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import CoreSchema

from fedstrata.base.errors import SpecError, nearest
from fedstrata.base.loading import import_object, load_object

T = TypeVar("T", bound="Setting")
R = TypeVar("R")

MOST = 2**31 - 1
"""The largest whole number that a setting takes, unless it says otherwise: what counts with it fits into 64 bits."""

LARGEST = 1e18
"""The largest number that a setting takes, unless it says otherwise: its square fits into float32."""

_NAMES: dict[str, str] = {}
"""What specs call a class, by ``"module:Class"``."""

_REGISTRIES: list[Registry[Any]] = []
"""All there are."""


class _SpecName:
    """The name under which a registry knows a class; ``"module:Class"`` for a user's own."""

    def __get__(self, instance: object, owner: type) -> str:
        path = f"{owner.__module__}:{owner.__qualname__}"
        named = any(issubclass(owner, each.base) for each in _REGISTRIES)
        return _NAMES.get(path, path if named else "")


@dataclass(frozen=True)
class MayChange:
    """Marks a setting that may change when a run goes on, for it decides no round that has run.

    Args:
        upwards: Whether it may only grow.
    """

    upwards: bool = False


class Setting(BaseModel):
    """A frozen group of validated settings; an unknown key is an error.

    Raises:
        SpecError: A setting is wrong; the message says what is accepted.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, validate_default=True, allow_inf_nan=False
    )

    name: ClassVar[str] = _SpecName()  # type: ignore[assignment]
    """What a spec calls it; empty for a section that has only one kind."""

    if not TYPE_CHECKING:  # type checkers know the arguments from the fields

        def __init__(self, /, **settings: Any) -> None:
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise explain(error, type(self)) from None

        # Settings inside settings are checked by pydantic itself, which knows the whole key of what is wrong.
        __init__.__pydantic_base_init__ = True

    @field_validator("*")
    @classmethod
    def _can_be_served(cls, value: Any, info: ValidationInfo) -> Any:
        """Numbers that would overflow, or ask for more memory than there is, wherever they are used."""
        limits = cls.model_fields[info.field_name or ""].metadata
        if not any(hasattr(limit, "le") or hasattr(limit, "lt") for limit in limits):
            _check_size(value)
        return value

    def to_spec(self) -> dict[str, Any]:
        """The settings as a spec's table; reading it back gives an equal object."""
        table = {"name": self.name} if self.name else {}
        for key in type(self).model_fields:
            value = getattr(self, key)
            if value is not None:
                table[key] = plain(value)
        return table


def _check_size(value: object) -> None:
    if isinstance(value, (list, tuple)):
        for item in value:
            _check_size(item)
    elif isinstance(value, int) and not -MOST <= value <= MOST:
        raise ValueError(f"too large; accepted: at most {MOST}")
    elif isinstance(value, float) and not -LARGEST <= value <= LARGEST:
        raise ValueError(f"too large; accepted: at most {LARGEST:g}")


def plain(value: Any) -> Any:
    """``value`` as what TOML can hold; settings become tables."""
    if isinstance(value, Setting):
        return value.to_spec()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


class Registry(Generic[T]):
    """Named classes of one kind, imported when first asked for.

    Args:
        kind: What they are, in the singular, for messages: ``"method"``.
        base: The class that each of them derives from.
        known: Name to ``"module:Class"``.
    """

    def __init__(self, kind: str, base: type[T], known: Mapping[str, str]) -> None:
        self.kind, self.base, self._paths = kind, base, dict(known)
        _REGISTRIES.append(self)
        _NAMES.update({path: name for name, path in known.items()})

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def find(self, name: str) -> type[T]:
        """The class called ``name``, or ``"module:Class"`` of the user's own.

        Raises:
            SpecError: There is none of that name, or what is there is something else.
        """
        if name not in self._paths and ":" not in name:
            accepted = ", ".join(self._paths)
            problem = f"no such {self.kind}; there are: {accepted}, or 'module:Class' of your own"
            raise SpecError("name", problem + nearest(name, self._paths), name)
        found = import_object(self._paths[name], self.kind) if name in self._paths else load_object(name, self.kind)
        if not (inspect.isclass(found) and issubclass(found, self.base)):
            raise SpecError("name", f"{name} is no {self.kind} (a class derived from {self.base.__name__})", name)
        return found

    def parse(self, value: object) -> T:
        """An instance from itself, from a name, or from a table with a ``name``.

        Raises:
            SpecError: The name is unknown or a setting is wrong; the key is relative to the table.
        """
        if isinstance(value, self.base):
            return value
        if isinstance(value, str):
            value = {"name": value}
        if not isinstance(value, Mapping):
            raise SpecError("", f"a {self.kind} is a name or a table with a name", value)
        if "name" not in value:
            raise SpecError("name", f"which {self.kind}? There are: {', '.join(self._paths)}")
        return self.make(str(value["name"]), {key: item for key, item in value.items() if key != "name"})

    def make(self, name: str, table: Mapping[str, Any]) -> T:
        """An instance of the class called ``name``, with the settings of ``table``; raises as ``parse`` does."""
        return build(self.find(name), table)


@dataclass(frozen=True)
class FromRegistry:
    """Annotates a field that holds one of a registry's kinds: ``Annotated[Objective, FromRegistry(OBJECTIVES)]``.

    The field takes a name, a table with a name or an instance, and its errors carry its key.

    Args:
        registry: What may be named.
        default: What a table without a name describes; such a table is refused unless given.
    """

    registry: Registry[Any]
    default: str = ""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _read_by(self._parse).__get_pydantic_core_schema__(source, handler)

    def _parse(self, value: object) -> object:
        if not self.default or not isinstance(value, Mapping) or "name" in value:
            return self.registry.parse(value)
        try:
            return self.registry.parse({"name": self.default, **value})
        except SpecError as error:
            if "unknown key" not in error.problem or "did you mean" in error.problem:
                raise
            problem = f"{error.problem} (without a name this is {self.default!r})"
            raise SpecError(error.key, problem, error.value) from None


def from_word(cls: type[Setting], key: str = "") -> BeforeValidator:
    """Annotates a field that holds settings of one kind, whose errors carry its key.

    ``Annotated[Data, from_word(Data, "name")]`` takes a table or an instance, or a word that stands for a table with
    ``name`` alone; without a key no word.
    """

    def parse(value: object) -> object:
        table = {key: value} if key and isinstance(value, str) else value
        return build(cls, table) if isinstance(table, Mapping) else value

    return _read_by(parse)


def _read_by(parse: Callable[[object], object]) -> BeforeValidator:
    def read(value: object, info: ValidationInfo) -> object:
        return under(info.field_name or "", lambda: parse(value))

    return BeforeValidator(read)


def build(cls: type[T], table: Mapping[str, Any]) -> T:
    """``cls(**table)`` with our own errors.

    Raises:
        SpecError: The first setting that is wrong, with what is accepted.
    """
    return cls(**table)


def explain(error: ValidationError, cls: type[BaseModel]) -> SpecError:
    """The first problem of a pydantic error as a ``SpecError``."""
    # A misspelt key is why another one is missing.
    first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
    key = ".".join(str(part) for part in first["loc"])
    cause = (first.get("ctx") or {}).get("error")
    if first["type"] == "extra_forbidden":
        *outer, word = (str(part) for part in first["loc"])
        return SpecError(key, f"unknown key; {_accepted(_model_at(cls, outer), word)}", first["input"])
    if first["type"] == "missing":
        path = [str(part) for part in first["loc"]]
        inner = _model_at(cls, path)
        keys = "" if inner is _model_at(cls, path[:-1]) else f"; its keys are {', '.join(inner.model_fields)}"
        return SpecError(key, f"needed, and not given{keys}")
    if first["type"] == "tuple_type":
        return SpecError(key, "expected a list, such as [1, 2]", first["input"])
    message = str(cause) if cause is not None else first["msg"][0].lower() + first["msg"][1:]
    return SpecError(key, message, first["input"]) if key else SpecError("", message)


def _accepted(cls: type[BaseModel], word: str) -> str:
    """What may stand where ``word`` stood."""
    accepted = list(cls.model_fields)
    others = _belongs(cls, word)
    if not accepted:
        return f"{others}{getattr(cls, 'name', '') or cls.__name__} has no settings"
    sections = {key: _model_at(cls, [key]) for key in accepted}
    inside = [key for key, inner in sections.items() if inner is not cls and word in inner.model_fields]
    hint = f"; did you mean '{inside[0]}.{word}'?" if inside else "" if others else nearest(word, accepted)
    return f"{others}accepted here: {', '.join(accepted)}{hint}"


def _belongs(cls: type[BaseModel], word: str) -> str:
    """Which other kinds of the same registry have a setting of that name, such as ``alpha`` of a partition."""
    for registry in _REGISTRIES:
        if issubclass(cls, registry.base):
            having = []
            for name in registry:
                with suppress(SpecError):  # one that cannot be loaded has nothing
                    if word in registry.find(name).model_fields:
                        having.append(name)
            this = getattr(cls, "name", "") or cls.__name__
            return f"{word} belongs to {', '.join(having)}; this {registry.kind} is {this}; " if having else ""
    return ""


def _model_at(cls: type[BaseModel], path: list[str]) -> type[BaseModel]:
    """The settings that a path of keys leads to."""
    for part in path:
        field = cls.model_fields.get(part)
        inner = field.annotation if field else None
        for candidate in (inner, *get_args(inner)):
            if inspect.isclass(candidate) and issubclass(candidate, BaseModel):
                cls = candidate
    return cls


def under(section: str, work: Callable[[], R]) -> R:
    """``work()``, whose errors are seen from one section further out."""
    try:
        return work()
    except SpecError as error:
        raise (error if error.key.split(".")[0] == section else error.under(section)) from None
