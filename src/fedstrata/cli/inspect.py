"""Add the commands ``methods``, ``datasets``, ``settings``, ``partition``, ``strata`` and ``report``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from fedstrata.base.errors import SpecError
from fedstrata.base.printable import print_lines, printable
from fedstrata.base.screen import ScreenTable
from fedstrata.cli import common
from fedstrata.cli.common import Commands, add_command, add_output, print_json, print_result


def add_methods(commands: Commands) -> None:
    """Add the command ``fedstrata methods``."""
    examples = """
        fedstrata methods
        fedstrata methods --papers
        fedstrata settings method stratify
    """
    parser = add_command(commands, "methods", "list the federated learning methods", examples, work=_methods)
    parser.add_argument(
        "--papers", action="store_true", help="show the paper of each method instead of its description"
    )
    add_output(parser, progress=False)


def _methods(options: argparse.Namespace) -> None:
    from fedstrata.cli.known import known

    if options.json:
        print_json([dict(zip(("method", "about", "paper"), row, strict=True)) for row in known()["methods"]])
    else:
        papers = options.papers
        rows = [(name, paper if papers else about) for name, about, paper in known()["methods"]]
        _columns(("method", "paper" if papers else "what it does"), rows, one_line=True)


def add_datasets(commands: Commands) -> None:
    """Add the command ``fedstrata datasets``."""
    examples = """
        fedstrata datasets
        FEDSTRATA_DATA=/data fedstrata datasets
    """
    help = "list the data sets that fedstrata knows, and show which of them were found on this machine"
    add_output(add_command(commands, "datasets", help, examples, work=_datasets), progress=False)


def _datasets(options: argparse.Namespace) -> None:
    from fedstrata.data.catalog import available, folders

    if options.json:
        print_json([dict(zip(("data", "about", "found"), row, strict=True)) for row in available()])
        return
    rows = [(name, "yes" if present else "no", about) for name, about, present in available()]
    _columns(("data set", "found", "what it is"), rows)
    where = f"NAME.npz is read from {' or '.join(map(str, folders()))}."
    print(f"{where} Instead of a name, you may give a path or hub:owner/name.")


def add_settings(commands: Commands) -> None:
    """Add the command ``fedstrata settings``."""
    examples = """
        fedstrata settings
        fedstrata settings availability
        fedstrata settings method.objective rebafl
        fedstrata new sampler && fedstrata settings method.client_sampler sampler:LongestAway
        fedstrata explain alpha
    """
    help = "list the sections, names and keys that a spec may contain"
    parser = add_command(commands, "settings", help, examples, imports=True, work=_settings)
    parser.add_argument(
        "section", nargs="?", help="section to list, such as availability or method.objective (default: all)"
    )
    parser.add_argument(
        "name", nargs="?", help="name that the section accepts, such as bernoulli, or module:Class for your own class"
    )
    help = "folder to write a Markdown description of all sections to"
    parser.add_argument("--markdown", type=Path, metavar="DIR", help=help)
    add_output(parser, progress=False)


def _settings(options: argparse.Namespace) -> None:
    from fedstrata.cli.known import find_kind, find_section, known

    if options.json:
        table = known()["settings"] if options.section is None else find_section(options.section)
        print_json(table if options.name is None else find_kind(options.section, options.name))
    elif options.markdown:
        from fedstrata.spec.reference import write_pages

        write_pages(options.markdown)
    elif options.section is None:
        sections = known()["settings"]
        _columns(("section", "names"), [(name, " ".join(section["kinds"])) for name, section in sections.items()])
    elif options.name is not None:
        kind = find_kind(options.section, options.name)
        _keys(f"{options.section} {options.name}", kind["about"], kind["keys"])
    else:
        section = find_section(options.section)
        common = section["common"]
        if common:
            _keys(options.section, "The keys that all names in this section accept.", common)
        for name, kind in section["kinds"].items():
            rows = [row for row in kind["keys"] if row not in common]
            _keys(f"{options.section} {name}".strip(), kind["about"], rows)


def _keys(title: str, about: str, rows: Sequence[Sequence[str]]) -> None:
    import rich
    from rich.text import Text

    rich.print(Text(printable(f"{title}: {about}")))
    if rows:
        _columns(("  key", "takes", "default", "what it is"), [(f"  {key}", *rest) for key, *rest in rows])
    print()


def _columns(headings: Sequence[str], rows: Iterable[Sequence[str]], one_line: bool = False) -> None:
    """Print a table. Long texts wrap or, if ``one_line`` is true, are truncated to one line."""
    words = range(1, len(headings))
    common.show(ScreenTable(headings, list(rows), words=words, every=True, one_line=one_line))


def add_partition(commands: Commands) -> None:
    """Add the command ``fedstrata partition``."""
    examples = """
        fedstrata partition spec.toml
        fedstrata partition --set partition.name=dirichlet --set partition.alpha=0.1 --out skew.png
        fedstrata partition spec.toml --json
    """
    help = "show how many samples of each label each client gets"
    parser = add_command(commands, "partition", help, examples, work=_partition)
    common.add_spec(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("partition.png"), help="image file to write (default: partition.png)"
    )
    common.add_trust(parser)
    common.add_columns(parser)
    add_output(parser, progress=False)


def _partition(options: argparse.Namespace) -> None:
    from fedstrata.base.config import under
    from fedstrata.data.partitions.picture import draw_partition, render_table

    spec = common.experiment(options)
    if options.out.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise SpecError("--out", "is not an image file. Use a name that ends in .png, .pdf or .svg.", str(options.out))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    data = spec.data.load(spec.seed, spec.task)
    assignment = common.located(options, lambda: under("partition", lambda: spec.partition.split(data, spec.seed)))
    draw_partition(assignment, data, options.out)
    if options.json:
        table = assignment.counts(*data.strata_or_one)
        classes = [*data.stratum_names] or ["all samples"]
        print_json({"picture": str(options.out), "classes": classes, "samples": table.tolist()})
    else:
        common.show(render_table(assignment, data, every=options.columns == "all"))
        print_lines(f"picture: {options.out}")


def add_strata(commands: Commands) -> None:
    """Add the command ``fedstrata strata``."""
    examples = """
        fedstrata strata spec.toml --set method=fedsts
        fedstrata strata spec.toml --set method=fedssar --rounds 5 --out strata.png
        fedstrata strata runs/fedsts
    """
    help = "plot the strata (client groups) that a sampler found"
    parser = add_command(commands, "strata", help, examples, work=_strata)
    common.add_spec(
        parser,
        "TOML file that describes the experiment, or folder of a run (default: an experiment with default settings)",
    )
    parser.add_argument(
        "--rounds", type=int, default=1, help="number of rounds to run before plotting, if SPEC is a file (default: 1)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("strata.png"), help="image file to write (default: strata.png)"
    )
    common.add_trust(parser)
    add_output(parser, progress=False)


def _strata(options: argparse.Namespace) -> None:
    from fedstrata.reporting.replayed_strata import strata_after, strata_of_folder
    from fedstrata.reporting.strata import draw_strata
    from fedstrata.runs.preparation import prepare

    if options.rounds < 1:
        raise SpecError("--rounds", "must be an integer of at least 1. Use, for example, --rounds 5.", options.rounds)
    if options.spec is not None and Path(options.spec).is_dir():
        if options.overrides:
            raise SpecError(
                "--set", "cannot change the settings of an existing run. Give a spec instead of the run folder."
            )
        view = strata_of_folder(Path(options.spec))
    else:
        spec = common.experiment(options)
        prepared = common.located(options, lambda: prepare(spec))
        view = strata_after(prepared, options.rounds)
    draw_strata(view, options.out)
    sizes = view.sizes()
    result = {"picture": str(options.out), "round": view.round, "sizes": sizes, "purity": view.purity()}
    text = f"round {view.round}: {len(sizes)} strata of {sizes} clients; {view.purity():.0%} of the samples have the"
    print_result(options, result, text, f"most frequent label of their stratum; picture: {options.out}")


def add_report(commands: Commands) -> None:
    """Add the command ``fedstrata report``."""
    examples = """
        fedstrata report runs/first
        fedstrata report runs/first runs/second --out both.html
    """
    help = "write an HTML report of runs and comparisons"
    parser = add_command(commands, "report", help, examples, work=_report)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="folders of runs or comparisons to show")
    parser.add_argument("--out", type=Path, help="HTML file to write (default: report.html in the first folder)")
    add_output(parser, progress=False)


def _report(options: argparse.Namespace) -> None:
    from fedstrata.reporting.html import write_report

    page = str(write_report(options.folders, options.out or options.folders[0] / "report.html"))
    print_result(options, {"page": page}, page)


COMMANDS = (add_methods, add_datasets, add_settings, add_partition, add_strata, add_report)
