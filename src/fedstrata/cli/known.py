"""What there is to choose from, without the seconds that importing PyTorch takes: a table made from the code.

It lies beside this file as ``known.json``. ``make reference`` writes it anew, and a test compares it with the code.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstrata.base.errors import SpecError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fedstrata.base.config import Setting
    from fedstrata.spec.reference import Row

FUNCTIONS = {"model": 2, "evaluation.metrics": 2}
"""Sections that take functions of the user's own, and how many arguments those are called with in any case."""

FILE = Path(__file__).with_name("known.json")


def known() -> dict[str, Any]:
    """The table.

    Returns:
        ``methods``, rows of name, first sentence and paper; ``experiment``, the keys that stand in no section;
        ``settings``, the kinds of each section.
    """
    table: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return table


def find_section(name: str) -> dict[str, Any]:
    """A section: the ``common`` keys of its kinds, and the ``kinds`` by name.

    Raises:
        SpecError: There is none of that name.
    """
    sections = known()["settings"]
    if name not in sections:
        raise SpecError("section", f"there are: {', '.join(sections)}{nearest(name, sections)}", name)
    found: dict[str, Any] = sections[name]
    return found


def find_kind(section: str, name: str) -> dict[str, Any]:
    """What a section takes: a sentence ``about`` it and its ``keys``.

    Args:
        section: Such as ``"method.objective"``.
        name: The kind; ``"module:Class"`` for one of the user's own, or ``"module:function"`` where the section takes
            functions (``model`` and ``evaluation.metrics``); it is then imported.

    Raises:
        SpecError: There is no such section, or nothing of that name in it.
    """
    if ":" in name and section in FUNCTIONS:
        from fedstrata.base.config import Setting
        from fedstrata.base.loading import load_object

        found = load_object(name, section)
        if not (inspect.isclass(found) and issubclass(found, Setting)):
            return _of_function(found, name, FUNCTIONS[section])
    kinds = find_section(section)["kinds"]
    if ":" in name:
        from fedstrata.base.config import Registry
        from fedstrata.spec.reference import SECTIONS

        if isinstance(registry := SECTIONS[section], Registry):
            return _described(registry.find(name))
    if name not in kinds:
        raise SpecError("name", f"there are: {', '.join(kinds)}{nearest(name, kinds)}", name)
    kind: dict[str, Any] = kinds[name]
    return kind


def owners(key: str, besides: str = "") -> list[str]:
    """The sections that have a key, each with the kinds that do: ``["partition (dirichlet)"]``.

    Args:
        key: A key by itself, such as ``"alpha"``.
        besides: A section to leave out.
    """
    found = []
    for section, table in known()["settings"].items():
        kinds = table["kinds"]
        holding = [name for name, kind in kinds.items() if any(row[0] == key for row in kind["keys"])]
        if holding and section != besides:
            which = ", ".join(holding) if len(holding) < len(kinds) else ""
            found.append(f"{section} ({which})" if which else section)
    return found


def _of_function(found: Any, name: str, given: int) -> dict[str, Any]:
    """What a docstring and a signature say, without the arguments that are not a spec's."""
    if not callable(found):
        raise SpecError("name", f"is a {type(found).__name__}; accepted: a class or a function", name)
    try:
        arguments = list(inspect.signature(found).parameters.values())[given:]
    except ValueError:  # some that are written in C do not tell
        arguments = []
    rows = [
        [
            each.name,
            "" if each.annotation is each.empty else inspect.formatannotation(each.annotation),
            "needed" if each.default is each.empty else str(each.default),
            "",
        ]
        for each in arguments
    ]
    return {"about": (inspect.getdoc(found) or "").split("\n\n")[0].replace("\n", " "), "keys": rows}


def collect() -> dict[str, Any]:
    """The table as the code says it now."""
    from fedstrata.methods.base import METHODS
    from fedstrata.spec.experiment import Experiment
    from fedstrata.spec.reference import SECTIONS, common, kinds, rows

    methods = [(name, METHODS.find(name)) for name in METHODS]
    return {
        "methods": [[name, (method.__doc__ or "").strip().splitlines()[0], method.paper] for name, method in methods],
        "experiment": _told(rows(Experiment)),
        "settings": {
            section: {
                "common": _told(common(section)),
                "kinds": {name: _described(kind) for name, kind in kinds(section)},
            }
            for section in SECTIONS
        },
    }


def _described(kind: type[Setting]) -> dict[str, Any]:
    from fedstrata.spec.reference import rows, summary

    return {"about": summary(kind).replace("``", ""), "keys": _told(rows(kind))}


def _told(rows: Iterable[Row]) -> list[list[str]]:
    """Rows of settings as a terminal shows them."""
    return [
        [key, taken.replace("`", ""), default or "needed", meaning.replace("``", "")]
        for key, taken, default, meaning in rows
    ]


if __name__ == "__main__":
    FILE.write_text(json.dumps(collect(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
