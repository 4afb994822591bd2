"""What a shell may complete where an argument is a name: attached to the parser's arguments only when a shell asks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

from fedstrata.cli.known import known

Completer = Callable[..., Iterable[str]]


def keys(prefix: str = "", **_: Any) -> list[str]:
    """``section.key=`` of every setting; after the ``=`` the names that the section takes."""
    key, equals, _rest = prefix.partition("=")
    settings = known()["settings"]
    if equals:
        section = key.removesuffix(".name")
        return [f"{key}={name}" for name in settings.get(section, {"kinds": {}})["kinds"] if name]
    found = [f"{row[0]}=" for row in known()["experiment"]]
    for section, each in settings.items():
        found += [f"{section}.{row[0]}=" for kind in each["kinds"].values() for row in kind["keys"]]
    return list(dict.fromkeys(found))


def words(**_: Any) -> list[str]:
    """What ``explain`` knows."""
    from fedstrata.cli.teach import _words

    return list(dict.fromkeys(_words(known())))


def sections(**_: Any) -> list[str]:
    """The sections of a spec."""
    return list(known()["settings"])


def names(parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """The kinds of the section that was typed."""
    return [name for name in known()["settings"].get(parsed_args.section, {"kinds": {}})["kinds"] if name]


def methods(prefix: str = "", **_: Any) -> list[str]:
    """The next method of a list with commas."""
    before = prefix.rpartition(",")[0]
    return [f"{before},{row[0]}" if before else row[0] for row in known()["methods"]]


def engines(**_: Any) -> list[str]:
    """Where clients may live."""
    return ["local", "ray", "nvflare"]


def kinds(**_: Any) -> list[str]:
    """What ``new`` writes."""
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
"""By command ("" for all) and destination of the argument."""


def attach(whole: argparse.ArgumentParser) -> None:
    """Give the arguments of all commands their completers."""
    for action in whole._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command, parser in action.choices.items():
                for argument in parser._actions:
                    found = COMPLETERS.get((command, argument.dest)) or COMPLETERS.get(("", argument.dest))
                    if found is not None:
                        argument.completer = found
