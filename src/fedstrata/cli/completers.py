"""Complete the arguments of commands when a user presses Tab in a shell.

The functions are attached to the parser only if a shell requests completions.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

from fedstrata.cli.known import known

Completer = Callable[..., Iterable[str]]


def keys(prefix: str = "", **_: Any) -> list[str]:
    """Complete a key to ``section.key=``, and a value after ``section=`` to a name that the section accepts."""
    key, equals, _rest = prefix.partition("=")
    settings = known()["settings"]
    if equals:
        section = key.removesuffix(".name")
        return [f"{key}={name}" for name in settings.get(section, {"kinds": {}})["kinds"] if name]
    completions = [f"{row[0]}=" for row in known()["experiment"]]
    for section, each in settings.items():
        completions += [f"{section}.{row[0]}=" for kind in each["kinds"].values() for row in kind["keys"]]
    return list(dict.fromkeys(completions))


def words(**_: Any) -> list[str]:
    """Complete the argument of ``fedstrata explain``, which is a key, section or name of a spec."""
    from fedstrata.cli.teach import words

    return words(known())


def sections(**_: Any) -> list[str]:
    """Complete the first argument of ``fedstrata settings``, which is a section of a spec."""
    return list(known()["settings"])


def names(parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """Complete the second argument of ``fedstrata settings``, which is a name that the given section accepts."""
    return [name for name in known()["settings"].get(parsed_args.section, {"kinds": {}})["kinds"] if name]


def methods(prefix: str = "", **_: Any) -> list[str]:
    """Complete the last name in a comma-separated list of methods."""
    before = prefix.rpartition(",")[0]
    return [f"{before},{row[0]}" if before else row[0] for row in known()["methods"]]


def engines(**_: Any) -> list[str]:
    """Complete the name of an engine."""
    return ["local", "ray", "nvflare"]


def kinds(**_: Any) -> list[str]:
    """Complete the argument of ``fedstrata new``: the kind of file to write."""
    from fedstrata.cli.teach import KINDS

    return list(KINDS)


COMPLETERS: dict[tuple[str, str], Completer] = {
    ("", "overrides"): keys,
    ("", "methods"): methods,
    ("", "engine"): engines,
    ("explain", "key"): words,
    ("settings", "section"): sections,
    ("settings", "name"): names,
    ("new", "kind"): kinds,
}
"""The completer of each argument. A key is a pair of a command ("" for all commands) and an argument."""


def attach(whole: argparse.ArgumentParser) -> None:
    """Attach the functions in ``COMPLETERS`` to the arguments of all commands."""
    for action in whole._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command, parser in action.choices.items():
                for argument in parser._actions:
                    completer = COMPLETERS.get((command, argument.dest)) or COMPLETERS.get(("", argument.dest))
                    if completer is not None:
                        argument.completer = completer
