"""Add the commands ``fedstrata table``, which compares runs, and ``fedstrata sweep``, which varies settings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstrata.base.errors import SpecError, not_among
from fedstrata.base.printable import printable
from fedstrata.cli import common, first_line
from fedstrata.cli.common import Commands, add_command, add_output, located, print_json, run_folder
from fedstrata.cli.layout import say

if TYPE_CHECKING:
    from fedstrata.evaluation.history import History
    from fedstrata.experiments.sweep import Sweep
    from fedstrata.reporting.contrasts import Contrasts

FIGURES = (".pdf", ".png", ".svg")
FORMATS = ("console", "markdown", "latex", "csv", "json")


def add_table(commands: Commands) -> None:
    """Add the command ``fedstrata table``."""
    examples = """
        fedstrata table runs/first
        fedstrata table runs/first --baseline fedavg --format latex
        fedstrata table runs/first --metric best_accuracy,rounds_to_0.8 --at bytes=5e7
        fedstrata table runs/first --figure forest.pdf
        fedstrata table runs/hospitals --by-client auroc --format latex
    """
    help = "print a table that compares methods with a baseline"
    parser = add_command(commands, "table", help, examples, work=_table)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="folders of comparisons or runs to read")
    parser.add_argument(
        "--baseline",
        metavar="LABEL",
        help="label of the method that all other methods are compared with (default: the first label)",
    )
    metrics = "comma-separated results to compare, such as final_accuracy, rounds_to_0.8 or a key of metrics.jsonl"
    parser.add_argument("--metric", help=metrics)
    budgets = (
        "cost at which the primary metric is compared: bytes, samples, seconds or simulated_seconds (default AMOUNT: "
        "the largest amount that all runs reached)"
    )
    parser.add_argument("--at", action="append", metavar="WHAT[=AMOUNT]", help=budgets)
    tests = "significance test of the differences, paired by seed: t (default) or wilcoxon"
    parser.add_argument("--test", choices=("t", "wilcoxon"), default="t", help=tests)
    by_client = "metric to show for each client's own test samples, with a row per client (default: accuracy)"
    parser.add_argument("--by-client", nargs="?", const="accuracy", metavar="RESULT", help=by_client)
    figure = "file (.pdf, .png or .svg) for a plot of the differences and their intervals, 3.5 inches wide"
    parser.add_argument("--figure", type=Path, metavar="FILE", help=figure)
    parser.add_argument("--format", choices=FORMATS, default="console", help="format of the table (default: console)")
    common.add_columns(parser)
    parser.add_argument("--json", action="store_const", const="json", dest="format", help="short for --format json")


def _table(options: argparse.Namespace) -> None:
    from fedstrata.reporting import contrasts
    from fedstrata.reporting.runs import by_data, histories, load_runs

    if options.figure is not None:
        if options.figure.suffix.lower() not in FIGURES:
            raise SpecError("--figure", f"must end with one of: {', '.join(FIGURES)}.", str(options.figure))
        if options.by_client is not None:
            problem = "shows differences between methods, not between clients. Remove --by-client."
            raise SpecError("--figure", problem, str(options.figure))
    runs = load_runs(options.folders)
    finished = runs.finished()
    if left_out := sum(map(len, runs.values())) - sum(map(len, finished.values())):
        which = "1 run that has not ended is" if left_out == 1 else f"{left_out} runs that have not ended are"
        say(f"fedstrata: note: {which} left out")
    metrics = [name.strip() for name in options.metric.split(",")] if options.metric else []
    at = None if options.at is None else dict(map(_budget, options.at))
    if options.baseline is not None and options.baseline not in finished:
        problem = not_among("is not a label of a finished run", options.baseline, finished)
        raise SpecError("--baseline", problem, options.baseline)
    members = {data: histories(runs) for data, runs in by_data(finished).items()}
    if options.by_client is not None:
        for data, of_data in members.items():
            _print_heading(options.format, data, len(members))
            _print_by_client(of_data, options.by_client, options.format, options.columns == "all")
        return
    tables = {}
    for data, of_data in members.items():
        baseline = options.baseline if options.baseline in of_data else None
        try:
            tables[data] = contrasts.contrast(of_data, metrics, at, baseline=baseline, test=options.test)
        except SpecError as error:
            raise SpecError(f"--{error.key}", error.problem, error.value) from None
    if options.figure is not None:
        _draw_forest(tables, options.figure)
    if options.format == "json":
        from fedstrata.reporting.tables import compare_table

        print_json({data: contrasts.to_json(compare_table(members[data]), table) for data, table in tables.items()})
        return
    if options.format == "csv":
        sys.stdout.write(contrasts.to_csv(tables))
        return
    for data, table in tables.items():
        _print_heading(options.format, data, len(tables))
        if options.format == "console":
            common.show(contrasts.to_screen(table, options.columns == "all"))
        else:
            sys.stdout.write({"markdown": contrasts.to_markdown, "latex": contrasts.to_latex}[options.format](table))


def _draw_forest(tables: Mapping[str, Contrasts], path: Path) -> None:
    from fedstrata.reporting.forest import draw_forest

    with_baseline = {data: table for data, table in tables.items() if table.baseline is not None}
    if not with_baseline:
        raise SpecError(
            "--figure",
            ("shows differences between methods, but the folders contain only one method. Give more folders."),
            str(path),
        )
    draw_forest(with_baseline, path)
    say(f"fedstrata: note: drew {path}")


def _print_heading(format: str, data: str, tables: int) -> None:
    """If there are several tables and the format allows headings, print the name of the data set as a heading."""
    if tables > 1 and format in ("latex", "markdown", "console"):
        print({"latex": "% ", "markdown": "\n", "console": ""}[format] + f"On {printable(data or 'unnamed data')}:\n")


def _print_by_client(runs: Mapping[str, Sequence[History]], column: str, format: str, every: bool) -> None:
    from fedstrata.reporting import by_client

    table = by_client.by_client(runs, column)
    if format == "console":
        common.show(by_client.to_screen(table, column, every))
    elif format == "json":
        print_json({name: {label: asdict(each) for label, each in row.items()} for name, row in table.items()})
    elif format == "csv":
        sys.stdout.write(by_client.to_csv(table))
    else:
        to_text = {"markdown": by_client.to_markdown, "latex": by_client.to_latex}[format]
        sys.stdout.write(to_text(table, column))


def _budget(text: str) -> tuple[str, float | None]:
    kind, equals, amount = text.partition("=")
    try:
        return kind.strip(), float(amount) if equals else None
    except ValueError:
        raise SpecError("--at", "must have the form COST=NUMBER. Use, for example, --at bytes=5e7.", text) from None


def add_sweep(commands: Commands) -> None:
    """Add the command ``fedstrata sweep``."""
    examples = """
        fedstrata sweep spec.toml --set evaluation.validation=0.1 --set training.lr=0.01,0.03,0.1 --seeds 0,1
        fedstrata sweep spec.toml --set evaluation.validation=0.1 --search training.lr=log:0.001..0.5 --trials 20
    """
    help = "find the best settings on validation samples, by grid search or with Optuna"
    more = (
        "The best settings have the best value of the metric evaluation.primary on validation samples. The setting "
        "evaluation.validation holds out these samples. "
        "The exit code is 3 if at least one run broke down; see 'fedstrata run --help'."
    )
    defaults = {"work": _sweep, "after_interrupt": common.WITH_OUT}
    parser = add_command(commands, "sweep", help, examples, more, imports=True, **defaults)
    parser.add_argument("spec", nargs="?", help=common.SPEC_HELP)
    overrides = "key and the values to try, separated by commas (one value: the key does not vary); may be repeated"
    common.add_overrides(parser, "SECTION.KEY=VALUE,VALUE", overrides)
    ranges = "key and the range that Optuna searches: log:0.001..0.5, uniform:0..1, int:1..8 or choice:16,32"
    parser.add_argument("--search", action="append", default=[], metavar="SECTION.KEY=RANGE", help=ranges)
    trials = "total number of trials, including earlier trials in the folder --out (default: 20)"
    parser.add_argument("--trials", type=int, default=20, help=trials)
    no_pruning = "run every trial to its end, instead of stopping poor trials early"
    parser.add_argument("--no-pruning", action="store_true", help=no_pruning)
    parser.add_argument(
        "--seeds", help="comma-separated seeds to run each setting with (default: the seed of the spec)"
    )
    parser.add_argument(
        "--out", type=Path, help="folder to store the sweep in (default: a new folder runs/sweep-DATASET-TIME)"
    )
    parser.add_argument("--jobs", type=int, help="maximum number of runs at the same time (default: one per processor)")
    common.add_columns(parser)
    add_output(parser)


def _sweep(options: argparse.Namespace) -> int:
    first_line.announce(options, first_line.of_sweep(options))
    from fedstrata.experiments.sweep import BEST, FIGURES, TABLE, TUNED, figures, to_screen
    from fedstrata.spec.experiment import Experiment, read_table

    jobs, seeds = common.jobs(options), common.seeds(options)
    fixed, grid = _grid(options.overrides)
    if options.search and grid:
        key = next(iter(grid))
        raise SpecError(
            "--set",
            f"several values of a key cannot be combined with --search. Use --search {key}=choice:A,B.",
            key,
        )
    table = read_table(options.spec, fixed)
    spec = located(options, lambda: Experiment.from_table(table))
    seeds = [spec.seed] if seeds is None else seeds
    with run_folder(options.out, f"sweep-{Path(spec.data.name).stem}") as out:
        settings = {"seeds": seeds, "out": out, "jobs": jobs}
        result = _search(options, table, settings) if options.search else _grid_search(options, table, grid, settings)
    if not options.json:
        common.show(to_screen(result, options.columns == "all"))
    lines = [f"written to {out}: {TABLE}, {FIGURES}, {BEST}"]
    if len(result.tuned) > 1:
        lines.append(f"compare the methods, each with its best settings: fedstrata compare {out / TUNED}")
    common.print_result(options, {"folder": str(out), **figures(result)}, *lines)
    return common.exit_code(result.histories)


def _grid_search(
    options: argparse.Namespace, table: dict[str, Any], grid: dict[str, list[Any]], settings: dict[str, Any]
) -> Sweep:
    from fedstrata.experiments.compare import folder_of, is_done, latest
    from fedstrata.experiments.sweep import cells, sweep
    from fedstrata.reporting.progress import Progress

    planned = located(options, lambda: cells(table, grid))
    seeds = settings["seeds"]
    rounds = {(label, seed): cell.spec.training.rounds for label, cell in planned.items() for seed in seeds}
    with Progress(options.quiet) as progress:
        specs = {key: planned[key[0]].spec for key in rounds}
        done = [key for key, spec in specs.items() if is_done(folder_of(settings["out"], key), spec)]
        watch = progress.of_runs(rounds, partial(latest, settings["out"], specs), done=done)
        return located(options, lambda: sweep(table, grid, watch=watch, **settings))


def _search(options: argparse.Namespace, table: dict[str, Any], settings: dict[str, Any]) -> Sweep:
    from fedstrata.experiments.search import search

    space = dict[str, str]()
    for given in options.search:
        key, equals, text = given.partition("=")
        if not equals or key.strip() in space:
            problem = (
                "the key is given twice. Remove one of the options."
                if equals
                else "must have the form SECTION.KEY=RANGE. Use, for example, training.lr=log:0.001..0.5."
            )
            raise SpecError("--search", problem, given)
        space[key.strip()] = text
    settings |= {"trials": options.trials, "prune": not options.no_pruning, "progress": not options.quiet}
    return located(options, lambda: search(table, space, **settings))


def _grid(overrides: Sequence[str]) -> tuple[list[str], dict[str, list[Any]]]:
    """Split overrides into fixed settings and a grid.

    Returns:
        The overrides with a single value, and a mapping from each key with several values to these values.
    """
    from fedstrata.spec.experiment import parse_value, split_values

    fixed, grid = [], dict[str, list[Any]]()
    for override in overrides:
        key, _, text = override.partition("=")
        if len(values := split_values(text)) > 1:
            grid[key.strip()] = [parse_value(value) for value in values]
        else:
            fixed.append(override)
    return fixed, grid


COMMANDS = (add_table, add_sweep)
