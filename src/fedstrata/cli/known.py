"""Store a list of all methods and settings, so that commands such as ``fedstrata settings`` need not import PyTorch.

The list is stored in ``known.json`` in this folder. ``make reference`` generates the file from the code, and a test
compares the file with the code. A section such as ``partition`` accepts several names, such as ``dirichlet``. Each name
stands for a Python class, called a *kind* of the section. If a section has only one class, this class has an empty
name.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstrata.base.errors import SpecError, not_among

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fedstrata.base.config import Setting
    from fedstrata.spec.reference import Row

FUNCTIONS = {"model": 2, "evaluation.metrics": 2, "data.augment": 2}
"""For each section that accepts a user's function, the number of arguments that fedstrata passes to the function.

All other arguments of the function are its settings.
"""

FILE = Path(__file__).with_name("known.json")


def known() -> dict[str, Any]:
    """Return the content of ``known.json``.

    Returns:
        A dict with three keys. ``methods`` has a row per method: its name, the first line of its docstring, and its
        paper. ``experiment`` has a row for each key that does not belong to a section, such as ``seed``. ``settings``
        maps each section to its keys; see ``find_section``.
    """
    table: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return table


def find_section(name: str) -> dict[str, Any]:
    """Return the description of a section, as a dict.

    In the dict, ``common`` has one row for each key that belongs to all names in the section. ``kinds`` maps each name
    to its description; see ``find_kind``. A row contains the key, the accepted values, the default, and the meaning.

    Raises:
        SpecError: The section is unknown.
    """
    sections: dict[str, dict[str, Any]] = known()["settings"]
    if name not in sections:
        raise SpecError("section", not_among("is not a section", name, sections), name)
    return sections[name]


def find_kind(section: str, name: str) -> dict[str, Any]:
    """Return a dict that describes one name in a section, such as ``dirichlet`` in the section ``partition``.

    The dict contains a sentence (``about``), and one row per key (``keys``).

    Args:
        section: The section, such as ``"method.objective"``.
        name: The name. ``"module:Class"`` imports a user's own class. ``model``, ``evaluation.metrics`` and
            ``data.augment`` also accept ``"module:function"``.

    Raises:
        SpecError: The section is unknown, or the section does not accept this name.
    """
    if ":" in name and section in FUNCTIONS:
        from fedstrata.base.config import Setting
        from fedstrata.base.loading import load_object

        choice = load_object(name, section)
        if not (inspect.isclass(choice) and issubclass(choice, Setting)):
            return _of_function(choice, name, FUNCTIONS[section])
    kinds = find_section(section)["kinds"]
    if ":" in name:
        from fedstrata.base.config import Registry
        from fedstrata.spec.reference import SECTIONS

        if isinstance(registry := SECTIONS[section], Registry):
            return _described(registry.find(name))
    if name not in kinds:
        raise SpecError("name", not_among("is not a name in this section", name, kinds), name)
    kind: dict[str, Any] = kinds[name]
    return kind


def owners(key: str, besides: str = "") -> list[str]:
    """List the sections that have a key, such as ``["partition (dirichlet)"]``.

    If the key exists only for some values of ``name``, such as ``dirichlet``, these values are added in brackets.

    Args:
        key: A key without its section, such as ``"alpha"``.
        besides: A section to leave out of the list.
    """
    sections = []
    for section, table in known()["settings"].items():
        kinds = table["kinds"]
        holding = [name for name, kind in kinds.items() if any(row[0] == key for row in kind["keys"])]
        if holding and section != besides:
            sections.append(f"{section} ({', '.join(holding)})" if len(holding) < len(kinds) else section)
    return sections


def _of_function(function: Any, name: str, given: int) -> dict[str, Any]:
    """Describe a function by its docstring and its settings: the arguments after the first ``given`` arguments."""
    if not callable(function):
        raise SpecError(
            "name", f"is the path of a {type(function).__name__}. Give the path of a class or function.", name
        )
    try:
        arguments = list(inspect.signature(function).parameters.values())[given:]
    except ValueError:  # some functions that are written in C do not have a signature
        arguments = []
    rows = [
        [
            each.name,
            "" if each.annotation is each.empty else inspect.formatannotation(each.annotation),
            "required" if each.default is each.empty else str(each.default),
            "",
        ]
        for each in arguments
    ]
    return {"about": (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " "), "keys": rows}


def collect() -> dict[str, Any]:
    """Generate the content of ``known.json`` from the code. The content is described in the docstring of ``known``."""
    from fedstrata.methods.base import METHODS
    from fedstrata.spec.experiment import Experiment
    from fedstrata.spec.reference import SECTIONS, common, kinds, rows

    methods = [(name, METHODS.find(name)) for name in METHODS]
    return {
        "methods": [[name, (method.__doc__ or "").strip().splitlines()[0], method.paper] for name, method in methods],
        "experiment": _plain(rows(Experiment)),
        "settings": {
            section: {
                "common": _plain(common(section)),
                "kinds": {name: _described(kind) for name, kind in kinds(section)},
            }
            for section in SECTIONS
        },
    }


def _described(kind: type[Setting]) -> dict[str, Any]:
    from fedstrata.spec.reference import rows, summary

    return {"about": summary(kind).replace("``", ""), "keys": _plain(rows(kind))}


def _plain(rows: Iterable[Row]) -> list[list[str]]:
    """Format rows of settings for a terminal, without Markdown."""
    return [
        [key, taken.replace("`", ""), default or "required", meaning.replace("``", "")]
        for key, taken, default, meaning in rows
    ]


if __name__ == "__main__":
    FILE.write_text(json.dumps(collect(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
