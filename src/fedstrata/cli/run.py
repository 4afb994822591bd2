"""Add the commands ``fedstrata run``, for one experiment, and ``fedstrata compare``, for several methods and seeds."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fedstrata.base import outer
from fedstrata.base.errors import SpecError
from fedstrata.base.printable import print_lines, printable
from fedstrata.cli import common, first_line
from fedstrata.cli.common import Commands
from fedstrata.cli.layout import say


def add_run(commands: Commands) -> None:
    """Add the command ``fedstrata run``."""
    examples = """
        fedstrata run spec.toml
        fedstrata run spec.toml --set method=scaffold --set training.lr=0.05 --out runs/scaffold
        fedstrata run --resume runs/scaffold --set training.rounds=200
        fedstrata run spec.toml --engine ray
        fedstrata run spec.toml --quiet --json
    """
    more = (
        "The exit code is 0 for success, 1 for a failure, and 2 for invalid input. The exit code is 3 if the run broke "
        "down: from some round on, the server could not use any client's reply."
    )
    defaults = {
        "work": _run,
        "after_interrupt": "To continue from the last checkpoint, use 'fedstrata run --resume DIR'.",
    }
    parser = common.add_command(commands, "run", "run one experiment", examples, more, imports=True, **defaults)
    common.add_spec(parser)
    parser.add_argument(
        "--out", type=Path, help="folder to store the run in (default: a new folder runs/METHOD-DATASET-TIME)"
    )
    parser.add_argument(
        "--engine", default="local", help="program that runs the clients: local (default), ray or nvflare"
    )
    sites = "TOML file that lists sites and their data files, to simulate these sites on this machine"
    parser.add_argument("--sites", type=Path, metavar="TOML", help=sites)
    resume = "folder of the run to resume from its last checkpoint"
    parser.add_argument("--resume", type=Path, metavar="DIR", help=resume)
    common.add_output(parser)


def _run(options: argparse.Namespace) -> int:
    first_line.announce(options, first_line.of_run(options))
    from fedstrata.experiments.run import run
    from fedstrata.reporting.plots import plot_run
    from fedstrata.reporting.progress import Progress
    from fedstrata.runs.run_folder import rounds_done, spec_of
    from fedstrata.spec.experiment import COMPARE, Experiment, read_table

    out, resume = options.out, options.resume is not None
    if resume:
        out = options.resume
        if options.spec is not None or options.out is not None:
            problem = "cannot be combined with SPEC or --out. Remove them. To change settings such as training.rounds, "
            problem += "use --set."
            raise SpecError("--resume", problem, str(out))
        spec = spec_of(out, "--resume", options.overrides)
    else:
        table = read_table(options.spec, options.overrides)
        spec = common.located(options, lambda: Experiment.from_table(table))
        if COMPARE in table:
            note = (
                f"'fedstrata run' ignores [{COMPARE}], and runs only {spec.method.name}. To run all methods, use "
                "'fedstrata compare'."
            )
            say(f"fedstrata: note: {note}")
    name = f"{spec.method.name}-{Path(spec.data.name).stem}"
    with common.run_folder(out, name) as folder:
        with Progress(options.quiet) as progress:
            watch = progress.of_run(spec.method.name, spec.training.rounds, rounds_done(folder))
            if options.sites is not None:
                if options.engine != "local":
                    raise SpecError(
                        "--engine",
                        "has no effect together with --sites, which simulates the sites on this machine. Use "
                        "--engine local, or remove --engine.",
                        options.engine,
                    )
                work = partial(outer.load("sites.rehearsal:rehearse_file"), spec, options.sites, folder)
            else:
                work = partial(run, spec, out=folder, engine=options.engine)
            history = common.located(options, lambda: work(resume=resume, callbacks=[watch]))
        if len(history) > 1:  # a curve needs at least two rounds
            plot_run(history, folder)
    return common.show_run(history, options.json)


def add_compare(commands: Commands) -> None:
    """Add the command ``fedstrata compare``."""
    examples = """
        fedstrata new demo && fedstrata compare demo.toml
        fedstrata compare spec.toml --methods fedavg,scaffold,stratify --seeds 0,1,2 --out runs/first
        fedstrata compare spec.toml --references local,centralised
        fedstrata compare spec.toml --methods fedavg,moon --engine ray
        fedstrata new method && fedstrata compare spec.toml --methods fedavg,method:Steady --set training.rounds=10
    """
    help = "compare methods over several seeds, and write a table and a report"
    more = (
        "To continue an interrupted comparison, repeat the command with the same --out DIR. Each run then continues "
        "from its last checkpoint (evaluation.checkpoint_every). The exit code is 3 if at least one run broke down; "
        "see 'fedstrata run --help'."
    )
    defaults = {"work": _compare, "after_interrupt": common.WITH_OUT}
    parser = common.add_command(commands, "compare", help, examples, more, imports=True, **defaults)
    common.add_spec(parser)
    labels = "comma-separated methods, or labels of the spec's tables [compare.LABEL] (default: all labels)"
    parser.add_argument("--methods", help=labels)
    parser.add_argument("--seeds", help="comma-separated seeds to run each method with (default: the seed of the spec)")
    out = "folder to store the comparison in (default: a new folder runs/compare-DATASET-TIME)"
    parser.add_argument("--out", type=Path, help=out)
    parser.add_argument(
        "--engine", default="local", help="program that runs the clients: local (default), ray or nvflare"
    )
    references = (
        "comma-separated reference runs without federated learning: local (each client trains alone) or "
        "centralised (one client has all samples)"
    )
    parser.add_argument("--references", help=references)
    parser.add_argument("--jobs", type=int, help="maximum number of runs at the same time (default: one per processor)")
    common.add_columns(parser)
    common.add_output(parser)


def _compare(options: argparse.Namespace) -> int:
    first_line.announce(options, first_line.of_compare(options))
    from rich.text import Text

    from fedstrata.experiments.compare import compare, folder_of, is_done, latest, plan
    from fedstrata.reporting.ending import ending
    from fedstrata.reporting.progress import Progress
    from fedstrata.reporting.runs import histories, load_runs
    from fedstrata.reporting.tables import compare_table, to_json
    from fedstrata.spec.experiment import read_table, variants

    jobs, seeds = common.jobs(options), common.seeds(options)
    labels = [label.strip() for label in options.methods.split(",")] if options.methods else None
    table = read_table(options.spec)
    experiments = common.located(options, lambda: variants(table, labels, options.overrides))
    first = next(iter(experiments.values()))
    references = [name.strip() for name in options.references.split(",")] if options.references else []
    planned = common.located(options, lambda: plan(experiments, seeds, references))
    rounds = {key: spec.training.rounds for key, spec in planned.items()}
    folder = common.run_folder(options.out, f"compare-{Path(first.data.name).stem}")
    with folder as out:
        done = [key for key, spec in planned.items() if is_done(folder_of(out, key), spec)]
        if done and not options.quiet:
            say(f"{len(done)} of {len(planned)} runs were already finished")
        given = {"seeds": seeds, "out": out, "engine": options.engine, "references": references, "jobs": jobs}
        with Progress(options.quiet or len(done) == len(planned)) as progress:
            watch = progress.of_runs(rounds, partial(latest, out, planned), done=done)
            asked = common.located(options, partial(compare, experiments, **given, watch=watch))
    runs = histories(load_runs(out).finished())  # the runs of this command, and earlier runs in the folder
    if options.json:
        common.print_json(
            {"folder": str(out), "report": str(out / "report.html"), "rows": to_json(compare_table(runs))}
        )
    else:
        is_comparable = all(spec.data == first.data for spec in experiments.values())
        result = ending(runs, is_comparable=is_comparable, every=options.columns == "all")
        common.show(result.table, "", *(Text(printable(sentence)) for sentence in result.sentences))
        common.show_link("Report", out / "report.html")
        if result.seeds:
            print_lines(f"More seeds: {_again(options, result.seeds, out)}")
        else:
            print_lines(f"Intervals and tests: fedstrata table {shlex.quote(str(out))}")
    return common.exit_code(asked)


def _again(options: argparse.Namespace, seeds: Sequence[int], out: Path) -> str:
    """Return the command that repeats the comparison with more seeds."""
    words = ["fedstrata", "compare", *([options.spec] if options.spec else [])]
    for name in ("methods", "references"):
        if (given := getattr(options, name)) is not None:
            words += [f"--{name}", given]
    words += [word for override in options.overrides for word in ("--set", override)]
    words += [] if options.engine == "local" else ["--engine", options.engine]
    return shlex.join([*words, "--seeds", ",".join(map(str, seeds)), "--out", str(out)])


COMMANDS = (add_run, add_compare)
