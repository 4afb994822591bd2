"""``fedstrata table``: what runs add up to."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fedstrata.errors import SpecError, nearest

if TYPE_CHECKING:
    from fedstrata.cli.common import Commands

FORMATS = ("console", "markdown", "latex", "csv")


def add_table(commands: Commands) -> None:
    """``fedstrata table``."""
    parser = commands.add_parser("table", help="methods beside a baseline: intervals, paired differences, tests")
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="folders of comparisons and runs")
    parser.add_argument("--baseline", metavar="LABEL", help="what the others are compared with (default: the first)")
    parser.add_argument(
        "--metric",
        help="comma-separated: final_accuracy, best_accuracy, rounds_to_0.8, …, or a column of metrics.jsonl",
    )
    parser.add_argument(
        "--at",
        action="append",
        metavar="WHAT[=AMOUNT]",
        help="accuracy at equal bytes, samples, seconds or simulated_seconds; the most that all reached unless given",
    )
    parser.add_argument("--test", choices=("t", "wilcoxon"), default="t", help="of paired differences (default: t)")
    parser.add_argument("--format", choices=FORMATS, default="console", help="(default: console)")
    parser.set_defaults(work=_table)


def _table(options: argparse.Namespace) -> int:
    import rich

    from fedstrata.report import contrasts
    from fedstrata.report.runs import by_data, histories, load_runs

    runs = load_runs(options.folders)
    over = runs.finished()
    if left_out := sum(map(len, runs.values())) - sum(map(len, over.values())):
        which = "1 run that has not ended is" if left_out == 1 else f"{left_out} runs that have not ended are"
        print(f"fedstrata: note: {which} left out", file=sys.stderr)
    metrics = [name.strip() for name in options.metric.split(",")] if options.metric else []
    at = None if options.at is None else dict(map(_budget, options.at))
    if options.baseline is not None and options.baseline not in over:
        problem = f"there are: {', '.join(over)}{nearest(options.baseline, over)}"
        raise SpecError("--baseline", problem, options.baseline)
    found = {}
    for data, members in by_data(over).items():
        baseline = options.baseline if options.baseline in members else None
        try:
            found[data] = contrasts.contrast(histories(members), metrics, at, baseline=baseline, test=options.test)
        except SpecError as error:
            raise SpecError(f"--{error.key}", error.problem, error.value) from None
    if options.format == "csv":
        sys.stdout.write(contrasts.to_csv(found))
        return 0
    for data, table in found.items():
        if len(found) > 1:
            print({"latex": "% ", "markdown": "\n", "console": ""}[options.format] + f"On {data or 'unnamed data'}:\n")
        if options.format == "console":
            rich.print(contrasts.to_rich(table))
        else:
            sys.stdout.write({"markdown": contrasts.to_markdown, "latex": contrasts.to_latex}[options.format](table))
    return 0


def _budget(text: str) -> tuple[str, float | None]:
    kind, equals, amount = text.partition("=")
    try:
        return kind.strip(), float(amount) if equals else None
    except ValueError:
        raise SpecError("--at", "expected WHAT=AMOUNT with a number", text) from None


COMMANDS = (add_table,)
