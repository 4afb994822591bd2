"""The command line."""

from __future__ import annotations

import argparse
import itertools
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstrata import __version__

if TYPE_CHECKING:
    from fedstrata.history import History

BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, or 2 for bad input and 1 for any other failure we know of."""
    from fedstrata.errors import DataError, FedstrataError, SpecError

    options = _parser().parse_args(arguments)
    warnings.showwarning = _one_line
    try:
        code: int = options.work(options)
        return code
    except (SpecError, DataError) as error:
        print(f"fedstrata: error: {error}", file=sys.stderr)
        return BAD_INPUT
    except (FedstrataError, OSError) as error:
        print(f"fedstrata: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        again = (
            "go on from the last checkpoint with 'fedstrata run --resume DIR', or with the same 'compare … --out DIR'"
        )
        print(f"fedstrata: interrupted; {again}", file=sys.stderr)
        return 130


def _one_line(message: Warning | str, *_: object, **__: object) -> None:
    print(f"fedstrata: warning: {message}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedstrata",
        description="Federated learning that holds up when data are non-IID and clients drop out.",
    )
    parser.add_argument("--version", action="version", version=f"fedstrata {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run one experiment")
    run.add_argument("spec", nargs="?", help="a TOML file; all defaults without one")
    _common(run)
    run.add_argument("--out", type=Path, help="the run folder; runs/METHOD-DATA-TIME unless given")
    run.add_argument("--engine", default="local", help="where clients live: local (the default), ray or nvflare")
    run.add_argument("--resume", type=Path, metavar="DIR", help="go on with a run from its last checkpoint")
    run.add_argument("--quiet", action="store_true", help="no progress bar")
    run.set_defaults(work=_run)

    compare = commands.add_parser("compare", help="several methods, several seeds, one table and one plot")
    compare.add_argument("spec", nargs="?", help="a TOML file; all defaults without one")
    _common(compare)
    compare.add_argument(
        "--methods", help="comma-separated methods or labels of [compare.LABEL]; all labels unless given"
    )
    compare.add_argument("--seeds", help="comma-separated seeds (default: the spec's)")
    compare.add_argument("--out", type=Path, help="the folder; runs/compare-DATA-TIME unless given")
    compare.add_argument("--jobs", type=int, help="runs at the same time (default: one a processor)")
    compare.add_argument("--quiet", action="store_true", help="no progress bar")
    compare.set_defaults(work=_compare)

    commands.add_parser("methods", help="what methods there are").set_defaults(work=_methods)
    commands.add_parser("datasets", help="what data sets there are").set_defaults(work=_datasets)

    settings = commands.add_parser("settings", help="what a spec can say: sections, names and keys")
    settings.add_argument("section", nargs="?", help="such as availability or method.objective; all unless given")
    settings.add_argument("name", nargs="?", help="one kind of it, such as bernoulli")
    settings.add_argument("--markdown", action="store_true", help="everything, as docs/spec.md has it")
    settings.set_defaults(work=_settings)

    partition = commands.add_parser("partition", help="who gets which labels: a table and a picture")
    partition.add_argument("spec", nargs="?", help="a TOML file; all defaults without one")
    _common(partition)
    partition.add_argument(
        "--out", type=Path, default=Path("partition.png"), help="the picture (default: partition.png)"
    )
    partition.set_defaults(work=_partition)

    strata = commands.add_parser("strata", help="which clients a sampler takes for alike: a picture")
    strata.add_argument("spec", nargs="?", help="a TOML file, or the folder of a run; all defaults without one")
    _common(strata)
    strata.add_argument("--rounds", type=int, default=1, help="rounds to run before looking, for a spec (default: 1)")
    strata.add_argument("--out", type=Path, default=Path("strata.png"), help="the picture (default: strata.png)")
    strata.set_defaults(work=_strata)

    audit = commands.add_parser("audit", help="what a run gives away: attacks on what clients sent")
    audits = audit.add_subparsers(required=True, metavar="WHAT")
    prototypes = audits.add_parser("prototypes", help="draw clients' images from the prototypes that they sent")
    prototypes.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    prototypes.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: RUN/audit)")
    prototypes.add_argument("--clients", type=int, default=3, help="clients to attack, at most (default: 3)")
    prototypes.add_argument("--steps", type=int, default=300, help="optimisation steps of each attack (default: 300)")
    prototypes.add_argument("--seed", type=int, default=0, help="of the attacks (default: 0)")
    prototypes.add_argument(
        "--held-out",
        choices=("test", "spare"),
        default="test",
        help="the attacker's own images: the test set (the default), or training samples that no client holds",
    )
    prototypes.add_argument("--quiet", action="store_true", help="no progress bar")
    prototypes.set_defaults(work=_audit_prototypes)

    report = commands.add_parser("report", help="one self-contained HTML page for runs and comparisons")
    report.add_argument("folders", nargs="+", type=Path, metavar="DIR")
    report.add_argument("--out", type=Path, help="the page (default: report.html in the first folder)")
    report.set_defaults(work=_report)

    deploy = commands.add_parser("deploy", help="certificates, start-up kits and the job for real sites (NVFlare)")
    deploy.add_argument("spec", help="a TOML file")
    _common(deploy)
    deploy.add_argument("--sites", type=Path, required=True, metavar="TOML", help="the server and the sites")
    deploy.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="the folder; one inside it for everybody"
    )
    deploy.add_argument(
        "--try",
        action="store_true",
        dest="trial",
        help="start all of it on this machine, run the experiment, fetch the result to DIR/result and shut down",
    )
    deploy.set_defaults(work=_deploy)

    submit = commands.add_parser("submit", help="bring a deployment's job to its server and fetch the result")
    submit.add_argument("admin", type=Path, metavar="ADMIN", help="the administrator's folder that deploy wrote")
    submit.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the run folder goes")
    submit.add_argument("--wait", type=float, default=60.0, help="seconds to wait for sites to join (default: 60)")
    submit.set_defaults(work=_submit)

    keys = commands.add_parser("keys", help="make the clients' keys for masked labels")
    keys.add_argument("--out", type=Path, default=Path("keys"), metavar="DIR", help="the folder (default: keys)")
    keys.set_defaults(work=_keys)
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        help="override a setting",
    )


def _table(spec: str | None, overrides: Sequence[str]) -> dict[str, Any]:
    from fedstrata.spec import apply_override, read_table

    if spec is not None:
        return read_table(spec, overrides)
    table: dict[str, Any] = {}
    for override in overrides:
        apply_override(table, override)
    return table


def _located(options: argparse.Namespace, work: Any) -> Any:
    """``work()``, whose errors name the line of the spec file."""
    from fedstrata.errors import SpecError
    from fedstrata.spec import placed

    try:
        return work()
    except SpecError as error:
        # A key that --set gave stands in no file.
        given = [override.partition("=")[0].strip() for override in options.overrides]
        by_hand = any(key == error.key or error.key.startswith(f"{key}.") for key in given)
        in_file = options.spec and Path(options.spec).is_file() and not by_hand
        raise (placed(error, options.spec) if in_file else error) from None


def _run(options: argparse.Namespace) -> int:
    from fedstrata import checkpoint
    from fedstrata.errors import SpecError
    from fedstrata.experiment import run
    from fedstrata.report.console import RunProgress
    from fedstrata.report.plots import plot_run
    from fedstrata.run_folder import SPEC
    from fedstrata.spec import COMPARE, Experiment

    if options.resume is not None:
        if options.spec is not None or options.overrides or options.out is not None:
            raise SpecError("--resume", "goes with the run's own spec: no SPEC, --set or --out", str(options.resume))
        if not (options.resume / SPEC).is_file():
            raise SpecError("--resume", "no run folder: it has no spec.toml", str(options.resume))
        spec = Experiment.from_toml(options.resume / SPEC)
        out = options.resume
        found = checkpoint.load(out / "checkpoint")
        done = found.round if found else 0
    else:
        table = _table(options.spec, options.overrides)
        spec = _located(options, lambda: Experiment.from_table(table))
        if COMPARE in table:
            note = f"[{COMPARE}] is for 'fedstrata compare'; this runs {spec.method.name} alone"
            print(f"fedstrata: note: {note}", file=sys.stderr)
        out, done = options.out, 0
    with _folder(out, f"{spec.method.name}-{Path(spec.data.name).stem}") as folder:
        with RunProgress(spec.training.rounds, spec.method.name, options.quiet, done=done) as progress:
            history = _located(
                options,
                lambda: run(
                    spec,
                    out=folder,
                    engine=options.engine,
                    resume=options.resume is not None,
                    callbacks=[progress.update],
                ),
            )
        plot_run(history, folder)
    _show(history)
    return 0


@contextmanager
def _folder(given: Path | None, name: str) -> Iterator[Path]:
    """The folder that was given, else a new one under ``runs``: several processes may start within a second."""
    from fedstrata.comparison import stamp

    if given is not None:
        yield given
        return
    base = Path("runs") / f"{name}-{stamp()}".replace(":", "-")
    for number in itertools.count(1):
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            continue
    try:
        yield folder
    finally:
        with suppress(OSError):  # Nothing was written, as the spec was wrong: nothing is left behind.
            folder.rmdir()
            folder.parent.rmdir()


def _show(history: History) -> None:
    from collections import Counter

    from rich.console import Console

    from fedstrata.jsonl import read_jsonl
    from fedstrata.report.console import summary_panel

    console = Console()
    console.print(summary_panel(history))
    assert history.path is not None
    events = history.path / "events.jsonl"
    found = read_jsonl(events) if events.exists() else []
    wrong = [event for event in found if event["kind"] in ("failed", "refused", "label skipped", "batch skipped")]
    if wrong:
        counts = ", ".join(f"{count} × {kind}" for kind, count in Counter(event["kind"] for event in wrong).items())
        console.print(f"[yellow]{counts}[/]", end="")
        console.print(f"; the first: {wrong[0].get('reason', '')} (all in {events})", highlight=False, markup=False)
    console.print(f"written to {history.path}", highlight=False, markup=False)


def _compare(options: argparse.Namespace) -> int:
    from rich.console import Console

    from fedstrata.comparison import common_seed, compare
    from fedstrata.errors import SpecError
    from fedstrata.report.comparing import CompareProgress
    from fedstrata.report.tables import compare_table, to_rich
    from fedstrata.spec import variants

    if options.jobs is not None and options.jobs < 1:
        raise SpecError("--jobs", "expected a whole number of at least 1", options.jobs)
    labels = [label.strip() for label in options.methods.split(",")] if options.methods else None
    table = _table(options.spec, [])
    experiments = _located(options, lambda: variants(table, labels, options.overrides))
    first = next(iter(experiments.values()))
    seeds = [common_seed(experiments)] if options.seeds is None else _seeds(options.seeds)
    totals = {(label, seed): spec.training.rounds for label, spec in experiments.items() for seed in seeds}
    name = f"compare-{Path(first.data.name).stem}"
    with _folder(options.out, name) as out, CompareProgress(totals, options.quiet) as progress:
        runs = _located(
            options,
            lambda: compare(experiments, seeds=seeds, out=out, jobs=options.jobs, watch=progress.update),
        )
    console = Console()
    console.print(to_rich(compare_table(runs)))
    console.print(f"written to {out}: table.md, accuracy.png, report.html", highlight=False, markup=False)
    return 0


def _seeds(text: str) -> list[int]:
    from fedstrata.errors import SpecError

    try:
        seeds = [int(seed) for seed in text.split(",")]
    except ValueError:
        raise SpecError("--seeds", "expected comma-separated whole numbers", text) from None
    if len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise SpecError("--seeds", "expected different whole numbers of at least 0", text)
    return seeds


def _methods(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from fedstrata.methods.base import METHODS

    table = Table("method", "what it does", "paper", box=None, pad_edge=False)
    for name in METHODS:
        method = METHODS.find(name)
        table.add_row(name, (method.__doc__ or "").strip().splitlines()[0], method.paper)
    Console().print(table)
    return 0


def _settings(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from fedstrata.errors import SpecError, nearest
    from fedstrata.reference import SECTIONS, kinds, markdown, rows, summary

    if options.markdown:
        print(markdown())
        return 0
    console = Console()
    if options.section is None:
        for section in SECTIONS:
            names = [name for name, _ in kinds(section) if name]
            console.print(f"[bold]{section}[/] {' '.join(names)}", highlight=False, soft_wrap=True)
        return 0
    found = dict(kinds(options.section))
    if options.name is not None and options.name not in found:
        raise SpecError("name", f"there are: {', '.join(found)}{nearest(options.name, found)}", options.name)
    for name, cls in found.items():
        if options.name is not None and name != options.name:
            continue
        table = Table("key", "takes", "default", "", title=f"{options.section} {name}".strip(), title_justify="left")
        for key, taken, default, meaning in rows(cls):
            table.add_row(key, taken.replace("`", ""), default or "needed", meaning.replace("``", ""))
        console.print(summary(cls).replace("``", ""), table, sep="\n", highlight=False, markup=False)
    return 0


def _datasets(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from fedstrata.data import available, folders

    table = Table("data set", "what it is", "found", box=None, pad_edge=False)
    for name, description, found in available():
        table.add_row(name, description, "yes" if found else "no")
    console = Console()
    console.print(table)
    console.print(
        f"NAME.npz is looked for in {', '.join(map(str, folders()))}; a path and hub:owner/name work too",
        highlight=False,
    )
    return 0


def _partition(options: argparse.Namespace) -> int:
    from rich.console import Console

    from fedstrata.errors import SpecError
    from fedstrata.partitions import draw_partition, render_table
    from fedstrata.spec import Experiment

    spec: Experiment = _located(options, lambda: Experiment.from_table(_table(options.spec, options.overrides)))
    if options.out.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise SpecError("--out", "expected a picture: .png, .pdf or .svg", str(options.out))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    data = spec.data.load(spec.seed)
    assignment = _located(options, lambda: _split(spec, data))
    draw_partition(assignment, data, options.out)
    console = Console()
    console.print(render_table(assignment, data))
    console.print(f"picture: {options.out}", highlight=False, markup=False)
    return 0


def _split(spec: Any, data: Any) -> Any:
    from fedstrata.config import under

    return under("partition", lambda: spec.partition.split(data, spec.seed))


def _strata(options: argparse.Namespace) -> int:
    from fedstrata.errors import SpecError
    from fedstrata.inspect.strata import draw, strata_after, strata_of_folder
    from fedstrata.preparation import prepare
    from fedstrata.spec import Experiment

    if options.rounds < 1:
        raise SpecError("--rounds", "expected a whole number of at least 1", options.rounds)
    if options.spec is not None and Path(options.spec).is_dir():
        if options.overrides:
            raise SpecError("--set", "a run's settings cannot change; give the spec instead of the folder")
        prepared, view = strata_of_folder(Path(options.spec))
    else:
        prepared = _located(options, lambda: prepare(Experiment.from_table(_table(options.spec, options.overrides))))
        view = strata_after(prepared, options.rounds)
    draw(prepared, view, options.out)
    sizes = [int((view.strata == h).sum()) for h in range(int(view.strata.max()) + 1)]
    print(f"round {view.round}: {len(sizes)} strata of {sizes} clients; {view.purity():.0%} of the samples bear their")
    print(f"stratum's most frequent label; picture: {options.out}")
    return 0


def _audit_prototypes(options: argparse.Namespace) -> int:
    from rich.console import Console

    from fedstrata.audit.outcome import caption, to_rich, write
    from fedstrata.audit.progress import AuditProgress
    from fedstrata.audit.prototypes import audit_prototypes

    with AuditProgress(options.quiet) as progress:
        audit = audit_prototypes(
            options.run,
            clients=options.clients,
            steps=options.steps,
            seed=options.seed,
            held_out=options.held_out,
            watch=progress.update,
        )
    out = options.out or options.run / "audit"
    write(audit, out)
    console = Console()
    console.print(caption(audit), highlight=False, markup=False)
    console.print(to_rich(audit))
    console.print(f"written to {out}: prototypes.png, prototypes.md, prototypes.json", highlight=False, markup=False)
    return 0


def _report(options: argparse.Namespace) -> int:
    from fedstrata.report.html import write_report

    page = write_report(options.folders, options.out or options.folders[0] / "report.html")
    print(page)
    return 0


def _deploy(options: argparse.Namespace) -> int:
    from fedstrata.deploy.federation import Sites
    from fedstrata.deploy.local_deployment import try_out
    from fedstrata.deploy.provision import provision
    from fedstrata.history import History
    from fedstrata.spec import Experiment

    spec: Experiment = _located(options, lambda: Experiment.from_table(_table(options.spec, options.overrides)))
    sites = Sites.read(options.sites)
    if not options.trial:
        _located(options, lambda: provision(spec, sites, options.out))
        print(f"{options.out}: give everybody the folder of their name; its README.md says what to do there")
        return 0
    folder = _located(options, lambda: try_out(spec, sites, options.out, base_dir=options.sites.parent))
    _show(History.load(folder))
    return 0


def _submit(options: argparse.Namespace) -> int:
    from fedstrata.deploy.submit import submit
    from fedstrata.history import History

    _show(History.load(submit(options.admin, options.out, wait=options.wait)))
    return 0


def _keys(options: argparse.Namespace) -> int:
    from fedstrata.stratify.masking.key_store import VARIABLE, Keys

    path = Keys.make().write(options.out)
    print(f"{path}: copy it to every client's site and set {VARIABLE} to its folder there; never give it to the server")
    return 0


if __name__ == "__main__":
    sys.exit(main())
