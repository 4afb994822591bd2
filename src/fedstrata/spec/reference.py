"""Generate the reference of all spec sections, names and keys from the settings classes."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union

from pydantic.fields import FieldInfo

from fedstrata.aggregation.base import AGGREGATORS
from fedstrata.aggregation.optimizers import ServerOptimizer
from fedstrata.base.config import Registry, Setting, plain
from fedstrata.base.errors import SpecError, not_among
from fedstrata.data.augmentation import AUGMENTATIONS
from fedstrata.data.partitions.base import PARTITIONS
from fedstrata.data.schema import Column, Schema
from fedstrata.data.sources import Data
from fedstrata.data.tasks.base import TASKS
from fedstrata.evaluation.metrics import METRICS
from fedstrata.evaluation.settings import Evaluation
from fedstrata.federation.attacks import ATTACKS
from fedstrata.federation.availability import AVAILABILITIES
from fedstrata.federation.communication.codecs import CODECS, Communication
from fedstrata.federation.optimizers import OPTIMIZERS
from fedstrata.federation.settings import DPSGD, ClientDP, Privacy, Training
from fedstrata.methods.base import METHODS
from fedstrata.methods.recipe import CHOICES, Recipe
from fedstrata.models.zoo import MODELS
from fedstrata.objectives.base import OBJECTIVES
from fedstrata.sampling.base import CLIENT_SAMPLERS, DATA_SAMPLERS
from fedstrata.spec.callbacks import CALLBACKS
from fedstrata.spec.tracking import MLflow, TensorBoard, Tracking

SECTIONS: dict[str, type[Setting] | Registry[Any]] = {
    "data": Data,
    "data.schema": Schema,
    "data.schema.columns.NAME": Column,
    "data.augment": AUGMENTATIONS,
    "task": TASKS,
    "partition": PARTITIONS,
    "availability": AVAILABILITIES,
    "attack": ATTACKS,
    "model": MODELS,
    "training": Training,
    "training.optimizer": OPTIMIZERS,
    "evaluation": Evaluation,
    "evaluation.metrics": METRICS,
    "communication": Communication,
    "communication.codec": CODECS,
    "privacy": Privacy,
    "privacy.dp": DPSGD,
    "privacy.clients": ClientDP,
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
"""A mapping from each section of a spec to its settings class, or to a registry of settings classes."""

PAGES: dict[str, list[str]] = {
    page: [section for section in SECTIONS if section == page or section.startswith(f"{page}.")]
    for page in SECTIONS
    if "." not in page and page != "method"
} | {
    "method": ["method"],
    "client-sampler": ["method.client_sampler"],
    "data-sampler": ["method.data_sampler"],
    "objective": ["method.objective"],
    "aggregator": ["method.aggregator", "method.aggregator.server"],
}
"""A mapping from each page of the generated reference to the sections that the page describes."""

NOT_SET = "not set"
"""The text that the reference shows for the default value None."""

Row = tuple[str, str, str, str]
"""A row of the reference: a key, its accepted values, its default ("" if the key is required), and its description."""


def kinds(section: str) -> Iterator[tuple[str, type[Setting]]]:
    """Yield each name that a section accepts, with its class; ("", class) if the section has only one class.

    Raises:
        SpecError: The section does not exist.
    """
    if section not in SECTIONS:
        raise SpecError("section", not_among("is not a section", section, SECTIONS), section)
    settings = SECTIONS[section]
    if isinstance(settings, Registry):
        yield from ((name, settings.find(name)) for name in settings)
    else:
        yield "", settings


def common(section: str) -> list[Row]:
    """Return the rows for the keys that all classes of a section share. For methods, return the keys of ``Recipe``."""
    settings = SECTIONS[section]
    if not isinstance(settings, Registry):
        return []
    return rows(Recipe if settings is METHODS else settings.base)


def specific(section: str, cls: type[Setting]) -> list[Row]:
    """Return the rows of a class that ``common`` does not return, such as rows of keys with a changed default."""
    shared = common(section)
    return [row for row in rows(cls) if row not in shared]


def rows(cls: type[Setting]) -> list[Row]:
    """Return one row for each key of a settings class."""
    descriptions, recipe = _descriptions(cls), _default_recipe(cls)
    parts: Mapping[str, Any] = recipe.parts() if recipe else {}
    return [
        (key, _accepted(field), parts[key].name if key in parts else _default(field), descriptions.get(key, ""))
        for key, field in cls.model_fields.items()
        if not field.exclude
    ]


def _default_recipe(cls: type[Setting]) -> Recipe | None:
    """Create a recipe with default settings; None if ``cls`` is not a recipe, or if a setting is required."""
    required = any(field.is_required() for field in cls.model_fields.values())
    return cls() if issubclass(cls, Recipe) and not required else None


def summary(cls: type[Setting]) -> str:
    """Return the first paragraph of a class's docstring."""
    return (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")


def write_pages(folder: Path) -> None:
    """Write the reference in Markdown, with one file for each page in ``PAGES``.

    In existing files, the text before the first section stays unchanged.
    """
    for page in PAGES:
        path = folder / f"{page}.md"
        introduction = path.read_text(encoding="utf-8").partition("\n## `")[0] if path.exists() else f"# `{page}`"
        path.write_text(f"{introduction.rstrip()}\n\n{markdown(page)}\n", encoding="utf-8")


def markdown(page: str) -> str:
    """Return a page's sections in Markdown.

    Each setting is described in only one place, and other places link to it. The page's introduction describes the
    first section.
    """
    return "\n\n".join(paragraph for section in PAGES[page] for paragraph in _paragraphs(section))


def _paragraphs(section: str) -> Iterator[str]:
    yield f"## `{section}`"
    if every := common(section):
        yield "Common settings" + (" of the methods that consist of four parts:" if section == "method" else ":")
        yield "\n".join(map(_item, every))
    owners: dict[Row, str] = {}
    for name, cls in kinds(section):
        if name:
            yield f"### `{name}`"
        elsewhere, links = _of_choices(cls), _links(cls)
        own = [row for row in specific(section, cls) if row[0] not in elsewhere]
        if (name or section not in PAGES) and (own or not links):
            yield _plain(summary(cls))
        if links:
            yield links
        described, items = [row for row in own if row in owners], list[str]()
        for owner in dict.fromkeys(owners[row] for row in described):
            keys = [f"`{row[0]}`" for row in described if owners[row] == owner]
            items.append(f"- {', '.join(keys)}: as in [`{owner}`](#{owner}).")
        new = [row for row in own if row not in owners]
        if items := [*items, *map(_item, new)]:
            yield "\n".join(items)
        owners |= dict.fromkeys(new, name)


def _of_choices(cls: type[Setting]) -> Mapping[str, tuple[str, str]]:
    """Return the settings of a method that the pages of the method's components describe.

    Returns:
        A mapping from a setting's name in the method to a pair: the component, and the setting's name in the component
        (empty for the component itself).
    """
    recipe = _default_recipe(cls)
    if recipe is None:
        return {}
    defaults = {row[0]: row[1:3] for row in rows(cls)}
    belongs = {
        key: (choice, name)
        for key, (choice, name) in recipe.shared_settings().items()
        if (name, *defaults[key]) in [row[:3] for row in rows(type(recipe.parts()[choice]))]
    }
    return belongs | {choice: (choice, "") for choice in CHOICES if choice in recipe.parts()}


def _links(cls: type[Setting]) -> str:
    """Return a sentence that links to a method's components and mentions their settings."""
    recipe, belongs = _default_recipe(cls), _of_choices(cls)
    defaults = {key: default for key, _, default, _ in common("method")}
    with_settings = {choice for choice, name in belongs.values() if name}
    parts = [key for key, (_, name) in belongs.items() if not name]
    choices = [key for key in parts if key in with_settings or getattr(recipe, key).name != defaults[key]]
    if recipe is None or not choices:
        return ""
    texts = []
    for choice in choices:
        part = getattr(recipe, choice).name
        settings = [
            f"`{key}`" if key == name else f"`{key}`, which the {choice.replace('_', ' ')} calls `{name}`"
            for key, (of, name) in belongs.items()
            if name and of == choice
        ]
        texts.append(
            f"{choice.replace('_', ' ')} [`{part}`]({choice.replace('_', '-')}.md#{part})"
            + (f" ({', '.join(settings)})" if settings else "")
        )
    listed = [text for text in (", the ".join(texts[:-1]), texts[-1]) if text]
    return f"Uses the {' and the '.join(listed)}."


def _item(row: Row) -> str:
    """Describe a key in one line. The line omits the type if the default or the description already shows it."""
    key, accepted, default, text = row
    listed = accepted.startswith("`") and all(name in _plain(text) for name in accepted.split(", "))
    notes = [] if listed else [accepted]
    if default == "":
        notes.append("required")
    elif default != NOT_SET:
        key, notes = f"{key} = {_toml(default)}", [SHOWN.sub("", note) for note in notes]
    brackets = "; ".join(note for note in notes if note)
    return f"- `{key}`{f' ({brackets})' if brackets else ''}: {_plain(text)}"


SHOWN = re.compile(
    r"^(integer|number) (> 0$|from |(?=[^o]))|^(true/false|string|list of (numbers|integers|tables)( > 0)?)$"
)
"""The pattern for types that readers can infer from the default value.

Numbers are positive, unless the page says otherwise.
"""


def _toml(default: str) -> str:
    """Format a default value as in a TOML spec."""
    value = default.replace("'", '"')
    try:
        json.loads(value)
    except ValueError:
        return f'"{default}"'
    return re.sub(r'"(\w+)": ', r"\1 = ", value)


def _descriptions(cls: type[Setting]) -> dict[str, str]:
    """Return a mapping from each key of a class to its description in a docstring.

    Descriptions come from the docstrings of the class, of its base classes and, for a method, of its components.
    """
    descriptions: dict[str, str] = {}
    if recipe := _default_recipe(cls):
        for key, (choice, name) in recipe.shared_settings().items():
            descriptions[key] = _descriptions(type(getattr(recipe, choice))).get(name, "")
    for base in reversed(cls.__mro__):
        text = inspect.cleandoc(base.__doc__ or "") if issubclass(base, Setting) else ""
        _, _, arguments = text.partition("\nArgs:\n")
        for entry in re.split(r"\n(?=    \S)", "\n" + arguments.split("\n\n")[0]):
            if match := re.match(r"\s*(\w+): (.*)", entry, flags=re.DOTALL):
                descriptions[match[1]] = " ".join(match[2].split())
    return descriptions


def _accepted(field: FieldInfo) -> str:
    """Describe the values that a key accepts."""
    kind = _type(field.annotation)
    return f"{kind}{_limits(field.metadata, kind)}"


def _type(kind: Any, plural: str = "") -> str:
    """Describe a type in words. With ``plural="s"``, use the plural."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        item = _type(arguments[0], plural)
        return f"{item}{_limits(arguments[1:], item)}"
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_type(part, plural) for part in arguments if part is not NoneType)
    if origin in (tuple, list):
        return f"list{plural} of {_type(arguments[0], 's')}"
    if origin is dict:
        return f"table{plural}"
    if inspect.isclass(kind) and issubclass(kind, Setting):
        return f"table{plural}" if _is_group(kind) else f"name{plural} or table{plural}"
    named = {int: f"integer{plural}", float: f"number{plural}", str: f"string{plural}", bool: "true/false"}
    return named.get(kind, "anything")


def _is_group(kind: Any) -> bool:
    """Return True if a type is a settings class whose value in a spec must be a table, not a name."""
    return inspect.isclass(kind) and issubclass(kind, Setting) and not kind.name and kind is not ServerOptimizer


def _limits(items: Iterable[Any], kind: str) -> str:
    """Describe the limits of a number, such as `` > 0``, `` in (0, 1]`` or, for integers, `` from 1 to 9``.

    The text is empty for numbers without limits.
    """
    limits = {name: getattr(item, name) for item in items for name in LIMITS if hasattr(item, name)}
    match sorted(limits):
        case []:
            return ""
        case [name]:
            return f" {LIMITS[name]} {_number(limits[name])}"
        case [low, high] if kind.startswith("integer"):
            return f" from {_number(limits[low] + (low == 'gt'))} to {_number(limits[high] - (high == 'lt'))}"
        case [low, high]:
            first, last = "[" if low == "ge" else "(", "]" if high == "le" else ")"
            return f" in {first}{_number(limits[low])}, {_number(limits[high])}{last}"
    raise AssertionError(f"unexpected limits: {limits}")


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) and value < 1e9 else f"{value:g}"


LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
"""A mapping from each limit's name in pydantic to the mathematical sign."""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    value = field.get_default(call_default_factory=True)
    if value is None:
        return NOT_SET
    if isinstance(value, Setting):
        return value.name or "{}"
    return str(value).lower() if isinstance(value, bool) else f"{plain(value)}"


def _plain(text: str) -> str:
    return text.replace("``", "`")
