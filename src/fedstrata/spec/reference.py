"""What a spec can say: every section, every name and every key, from the settings themselves."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union

from pydantic.fields import FieldInfo

from fedstrata.aggregation.base import AGGREGATORS
from fedstrata.aggregation.optimizers import ServerOptimizer
from fedstrata.base.config import Registry, Setting, plain
from fedstrata.base.errors import SpecError, nearest
from fedstrata.data.partitions import PARTITIONS
from fedstrata.data.schema import Column, Schema
from fedstrata.data.sources import Data
from fedstrata.evaluation.metrics import METRICS
from fedstrata.evaluation.settings import Evaluation
from fedstrata.federation.availability import AVAILABILITIES
from fedstrata.federation.communication.codecs import CODECS, Communication
from fedstrata.federation.settings import Privacy, Training
from fedstrata.methods.base import METHODS, Recipe
from fedstrata.models.zoo import MODELS
from fedstrata.objectives.base import OBJECTIVES
from fedstrata.sampling.base import CLIENT_SAMPLERS, DATA_SAMPLERS
from fedstrata.spec.callbacks import CALLBACKS
from fedstrata.spec.tracking import MLflow, TensorBoard, Tracking

SECTIONS: dict[str, type[Setting] | Registry[Any]] = {
    "data": Data,
    "data.schema": Schema,
    "data.schema.columns.NAME": Column,
    "partition": PARTITIONS,
    "availability": AVAILABILITIES,
    "model": MODELS,
    "training": Training,
    "evaluation": Evaluation,
    "evaluation.metrics": METRICS,
    "communication": Communication,
    "communication.codec": CODECS,
    "privacy": Privacy,
    "callbacks": CALLBACKS,
    "tracking": Tracking,
    "tracking.tensorboard": TensorBoard,
    "tracking.mlflow": MLflow,
    "method": METHODS,
    "method.client_sampler": CLIENT_SAMPLERS,
    "method.data_sampler": DATA_SAMPLERS,
    "method.objective": OBJECTIVES,
    "method.aggregator": AGGREGATORS,
    "method.aggregator.server": ServerOptimizer,
}
"""The sections of a spec: one kind of settings, or several kinds by name."""

Row = tuple[str, str, str, str]
"""A key, what it takes, its default ("" where it is needed) and what it means."""


def kinds(section: str) -> Iterator[tuple[str, type[Setting]]]:
    """The names that a section takes, "" where it takes none, and the settings of each.

    Raises:
        SpecError: There is no such section.
    """
    if section not in SECTIONS:
        raise SpecError("section", f"there are: {', '.join(SECTIONS)}{nearest(section, SECTIONS)}", section)
    found = SECTIONS[section]
    if isinstance(found, Registry):
        yield from ((name, found.find(name)) for name in found)
    else:
        yield "", found


def common(section: str) -> list[Row]:
    """The keys that all kinds of a section take."""
    found = SECTIONS[section]
    return rows(_base(found)) if isinstance(found, Registry) else []


def own(section: str, cls: type[Setting]) -> list[Row]:
    """The keys of one kind that not all of them take, or that it takes differently."""
    known = common(section)
    return [row for row in rows(cls) if row not in known]


def _base(registry: Registry[Any]) -> type[Setting]:
    # Nearly all methods are recipes, and the others say so by not taking a recipe's keys.
    base: type[Setting] = Recipe if registry is METHODS else registry.base
    return base


def rows(cls: type[Setting]) -> list[Row]:
    """All keys of some settings."""
    meanings = _meanings(cls)
    fields = {key: field for key, field in cls.model_fields.items() if not field.exclude}
    usual = _usual(cls)
    parts: Mapping[str, Any] = usual.parts() if usual else {}
    return [
        (key, _taken(field), parts[key].name if key in parts else _default(field), meanings.get(key, ""))
        for key, field in fields.items()
    ]


def _usual(cls: type[Setting]) -> Recipe | None:
    """Return a recipe with default settings; None if one of its settings is needed, or for other settings."""
    needed = any(field.is_required() for field in cls.model_fields.values())
    return cls() if issubclass(cls, Recipe) and not needed else None


def summary(cls: type[Setting]) -> str:
    """The first sentence about some settings."""
    return (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")


def markdown() -> str:
    """All sections as one page."""
    lines: list[str] = []
    for section in SECTIONS:
        lines += [f"## `{section}`", ""]
        if context := common(section):
            which = "All that are four choices" if section == "method" else "All of them"
            lines += [f"{which} take:", "", *_table(context)]
        for name, cls in kinds(section):
            lines += ([f"### `{name}`", ""] if name else []) + [_plain(summary(cls)), ""]
            lines += _table(own(section, cls))
    return "\n".join(lines)


def _table(found: list[Row]) -> list[str]:
    if not found:
        return []
    return [
        "| key | takes | default | |",
        "|---|---|---|---|",
        *(
            f"| `{key}` | {_cell(taken)} | {f'`{default}`' if default else 'needed'} | {_cell(_plain(meaning))} |"
            for key, taken, default, meaning in found
        ),
        "",
    ]


def _meanings(cls: type[Setting]) -> dict[str, str]:
    """What docstrings say about the keys, those of base classes and of a recipe's choices too."""
    found: dict[str, str] = {}
    if usual := _usual(cls):
        for key, (choice, name) in usual.shared_settings().items():
            found[key] = _meanings(type(getattr(usual, choice))).get(name, "")
    for part in reversed(cls.__mro__):
        text = inspect.cleandoc(part.__doc__ or "") if isinstance(part, type) and issubclass(part, Setting) else ""
        _, _, arguments = text.partition("\nArgs:\n")
        for entry in re.split(r"\n(?=    \S)", "\n" + arguments.split("\n\n")[0]):
            if match := re.match(r"\s*(\w+): (.*)", entry, flags=re.DOTALL):
                found[match[1]] = " ".join(match[2].split())
    return found


def _taken(field: FieldInfo) -> str:
    """What a key takes, in words."""
    words = _type(field.annotation)
    limits = [_limit(item) for item in field.metadata]
    return ", ".join([words, *filter(None, limits)])


def _type(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return ", ".join([_type(arguments[0]), *filter(None, map(_limit, arguments[1:]))])
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_type(part) for part in arguments if part is not NoneType)
    if origin in (tuple, list):
        return "a list of tables" if _is_group(arguments[0]) else f"a list of {_type(arguments[0])}"
    if origin is dict:
        return "a table"
    if inspect.isclass(kind) and issubclass(kind, Setting):
        return "a table" if _is_group(kind) else "a name or a table"
    named: dict[Any, str] = {int: "whole number", float: "number", str: "text", bool: "true or false"}
    return named.get(kind, "anything")


def _is_group(kind: Any) -> bool:
    """Whether it is a settings class of a single kind, which has no name; a server optimiser may be its name alone."""
    return inspect.isclass(kind) and issubclass(kind, Setting) and not kind.name and kind is not ServerOptimizer


LIMITS: dict[str, Callable[[Any], str]] = {
    "gt": lambda bound: f"> {bound:g}",
    "ge": lambda bound: f"≥ {bound:g}",
    "lt": lambda bound: f"< {bound:g}",
    "le": lambda bound: f"≤ {bound:g}",
}


def _limit(item: Any) -> str:
    return " and ".join(show(getattr(item, name)) for name, show in LIMITS.items() if hasattr(item, name))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if isinstance(value, Setting):
        return value.name or "{}"
    return str(value).lower() if isinstance(value, bool) else f"{plain(value)}"


def _plain(text: str) -> str:
    return text.replace("``", "`")


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


__all__ = ["SECTIONS", "common", "kinds", "markdown", "own", "rows", "summary"]
