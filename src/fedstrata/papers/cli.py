"""Define the command ``fedstrata reproduce``, which repeats experiments of four papers and judges the papers' claims.

``COMMANDS`` contains the functions that add the commands ``reproduce``, ``recommend`` and ``board``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fedstrata.base.errors import FedstrataError
from fedstrata.cli import common
from fedstrata.cli.layout import say
from fedstrata.papers.board.cli import add_board
from fedstrata.papers.recommend.command import add_recommend


def add_reproduce(commands: common.Commands) -> None:
    """Add the command ``fedstrata reproduce`` to the command line."""
    examples = """
        fedstrata reproduce --list
        fedstrata reproduce rebafl/fashion20 --seeds 0
        fedstrata reproduce --quick
    """
    help = "reproduce the tables of four papers, and judge the papers' claims"
    parser = common.add_command(commands, "reproduce", help, examples, imports=True, work=_reproduce)
    parser.set_defaults(after_interrupt="To continue from the last checkpoint, repeat the command.")
    help = "papers or tables to reproduce, such as rebafl or rebafl/fashion20 (default: all)"
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=help)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="run only small experiments (minutes), which test the software but not the papers' claims",
    )
    parser.add_argument("--seeds", help="comma-separated seeds of the runs (default: the seeds of each table)")
    help = "device on which the clients train: cpu, auto, cuda or cuda:N (default: cpu)"
    parser.add_argument("--device", default="cpu", help=help)
    parser.add_argument(
        "--out", type=Path, help="folder for the pages and results (default: reproduced/, or quick/ with --quick)"
    )
    parser.add_argument("--runs", type=Path, help="folder that contains the run folders (default: OUT/runs)")
    parser.add_argument(
        "--list",
        action="store_true",
        help="list the tables, their numbers of runs, and the expected time for missing runs",
    )
    parser.add_argument("--show", action="store_true", help="write the pages from existing results, without new runs")
    common.add_output(parser)


def _reproduce(options: argparse.Namespace) -> int:
    from fedstrata.papers import pages, running
    from fedstrata.papers.tables import chosen

    tables = chosen(options.tables)
    out = options.out or Path("quick" if options.quick else "reproduced")
    if options.list:
        known = running.known(out)
        if options.json:
            common.print_json(pages.progress(tables.values(), known))
        else:
            print(pages.overview(tables.values(), known))
        return 0
    failed: dict[str, str] = {}
    if not options.show:
        runs, seeds, show = options.runs or out / "runs", common.seeds(options), _show(options)
        device, quick = options.device, options.quick
        if not quick:
            show(pages.remaining(pages.progress(tables.values(), running.known(out), seeds=seeds)))
        failed = running.run(tables.values(), out, runs, quick=quick, seeds=seeds, device=device, show=show)
    written = pages.write(out, quick=options.quick)
    if options.json:
        common.print_json({"folder": out, "written": written, "failed": failed})
    else:
        print(f"written to {out}: {', '.join(written)}")
    wrong = {**(pages.missing(tables.values(), out, quick=True) if options.quick else {}), **failed}
    if wrong and not options.show:
        for name, why in wrong.items():
            say(f"fedstrata: {name}: {' '.join(why.split())}")
        raise FedstrataError(f"{len(wrong)} runs or files are missing. The lines above give the reasons.")
    return 0


def _show(options: argparse.Namespace) -> Callable[[str], None]:
    """Return a function that prints a line about a finished run. With ``--json``, the line goes to standard error."""
    if options.quiet:
        return lambda text: None
    return partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)


COMMANDS = (add_reproduce, add_recommend, add_board)
