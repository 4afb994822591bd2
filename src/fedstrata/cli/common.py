"""Functions that several commands share: for specs, overrides, errors, output and run folders."""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from fedstrata.base.errors import SpecError
from fedstrata.base.jsonl import jsonable
from fedstrata.base.printable import print_lines
from fedstrata.base.screen import READABLE
from fedstrata.cli.layout import Layout

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from fedstrata.evaluation.history import History
    from fedstrata.spec.experiment import Experiment

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""The type of the object to which each command adds its argument parser."""
R = TypeVar("R")


WITH_OUT = "To continue from the last checkpoint, repeat the command with the same --out DIR."
"""The advice that an interrupted command prints if its runs can be resumed only with ``--out``."""


def add_command(
    commands: Commands, name: str, help: str, examples: str, more: str = "", *, imports: bool = False, **defaults: Any
) -> argparse.ArgumentParser:
    """Add a command whose ``--help`` ends with examples.

    Args:
        commands: The object to which the command is added.
        name: The name of the command.
        help: The purpose of the command, as one line of help.
        examples: The examples, one per line.
        more: Additional text of the help.
        imports: Whether the command may import Python code that a spec names (from installed packages or from the
            working directory). Commands that only inspect specs or results may import code only with ``--trust``
            (``add_trust``).
        defaults: Attributes of the parsed options. For example, ``work`` is the function that runs the command.
    """
    lines = "".join(f"  {line.strip()}\n" for line in examples.strip().splitlines())
    parser = commands.add_parser(
        name,
        help=help,
        description=f"{help[0].upper()}{help[1:]}." + (f"\n\n{more}" if more else ""),
        epilog=f"examples:\n{lines}",
        formatter_class=Layout,
    )
    parser.set_defaults(imports=imports, **defaults)
    return parser


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add the argument ``--trust``, which allows the import of Python code that a spec names."""
    help = "import the Python code that the spec names, as 'fedstrata run' does"
    parser.add_argument("--trust", action="store_true", dest="imports", help=help)


def add_output(parser: argparse.ArgumentParser, progress: bool = True) -> None:
    """Add the argument ``--json``. If ``progress`` is true, also add the argument ``--quiet``."""
    if progress:
        parser.add_argument("--quiet", action="store_true", help="do not print progress")
    parser.add_argument("--json", action="store_true", help="print only the result, as JSON")


def add_columns(parser: argparse.ArgumentParser) -> None:
    """Add the argument ``--columns``, which selects columns of a table."""
    help = "columns of each table to print: fit (as many as fit in the terminal; default) or all"
    parser.add_argument("--columns", choices=("fit", "all"), default="fit", help=help)


def _console() -> Console:
    """Return a console that raises ``BrokenPipeError`` if its output is closed.

    With closed output, Rich's own console would exit with code 1.
    """
    from rich.console import Console

    class Screen(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Screen()


def show(*parts: RenderableType) -> None:
    """Print Rich tables and texts. Lines that are wider than the terminal are not truncated."""
    console = _console()
    for part in parts:
        console.print(part, crop=False)


def show_paragraphs(*paragraphs: Text) -> None:
    """Print paragraphs that wrap between words.

    All lines of a paragraph except the first are indented by two columns.
    """
    from rich.text import Text

    console = _console()
    for paragraph in paragraphs:
        indent = len(paragraph.plain) - len(paragraph.plain.lstrip())
        first, *rest = paragraph.wrap(console, min(console.width, READABLE)) or [paragraph]
        if rest:
            body = paragraph[len(first.plain.rstrip()) :]
            body = body[len(body.plain) - len(body.plain.lstrip()) :]
            body_lines = body.wrap(console, min(console.width, READABLE) - indent - 2)
            rest = [Text.assemble(" " * (indent + 2), line) for line in body_lines]
        for line in (first, *rest):
            line.rstrip()
            console.print(line, crop=False, soft_wrap=True)


def show_link(word: str, path: Path) -> None:
    """Print the URL of a file as a link that can be clicked in the terminal."""
    from rich.console import Console
    from rich.text import Text

    url = path.resolve().as_uri()
    Console().print(Text.assemble(f"{word}: ", (url, f"link {url}")), soft_wrap=True)


def print_json(result: object) -> None:
    """Print a result as JSON, for use by other programs. NaN and infinity are written as null."""
    text = json.dumps(jsonable(result), indent=1, ensure_ascii=False, allow_nan=False)
    print("".join(letter if letter.isprintable() or letter == "\n" else json.dumps(letter)[1:-1] for letter in text))


def print_result(options: argparse.Namespace, result: object, *lines: str) -> None:
    """Print the result of a command, as JSON if ``--json`` is set, and otherwise as lines of text."""
    if options.json:
        print_json(result)
    else:
        print_lines(*lines)


SPEC_HELP = "TOML file that describes the experiment (default: an experiment with default settings)"


def add_spec(parser: argparse.ArgumentParser, help: str = SPEC_HELP) -> None:
    """Add the arguments ``SPEC`` and ``--set``."""
    parser.add_argument("spec", nargs="?", help=help)
    add_overrides(parser)


def add_overrides(
    parser: argparse.ArgumentParser,
    metavar: str = "SECTION.KEY=VALUE",
    help: str = "setting that overrides the spec, such as training.lr=0.1; may be repeated",
) -> None:
    """Add the repeatable argument ``--set``, which overrides settings of a spec."""
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar=metavar, help=help)


def experiment(options: argparse.Namespace) -> Experiment:
    """Create the experiment that the arguments ``SPEC`` and ``--set`` describe."""
    from fedstrata.spec.experiment import Experiment, read_table

    table = read_table(options.spec, options.overrides)
    return located(options, lambda: Experiment.from_table(table))


def located(options: argparse.Namespace, work: Callable[[], R]) -> R:
    """Call ``work`` and return its result.

    If ``work`` raises ``SpecError``, the message also shows the line in the spec file.
    """
    from fedstrata.spec.experiment import with_location

    try:
        return work()
    except SpecError as error:
        # If the wrong key was set with --set, it is not in the spec file, so the message cannot show its line.
        overridden = [override.partition("=")[0].strip() for override in options.overrides]
        by_hand = any(key == error.key or error.key.startswith(f"{key}.") for key in overridden)
        in_file = options.spec and Path(options.spec).is_file() and not by_hand
        error = elsewhere(error)
        raise (with_location(error, options.spec) if in_file else error) from None


def elsewhere(error: SpecError) -> SpecError:
    """Return the error. If the error reports an unknown key, also name the sections that have this key."""
    from fedstrata.cli.known import owners

    outer, _, word = error.key.rpartition(".")
    hinted = "belongs to" in error.problem or "did you mean" in error.problem
    if hinted or not error.problem.startswith("is not a known key") or not (sections := owners(word, besides=outer)):
        return error
    problem, _, accepted = error.problem.partition(". ")
    problem = f"{problem}. The key {word!r} belongs to {' and '.join(sections[:3])}. {accepted}"
    return SpecError(error.key, problem, error.value, error.place)


def seeds(options: argparse.Namespace) -> list[int] | None:
    """Parse the option ``--seeds``. Return None if the option was not given.

    Raises:
        SpecError: A seed is negative, is not an integer, or occurs twice.
    """
    if options.seeds is None:
        return None
    try:
        numbers = [int(seed) for seed in options.seeds.split(",")]
    except ValueError:
        problem = "is not a list of integers. Use, for example, --seeds 0,1,2."
        raise SpecError("--seeds", problem, options.seeds) from None
    if len(set(numbers)) < len(numbers) or min(numbers) < 0:
        problem = "must be integers of at least 0, without repetitions. Use, for example, --seeds 0,1,2."
        raise SpecError("--seeds", problem, options.seeds)
    return numbers


def jobs(options: argparse.Namespace) -> int | None:
    """Return the value of the option ``--jobs``, or None if the option was not given.

    Raises:
        SpecError: The number is below 1.
    """
    number: int | None = options.jobs
    if number is not None and number < 1:
        raise SpecError("--jobs", "must be at least 1. Use, for example, --jobs 4.", number)
    return number


def stamp() -> str:
    """Return the current date and time in a format that is suitable for folder names."""
    return time.strftime("%Y%m%d-%H%M%S")


@contextmanager
def run_folder(given: Path | None, name: str) -> Iterator[Path]:
    """Yield the folder that the user gave, or a new folder.

    New folders are created under ``runs``, and removed at the end if they are empty. Processes that start in the same
    second get different folders.

    Args:
        given: The folder that the user gave; None to create a new folder.
        name: The beginning of a new folder's name. The current time is appended.
    """
    if given is not None:
        yield given
        return
    base = Path("runs") / f"{name}-{stamp()}".replace(":", "-")
    for number in itertools.count(1):
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    try:
        yield folder
    finally:
        with suppress(OSError):  # rmdir fails if the folder is not empty
            folder.rmdir()
            folder.parent.rmdir()


BROKE_DOWN = 3
"""The exit code for a run that broke down: from some round on, the server could not use any client's
reply."""


def show_run(history: History, as_json: bool = False) -> int:
    """Print a run's summary, and return the command's exit code."""
    code = exit_code({"": [history]})
    if as_json:
        print_json({**history.summary, "folder": str(history.path)})
        return code
    import rich

    from fedstrata.reporting.summary import failures, summary_panel

    rich.print(summary_panel(history))
    if (problems := failures(history)) is not None:
        print_lines(problems)
    print_lines(f"written to {history.path}")
    return code


def exit_code(runs: Mapping[str, Sequence[History]]) -> int:
    """Return the exit code of a command after its runs: ``BROKE_DOWN`` if any run broke down, otherwise 0."""
    return BROKE_DOWN if any(history.warning for members in runs.values() for history in members) else 0
