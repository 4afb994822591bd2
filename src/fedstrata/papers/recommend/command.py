"""Define the command ``fedstrata recommend``, which names methods that are worth comparing for a spec."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from fedstrata.base.printable import print_lines, printable
from fedstrata.base.screen import ScreenTable
from fedstrata.cli import common

if TYPE_CHECKING:
    from rich.text import Text

    from fedstrata.papers.recommend.advice import Advice

SEEDS = "0,1,2,3,4"
"""Seeds in the suggested command."""
NEAREST = 3
"""Maximum number of columns of the board to show."""


def add_recommend(commands: common.Commands) -> None:
    """Add the command ``fedstrata recommend`` to the command line."""
    examples = """
        fedstrata recommend spec.toml
        fedstrata recommend spec.toml --set availability=label-correlated
        fedstrata recommend spec.toml --json
    """
    help = "recommend methods to compare for a spec, with reasons"
    more = (
        "The command does not train a model. It measures the partition, and simulates which clients are online and "
        "invited. The order of the methods follows results of the board ('fedstrata board') only if one of the "
        "board's columns is similar to the spec. The command also says how uncertain the recommendation is."
    )
    parser = common.add_command(commands, "recommend", help, examples, more, work=_recommend)
    common.add_spec(parser)
    common.add_trust(parser)
    common.add_output(parser, progress=False)


def _recommend(options: argparse.Namespace) -> None:
    from fedstrata.papers.recommend.advice import recommend

    spec = common.experiment(options)
    advice = common.located(options, lambda: recommend(spec))
    command = _command(options, advice)
    if options.json:
        common.print_json({**advice.to_json(), "command": command})
        return
    common.show(_properties(advice))
    common.show_paragraphs(*_paragraphs(advice))
    print_lines("", "To compare these methods, run:", f"  {command}")


def _command(options: argparse.Namespace, advice: Advice) -> str:
    """Return the command that compares the recommended methods. The command omits overrides of ``method``.

    If only FedAvg is recommended, the command compares FedAvg with local training and with centralised training.
    """
    words = ["fedstrata", "compare", *([options.spec] if options.spec else [])]
    words += ["--methods", ",".join(advice.compared)]
    words += [] if advice.methods else ["--references", "local,centralised"]
    for override in options.overrides:
        words += [] if override.partition("=")[0].strip().split(".")[0] == "method" else ["--set", override]
    return shlex.join([*words, "--seeds", SEEDS])


def _properties(advice: Advice) -> ScreenTable:
    """Return the table of measured properties."""
    from fedstrata.papers.recommend.advice import shown
    from fedstrata.papers.recommend.properties import SHOWN

    values = {key: getattr(advice.properties, key) for key in SHOWN}
    rows = [
        (each.label, shown(values[key], each.unit), each.about)
        for key, each in SHOWN.items()
        if values[key] is not None
    ]
    return ScreenTable(("property", "value", "what it is"), rows, words=(2,), every=True)


def _paragraphs(advice: Advice) -> Iterator[Text]:
    """Yield the paragraphs of the output about columns, methods and limits."""
    yield from _section("Nearest columns of the board", _columns(advice))
    advised = [
        line
        for name, reasons in advice.methods.items()
        for line in (name, *(f"  {reason.text} ({reason.source})" for reason in reasons))
    ]
    none = ["None of the measured properties is a reason to try a method other than fedavg."]
    yield from _section("Compare these methods with fedavg", advised or none)
    behind = [f"{name}: {reason.text} ({reason.source})" for name, reason in advice.behind.items()]
    yield from _section("Not recommended", behind)
    together: dict[str, list[str]] = {}
    for name, why in advice.refused.items():
        together.setdefault(why, []).append(name)
    yield from _section("Cannot run with this spec", [f"{', '.join(each)}: {why}" for why, each in together.items()])
    yield from _section("Limits of this recommendation", advice.limits)


def _columns(advice: Advice) -> Iterator[str]:
    """Yield a line for each of the board's columns that are nearest to the spec."""
    from fedstrata.papers.recommend.advice import shown
    from fedstrata.papers.recommend.columns import CLEAR
    from fedstrata.papers.recommend.properties import SHOWN

    none = f"no property differs by more than {CLEAR:.2f}"
    for column in advice.columns[:NEAREST]:
        pairs = [
            f"{SHOWN[key].label} {shown(getattr(column.properties, key), SHOWN[key].unit)} (your spec: "
            f"{shown(getattr(advice.properties, key), SHOWN[key].unit)})"
            for key in column.clear
        ]
        yield f"{column.name}, distance {column.distance:.2f}: " + ("; ".join(pairs) or none)


def _section(title: str, lines: Iterable[str]) -> Iterator[Text]:
    """Yield a heading and its lines; nothing if there are no lines."""
    from rich.text import Text

    if listed := list(lines):
        yield Text()
        yield Text(title, style="bold")
        yield from (Text(printable(f"  {line}")) for line in listed)
