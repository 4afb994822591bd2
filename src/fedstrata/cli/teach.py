"""Add the commands for beginners: ``fedstrata new``, ``explain`` and ``completion``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedstrata.base.errors import SpecError, nearest, not_among
from fedstrata.cli.common import Commands, add_command, add_output, print_json, print_result, show_paragraphs

TEMPLATES = Path(__file__).with_name("templates")

KINDS = {
    "spec": "a spec, the TOML file that describes an experiment",
    "demo": "a comparison of four methods under label skew and dropouts",
    "method": "a method of your own (a Python file, like all kinds below)",
    "sampler": "a client sampler, which chooses the clients to invite in a round",
    "data-sampler": "a data sampler, which chooses the samples that a client uses in a round",
    "objective": "an objective, the loss that clients minimise",
    "aggregator": "an aggregator, which combines the clients' models",
    "availability": "an availability model, which decides when clients are online",
    "partition": "a partition, which assigns samples to clients",
    "metric": "a metric of the model's quality",
    "task": "a task, which defines what a model learns: its targets, loss and metrics",
}
"""The purpose of each kind of file that ``fedstrata new`` can write. The folder ``templates`` contains the
templates."""

SHELLS = {
    "bash": 'eval "$(fedstrata completion bash)"    # in ~/.bashrc',
    "zsh": 'eval "$(fedstrata completion zsh)"     # in ~/.zshrc, after compinit',
    "fish": "fedstrata completion fish | source     # in ~/.config/fish/config.fish",
}


def add_new(commands: Commands) -> None:
    """Add the command ``fedstrata new``."""
    examples = """
        fedstrata new spec
        fedstrata new demo && fedstrata compare demo.toml --out demo
        fedstrata new sampler && fedstrata run --set method.client_sampler=sampler:LongestAway
        fedstrata new availability nights.py && fedstrata run --set availability=nights:Nights
    """
    help = "write a commented example file, which runs without changes"
    more = "\n".join(f"  {kind:<14}{purpose}" for kind, purpose in KINDS.items())
    parser = add_command(commands, "new", help, examples, more, work=_new)
    parser.add_argument("kind", metavar="KIND", help="kind of file to write, from the list above")
    parser.add_argument(
        "file", nargs="?", type=Path, metavar="FILE", help="file to write (default: KIND.toml or KIND.py)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    add_output(parser, progress=False)


def _new(options: argparse.Namespace) -> None:
    kind: str = options.kind
    if kind not in KINDS:
        raise SpecError("KIND", not_among("is not a kind of file", kind, KINDS), kind)
    [template] = TEMPLATES.glob(f"{kind.replace('-', '_')}.*")
    path: Path = options.file or Path(template.name)
    if path.suffix != template.suffix:
        raise SpecError("FILE", f"has the wrong extension. Give a name that ends in {template.suffix}.", str(path))
    if path.suffix == ".py" and not path.stem.isidentifier():
        raise SpecError("FILE", "is not a name that Python can import. Use, for example, my_sampler.py.", str(path))
    text = template.read_text(encoding="utf-8").replace("{module}", path.stem).replace("{file}", path.as_posix())
    if path.exists() and not options.force:
        raise SpecError("FILE", "already exists. Give another name, or overwrite the file with --force.", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    lines = [line.lstrip("# ") for line in text.splitlines()]
    commands = [line for line in lines if line.startswith("fedstrata ")]
    shown = [f"written to {path}; try it:", *(f"  {command}" for command in commands)]
    print_result(options, {"file": str(path), "try": commands}, *shown)


def add_explain(commands: Commands) -> None:
    """Add the command ``fedstrata explain``."""
    examples = """
        fedstrata explain alpha
        fedstrata explain training.lr
        fedstrata explain dirichlet
        fedstrata explain availability
    """
    help = "explain a key, section or name that a spec may contain"
    parser = add_command(commands, "explain", help, examples, work=_explain)
    parser.add_argument(
        "key", metavar="KEY", help="key, section or name to explain, such as alpha, training.lr or dirichlet"
    )
    add_output(parser, progress=False)


def _explain(options: argparse.Namespace) -> None:
    entries = explanations(options.key)
    if options.json:
        print_json(entries)
        return
    from rich.text import Text

    for entry in entries:
        names = ", ".join(entry["kinds"])
        where = f"{entry['section']}.{entry['key']}" if entry["section"] and entry["key"] else entry["section"]
        title = (where or entry["key"]) + (f" of {names}" if names else "")
        lines = [Text(title, style="bold"), Text(f"  {entry['about']}")]
        if entry["key"]:
            lines.append(Text(f"  takes: {entry['takes']}; default: {entry['default']}", style="dim"))
            if example := _example(entry):
                lines.append(Text(f"  {example}"))
        if entry["has"]:
            lines.append(Text(f"  has: {', '.join(entry['has'])}", style="dim"))
        show_paragraphs(*lines, Text())


NOT_BY_HAND = ("communication.codec", "evaluation.metrics", "callbacks", "data.schema.columns.NAME")
"""Sections that ``--set`` cannot change, because they are lists of tables or contain names that users choose."""


def _example(entry: dict[str, Any]) -> str:
    """Return an example that sets a key with ``--set``; an empty string if ``--set`` cannot change the key."""
    if entry["section"] in NOT_BY_HAND or entry["default"] == "{}":
        return ""
    value = "VALUE" if entry["default"] in ("required", "not set", "") else entry["default"]
    value = f"'{value}'" if set(value) & set(" []{}'\"") else value
    section, kinds = entry["section"], entry["kinds"]
    kind = f"--set {section}={kinds[0]} " if kinds else ""
    return f"for example: {kind}--set {f'{section}.' if section else ''}{entry['key']}={value}"


def explanations(word: str) -> list[dict[str, Any]]:
    """List all meanings of a word in specs.

    Args:
        word: A key (``alpha``), a section (``training``), a name that a section accepts (``dirichlet``), or a value of
            a key (``constant``). Dotted paths are also accepted.

    Returns:
        A dict for each meaning. For a key, the dict contains ``key``, ``section``, ``about`` (the meaning), ``takes``
        (the accepted values) and ``default``. If the key exists only for some names in the section, ``kinds`` contains
        these names; otherwise, it is empty. For a section or a name, ``key`` is empty, and ``has`` contains its keys.

    Raises:
        SpecError: The word is unknown. The message suggests a similar word.
    """
    from fedstrata.cli.known import known

    table = known()
    settings = table["settings"]
    entries = [_entry("", [], row) for row in table["experiment"] if row[0] == word and word not in settings]
    as_value: list[dict[str, Any]] = []
    for section, each in settings.items():
        kinds = each["kinds"]
        if section == word:
            plain = kinds.get("", {"about": f"One of: {', '.join(kinds)}.", "keys": each["common"]})
            entries.append(_entry(section, [], ["", "", "", plain["about"]], [row[0] for row in plain["keys"]]))
        rows, taking = dict[tuple[str, ...], list[str]](), dict[tuple[str, ...], list[str]]()
        for name, kind in kinds.items():
            if name and word in (name, f"{section}.{name}"):
                entries.append(_entry(section, [name], ["", "", "", kind["about"]], [row[0] for row in kind["keys"]]))
            for row in kind["keys"]:
                if word in (row[0], f"{section}.{row[0]}", f"{section}.{name}.{row[0]}", f"{name}.{row[0]}"):
                    rows.setdefault(tuple(row), []).append(name)
                elif word in row[1].split(", "):
                    taking.setdefault(tuple(row), []).append(name)
        for result, meanings in ((entries, rows), (as_value, taking)):
            for meaning, names in meanings.items():
                result.append(_entry(section, [] if len(names) == len(kinds) else names, meaning))
    if not (entries := entries or as_value):
        hint = nearest(word, words(table))
        raise SpecError("KEY", f"is not a known key, section or name{hint} For a list, run 'fedstrata settings'.", word)
    return entries


def _entry(section: str, kinds: list[str], row: Iterable[str], has: Iterable[str] = ()) -> dict[str, Any]:
    key, takes, default, about = row
    values = {"about": about, "takes": takes, "default": default, "has": list(has)}
    return {"section": section, "kinds": kinds, "key": key, **values}


def words(table: dict[str, Any]) -> list[str]:
    """List all words that ``fedstrata explain`` knows: keys, sections, and the names that sections accept."""
    every = [row[0] for row in table["experiment"]]
    for section, each in table["settings"].items():
        every.append(section)
        for name, kind in each["kinds"].items():
            every += [name] if name else []
            every += [word for row in kind["keys"] for word in (row[0], f"{section}.{row[0]}")]
    return list(dict.fromkeys(every))


def add_completion(commands: Commands) -> None:
    """Add the command ``fedstrata completion``."""
    help = "print a script with which your shell completes commands, settings and names"
    more = "Add the line for your shell to its start-up file:\n\n" + "\n".join(f"  {line}" for line in SHELLS.values())
    parser = add_command(commands, "completion", help, "fedstrata completion bash", more, work=_completion)
    parser.add_argument("shell", choices=SHELLS, help="name of the shell")


def _completion(options: argparse.Namespace) -> None:
    import argcomplete

    print(argcomplete.shellcode(["fedstrata"], shell=options.shell))


def complete(whole: argparse.ArgumentParser) -> None:
    """Answer a shell's request for completions, and exit; do nothing without such a request."""
    import argcomplete

    argcomplete.autocomplete(whole)


COMMANDS = (add_new, add_explain, add_completion)
