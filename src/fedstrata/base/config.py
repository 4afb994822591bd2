"""Define ``Setting``, which checks the values of settings, and ``Registry``, which finds settings classes by name.

A spec describes an experiment. Each method, partition or sampler in a spec is a frozen pydantic model. The fields of
the model are the settings, and its methods define the behaviour. For example, ``Registry`` converts ``{"name":
"dirichlet", "alpha": 0.1}`` to such a model. The registry imports the model's class only when the class is needed. In a
spec, a user's own class has the name ``"module:Class"``.
"""

from __future__ import annotations

import inspect
import re
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
"""The maximum value of an integer setting that has no other limit. Counts that are computed from this value fit into 64
bits."""

LARGEST = 1e18
"""The maximum value of a float setting that has no other limit. The square of this value fits into float32."""

_NAMES: dict[str, str] = {}
"""A mapping from the path ``"module:Class"`` of a class to its name in specs."""

_REGISTRIES: list[Registry[Any]] = []
"""A list of all registries."""


class _SpecName:
    """A descriptor that returns the name of a class in specs.

    A class in a registry has the name from the registry. A user's own class has the name ``"module:Class"``. Other
    classes have an empty name.
    """

    def __get__(self, instance: object, owner: type) -> str:
        path = f"{owner.__module__}:{owner.__qualname__}"
        named = any(issubclass(owner, each.base) for each in _REGISTRIES)
        return _NAMES.get(path, path if named else "")


@dataclass(frozen=True)
class MayChange:
    """A marker for settings that may change when a run is resumed, because they do not affect finished rounds.

    Args:
        upwards: Whether the value may only increase.
    """

    upwards: bool = False


class Setting(BaseModel):
    """Base class of groups of settings. The constructor checks all values, and raises an error for unknown keys.

    Raises:
        SpecError: A setting is wrong. The message says which values are accepted.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, validate_default=True, allow_inf_nan=False
    )

    name: ClassVar[str] = _SpecName()  # type: ignore[assignment]
    """The name that selects this class in a spec; empty if the section of the spec has only one class."""

    later_settings: ClassVar[tuple[str, ...]] = ()
    """Names of settings that earlier versions of fedstrata did not have. If a new setting has its default value,
    ``to_spec`` omits the setting, so that the hashes of old specs stay valid."""

    @property
    def implementation(self) -> Any:
        """The class or function that implements the setting.

        The identity of a run includes the source code of this object.
        """
        return type(self)

    if not TYPE_CHECKING:  # hide __init__ from type checkers, which derive its arguments from the fields

        def __init__(self, /, **settings: Any) -> None:
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise explain(error, type(self)) from None

        # With this attribute, pydantic validates nested settings without their __init__. Errors then show the whole
        # key, such as training.lr.
        __init__.__pydantic_base_init__ = True

    @field_validator("*", mode="before")
    @classmethod
    def _is_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Raise an error if a numeric setting is true or false, because pydantic would read these values as 1 and 0."""
        types = list(_types(cls.model_fields[info.field_name or ""].annotation))
        if bool not in types and (int in types or float in types) and _has_truth_value(value):
            raise ValueError("must be a number, not true or false.")
        return value

    @field_validator("*")
    @classmethod
    def _can_be_served(cls, value: Any, info: ValidationInfo) -> Any:
        """Raise an error for numbers that would cause an overflow or would need too much memory."""
        limits = cls.model_fields[info.field_name or ""].metadata
        if not any(hasattr(limit, "le") or hasattr(limit, "lt") for limit in limits):
            _check_size(value)
        return value

    def to_spec(self) -> dict[str, Any]:
        """Return the settings as a mapping for a spec, from which an equal object can be created."""
        fields = type(self).model_fields
        omitted = [key for key in self.later_settings if getattr(self, key) == fields[key].default]
        values = ((key, getattr(self, key)) for key in fields)
        name = {"name": self.name} if self.name else {}
        return name | {key: plain(value) for key, value in values if value is not None and key not in omitted}


def _types(annotation: Any) -> Iterator[Any]:
    """Yield the types in an annotation, such as int and None for ``int | None``."""
    inner = get_args(annotation)
    for each in inner:
        yield from _types(each)
    if not inner:
        yield annotation


def _has_truth_value(value: object) -> bool:
    """Return True for the values true and false, and for lists that contain them."""
    return any(map(_has_truth_value, value)) if isinstance(value, (list, tuple)) else isinstance(value, bool)


def _check_size(value: object) -> None:
    if isinstance(value, (list, tuple)):
        for item in value:
            _check_size(item)
    elif isinstance(value, int) and not -MOST <= value <= MOST:
        raise ValueError(f"is too large. Use at most {MOST}.")
    elif isinstance(value, float) and not -LARGEST <= value <= LARGEST:
        raise ValueError(f"is too large. Use at most {LARGEST:g}.")


def plain(value: Any) -> Any:
    """Convert a value to TOML types. Settings objects become mappings."""
    if isinstance(value, Setting):
        return value.to_spec()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


class Registry(Generic[T]):
    """A mapping from names to Python classes. A class is imported when it is first used.

    Args:
        kind: The word for the registry's classes in error messages, such as ``"method"``.
        base: The base class of the registry's classes.
        known: A mapping from each name to the path ``"module:Class"`` of its class.
    """

    path_form = "class as 'module:Class'"
    """A phrase for error messages that says how a spec refers to a user's own class."""

    def __init__(self, kind: str, base: type[T], known: Mapping[str, str]) -> None:
        self.kind, self.base, self._paths = kind, base, dict(known)
        _REGISTRIES.append(self)
        _NAMES.update({path: name for name, path in known.items()})

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def find(self, name: str) -> type[T]:
        """Return the class for a name in this registry or for a path ``"module:Class"``.

        Raises:
            SpecError: The name is unknown, or the class is not derived from the registry's base class.
        """
        if name not in self._paths and ":" not in name:
            problem = f"is not a known {self.kind}{nearest(name, self._paths)} "
            problem += f"Use one of: {', '.join(self._paths)}, or your own {self.path_form}."
            raise SpecError("name", problem, name)
        cls = import_object(self._paths[name], self.kind) if name in self._paths else load_object(name, self.kind)
        if not (inspect.isclass(cls) and issubclass(cls, self.base)):
            raise SpecError(
                "name", f"is not a subclass of {self.base.__name__}. Derive the class from {self.base.__name__}.", name
            )
        return cls

    def parse(self, value: object) -> T:
        """Return an instance of a class in the registry.

        The value is a name, a mapping with the key ``name``, or an instance.

        Raises:
            SpecError: The name is unknown, or a setting is wrong. The key path in the error begins at ``value``.
        """
        if isinstance(value, self.base):
            return value
        if isinstance(value, str):
            value = {"name": value}
        if not isinstance(value, Mapping):
            raise SpecError("", "must be a name, or a table with the key 'name'.", value)
        if "name" not in value:
            raise SpecError("name", f"is required, but not set. Use one of: {', '.join(self._paths)}.")
        return self.make(str(value["name"]), {key: item for key, item in value.items() if key != "name"})

    def make(self, name: str, table: Mapping[str, Any]) -> T:
        """Create an instance of the class ``name`` with the settings in ``table``. See ``parse`` for the exceptions."""
        return build(self.find(name), table)


@dataclass(frozen=True)
class FromRegistry:
    """An annotation for fields with values from a registry, as in ``Annotated[Codec, FromRegistry(CODECS)]``.

    The field accepts a name, a mapping with the key ``name``, or an instance. Errors show the field's key.

    Args:
        registry: The registry that contains the names.
        default: The name to use for mappings without the key ``name``. By default, such mappings cause an error.
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
            if "is not a known key" not in error.problem or "did you mean" in error.problem:
                raise
            problem = f"{error.problem.rstrip('.')}. The key 'name' is not set, so {self.default!r} is used. "
            problem += "Set 'name'."
            raise SpecError(error.key, problem, error.value) from None


def from_word(cls: type[Setting], key: str = "") -> BeforeValidator:
    """Return an annotation for fields whose values are instances of the settings class ``cls``.

    The field accepts a mapping or an instance. Errors show the field's key. If ``key`` is not empty, the field also
    accepts a string, which is read as the value of ``key``. For example, ``Annotated[Data, from_word(Data, "name")]``
    reads ``"adult"`` as ``{"name": "adult"}``.
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
    """Create an instance of the settings class ``cls`` from a mapping.

    Raises:
        SpecError: A setting is wrong. The message says which values are accepted.
    """
    return cls(**table)


def explain(error: ValidationError, cls: type[BaseModel]) -> SpecError:
    """Convert a pydantic error to a ``SpecError`` that describes the first problem."""
    # Report unknown keys first, because a misspelt key may be the reason why another key is missing.
    first = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    path = [str(part) for part in first["loc"]]
    key = ".".join(path)
    cause = (first.get("ctx") or {}).get("error")
    if first["type"] == "extra_forbidden":
        return SpecError(key, _unknown(_model_at(cls, path[:-1]), path[-1]), first["input"])
    if first["type"] == "missing":
        inner = _model_at(cls, path)
        keys = (
            "" if inner is _model_at(cls, path[:-1]) else f" to a table with the keys: {', '.join(inner.model_fields)}"
        )
        return SpecError(key, f"is required, but not set. Set this key{keys}.")
    if first["type"] == "tuple_type":
        return SpecError(key, "must be a list. Use, for example, [1, 2].", first["input"])
    message = str(cause) if cause is not None else _reworded(first["msg"])
    return SpecError(key, message, first["input"]) if key else SpecError("", message)


WORDS = {
    "Unable to parse input string as an integer, exceeded maximum size": "is too large",
    "Input should be": "must be",
    "a valid dictionary": "a table",
    "a valid integer": "an integer",
    "a valid boolean": "true or false",
    "a valid string": "a string",
    "a valid ": "a ",
}
"""A mapping from pydantic's descriptions of accepted values to descriptions for users."""


def _reworded(message: str) -> str:
    """Convert a pydantic message to a sentence that uses the terms of specs."""
    message = re.sub(r", (unable to|got a number with) .*", "", message)
    for theirs, ours in WORDS.items():
        message = message.replace(theirs, ours)
    return f"{message[0].lower()}{message[1:].rstrip('.')}."


def _unknown(cls: type[BaseModel], word: str) -> str:
    """Return an error message about an unknown key ``word``, with a similar key and a list of all keys of ``cls``."""
    accepted = list(cls.model_fields)
    others = _belongs(cls, word)
    if not accepted:
        return (
            f"is not a known key. {others}{getattr(cls, 'name', '') or cls.__name__} has no settings. Remove the key."
        )
    sections = {key: _model_at(cls, [key]) for key in accepted}
    inside = [key for key, inner in sections.items() if inner is not cls and word in inner.model_fields]
    hint = f"; did you mean '{inside[0]}.{word}'?" if inside else "." if others else nearest(word, accepted)
    return f"is not a known key{hint} {others}Use one of: {', '.join(accepted)}."


def _belongs(cls: type[BaseModel], word: str) -> str:
    """Return a sentence with the names of all classes in the registry of ``cls`` that have the setting ``word``.

    Return an empty string if none of the classes has this setting.
    """
    for registry in _REGISTRIES:
        if issubclass(cls, registry.base):
            owners = []
            for name in registry:
                with suppress(SpecError):  # classes that cannot be imported are left out
                    if word in registry.find(name).model_fields:
                        owners.append(name)
            this = getattr(cls, "name", "") or cls.__name__
            where = f"{', '.join(owners)}, but this {registry.kind} is {this}"
            return f"The key {word!r} belongs to {where}. " if owners else ""
    return ""


def _model_at(cls: type[BaseModel], path: list[str]) -> type[BaseModel]:
    """Return the settings class of the section at a path of keys, such as ``["training", "optimizer"]``."""
    for part in path:
        field = cls.model_fields.get(part)
        inner = field.annotation if field else None
        for candidate in (inner, *get_args(inner)):
            if inspect.isclass(candidate) and issubclass(candidate, BaseModel):
                cls = candidate
    return cls


def under(section: str, work: Callable[[], R]) -> R:
    """Return the result of ``work()``. If ``work`` raises a ``SpecError``, prefix the error's key with ``section``."""
    try:
        return work()
    except SpecError as error:
        raise (error if error.key.split(".")[0] == section else error.under(section)) from None
