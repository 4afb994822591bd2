"""Print what a command will do, before slow steps such as imports and the start of worker processes."""

from __future__ import annotations

import argparse
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstrata.cli.layout import say


def announce(options: argparse.Namespace, text: str) -> None:
    """Print a command's first line of output if standard error is a terminal and ``--quiet`` is not set."""
    if text and sys.stderr.isatty() and not options.quiet:
        say(text)


def of_run(options: argparse.Namespace) -> str:
    """Return the first line that ``fedstrata run`` prints."""
    if options.resume is not None:
        return f"Resuming {options.resume}"
    table = _table(options)
    return f"Running {_name(table, 'method', 'fedavg')} on {_data(table)}{_into(options)}"


def of_compare(options: argparse.Namespace) -> str:
    """Return the first line that ``fedstrata compare`` prints; an empty string if the methods are missing."""
    table = _table(options)
    compared = table.get("compare")
    labels = options.methods.split(",") if options.methods else list(compared) if isinstance(compared, dict) else []
    return f"Comparing {_times(len(labels), table, options)}" if labels else ""


def of_sweep(options: argparse.Namespace) -> str:
    """Return the first line that ``fedstrata sweep`` prints."""
    return f"Trying settings on {_data(_table(options))}{_into(options)}"


def _times(methods: int, table: Mapping[str, Any], options: argparse.Namespace) -> str:
    """Describe a comparison: its number of runs, its data set and its folder."""
    seeds = len(options.seeds.split(",")) if options.seeds else 1
    runs = methods * seeds
    at_once = min(options.jobs or (os.cpu_count() or 1), runs) if options.engine == "local" else options.jobs or 1
    parts = [
        f"{_counted(methods, 'method')} × {_counted(seeds, 'seed')} = {_counted(runs, 'run')} on {_data(table)}",
        *(["references"] if options.references else []),
        *([f"{at_once} at a time"] if at_once > 1 else []),
    ]
    return ", ".join(parts) + _into(options, ", ")


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _into(options: argparse.Namespace, before: str = " ") -> str:
    return f"{before}into {options.out}" if options.out is not None else ""


def _table(options: argparse.Namespace) -> dict[str, Any]:
    """Read the spec without checks, because the command reports errors later."""
    try:
        table = tomllib.loads(Path(options.spec).read_text(encoding="utf-8")) if options.spec else {}
    except (OSError, ValueError, RecursionError):
        table = {}
    return table | {key: value for key, value in _named(options.overrides).items() if value}


def _named(overrides: Sequence[str]) -> dict[str, str]:
    """Return the data set and the method that the overrides select."""
    pairs = [(key.strip().removesuffix(".name"), value.strip(" '\"")) for key, _, value in
             (override.partition("=") for override in overrides)]  # fmt: skip
    return {key: value for key, value in pairs if key in ("data", "method")}


def _name(table: Mapping[str, Any], section: str, default: str) -> str:
    value = table.get(section, default)
    return str(value.get("name", default)) if isinstance(value, dict) else str(value)


def _data(table: Mapping[str, Any]) -> str:
    return Path(_name(table, "data", "digits")).stem
