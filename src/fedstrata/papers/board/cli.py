"""Define the command ``fedstrata board``, which ranks methods under a fixed protocol."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fedstrata.base.errors import FedstrataError, SpecError
from fedstrata.cli import common
from fedstrata.cli.layout import say

if TYPE_CHECKING:
    from fedstrata.papers.board.protocol import Column, Entry, Protocol

METHOD = "method or composition of the board, module:Class or FILE.py:Class (default: all methods and compositions)"


def add_board(commands: common.Commands) -> None:
    """Add the commands ``fedstrata board list``, ``board run`` and ``board show`` to the command line."""
    examples = """
        fedstrata board list
        fedstrata board run fedavg fedau --columns dirichlet-label
        fedstrata board show
    """
    help = "rank methods under a fixed protocol of partitions and dropouts"
    board = common.add_command(commands, "board", help, examples)
    actions = board.add_subparsers(required=True, metavar="ACTION")
    _add_list(actions)
    _add_run(actions)
    _add_show(actions)


def _add_list(actions: common.Commands) -> None:
    examples = """
        fedstrata board list
        fedstrata board list --columns dirichlet-label,fedau-markov
    """
    help = "list the columns and methods of the board, with missing runs and expected hours"
    parser = common.add_command(actions, "list", help, examples, imports=True, work=_list)
    _add_selection(parser)
    common.add_output(parser, progress=False)


def _add_run(actions: common.Commands) -> None:
    examples = """
        fedstrata board run
        fedstrata board run my_method:MyMethod --columns dirichlet-label
        fedstrata board run --quick
    """
    help = "tune each method with the same number of trials, and run the method with all seeds"
    more = (
        "Finished runs are not repeated. If you start the command several times at once, the processes share the "
        "missing runs."
    )
    parser = common.add_command(actions, "run", help, examples, more, imports=True, work=_run)
    parser.set_defaults(after_interrupt="To continue from the last checkpoint, repeat the command.")
    _add_selection(parser)
    parser.add_argument("--seeds", help="comma-separated seeds of the runs (default: the seeds of the protocol)")
    parser.add_argument("--runs", type=Path, help="folder that contains the run folders (default: OUT/runs)")
    common.add_output(parser)


def _add_show(actions: common.Commands) -> None:
    examples = """
        fedstrata board show
        fedstrata board show my_method:MyMethod --columns dirichlet-label
    """
    help = "write the page, pictures and JSON file of the board from existing results"
    parser = common.add_command(actions, "show", help, examples, imports=True, work=_show)
    _add_selection(parser, "module:Class or FILE.py:Class of your own method, to show it beside all other methods")
    parser.add_argument("--summary", type=Path, help="file for the results as JSON (default: OUT/board.json)")
    common.add_output(parser, progress=False)


def _add_selection(parser: argparse.ArgumentParser, methods: str = METHOD) -> None:
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=methods)
    help = "columns of the board, separated by commas (default: all except the columns fedau-…)"
    parser.add_argument("--columns", help=help)
    help = "folder for the results (default: board, or quick-board with --quick)"
    parser.add_argument("--out", type=Path, help=help)
    help = "use small data, few rounds and few methods, to test the software in less than a minute"
    parser.add_argument("--quick", action="store_true", help=help)


def _selected(options: argparse.Namespace) -> tuple[Protocol, list[Column], list[Entry], Path]:
    from fedstrata.papers.board.protocol import read

    protocol = read().small() if options.quick else read()
    columns = [name.strip() for name in options.columns.split(",")] if options.columns else []
    out = options.out or Path("quick-board" if options.quick else "board")
    return protocol, protocol.columns(columns), protocol.entries(options.methods), out


def _list(options: argparse.Namespace) -> None:
    from fedstrata.papers.board import progress

    protocol, columns, entries, out = _selected(options)
    rows = progress.progress(protocol, columns, entries, out)
    common.print_result(options, rows, *progress.lines(rows))


def _run(options: argparse.Namespace) -> int:
    from fedstrata.papers.board.progress import progress
    from fedstrata.papers.board.running import Board
    from fedstrata.papers.pages import remaining

    protocol, columns, entries, out = _selected(options)
    seeds = common.seeds(options)
    if unknown := sorted(set(seeds or ()) - set(protocol.seeds)):
        accepted = ",".join(map(str, protocol.seeds))
        raise SpecError("--seeds", f"{unknown[0]} is not a seed of the protocol. Use seeds from {accepted}.")
    stream = sys.stderr if options.json else sys.stdout
    show: Callable[[str], None] = (lambda text: None) if options.quiet else partial(print, file=stream, flush=True)
    if not options.quick:
        asked = replace(protocol, seeds=protocol.seeds if seeds is None else seeds)
        show(remaining(progress(asked, columns, entries, out)["columns"]))
    board = Board(protocol, out, options.runs or out / "runs", seeds, show)
    board.run(columns, entries)
    common.print_result(options, {"folder": out, "failed": board.failed}, f"written to {out}")
    for name, why in board.failed.items():
        say(f"fedstrata: {name}: {' '.join(why.split())}")
    if board.failed:
        raise FedstrataError(f"{len(board.failed)} runs failed. The lines above give the reasons.")
    return 0


def _show(options: argparse.Namespace) -> None:
    from fedstrata.papers.board import pages

    protocol, columns, own, out = _selected(options)
    entries = {entry.name: entry for entry in [*protocol.entries(), *own]}
    written = pages.write(protocol, columns, list(entries.values()), out, options.summary)
    common.print_result(options, {"folder": out, "written": written}, f"written to {out}: {', '.join(written)}")
