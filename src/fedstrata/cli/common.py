"""What commands share: a spec with its overrides, errors that name a line, and the folder of a run."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fedstrata.base.errors import SpecError

if TYPE_CHECKING:
    from fedstrata.evaluation.history import History
    from fedstrata.spec.experiment import Experiment

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
    """Where a command adds its parser."""

R = TypeVar("R")


WITH_OUT = "go on from the last checkpoint with the same command and its --out DIR"
"""What somebody is told who interrupts a command that has a folder of its own making unless it is given one."""


def add_command(
    commands: Commands, name: str, help: str, examples: str, more: str = "", *, imports: bool = False
) -> argparse.ArgumentParser:
    """Add a parser whose ``--help`` ends with examples.

    Args:
        commands: Where it is added.
        name: What it is called.
        help: What it does, in one line.
        examples: A line each, as somebody would type it.
        more: What else there is to say.
        imports: Whether the command imports code that a spec names, also from the working directory. A command that
            only looks at a spec or at a result never does, except with ``--trust`` (``add_trust``).
    """
    lines = "".join(f"  {line.strip()}\n" for line in examples.strip().splitlines())
    parser = commands.add_parser(
        name,
        help=help,
        description=f"{help[0].upper()}{help[1:]}." + (f"\n\n{more}" if more else ""),
        epilog=f"examples:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(imports=imports)
    return parser


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add the argument ``--trust``."""
    parser.add_argument(
        "--trust", action="store_true", dest="imports", help="import the code that the spec names, as 'run' does"
    )


def add_output(parser: argparse.ArgumentParser, progress: bool = True) -> None:
    """The arguments ``--json``, and ``--quiet`` where there is progress to leave out."""
    if progress:
        parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--json", action="store_true", help="the result as JSON on standard output, and nothing else")


def print_json(found: object) -> None:
    """Print a result for programs; what is no number becomes null."""
    json.dump(_finite(found), sys.stdout, indent=1, ensure_ascii=False, default=str, allow_nan=False)
    print()


def _finite(found: object) -> object:
    # jsonl.jsonable does more, and imports PyTorch for it, which a command that prints words need not wait for.
    if isinstance(found, float):
        return found if math.isfinite(found) else None
    if isinstance(found, Mapping):
        return {str(key): _finite(value) for key, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [_finite(value) for value in found]
    return found


def add_spec(parser: argparse.ArgumentParser, help: str = "a TOML file; all defaults without one") -> None:
    """The arguments ``SPEC`` and ``--set``."""
    parser.add_argument("spec", nargs="?", help=help)
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """The argument ``--set``."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        help="override a setting, such as training.lr=0.1",
    )


def read_spec(path: str | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The tables of the spec file, or none without one, with overrides applied."""
    from fedstrata.spec.experiment import apply_override, read_table

    if path is not None:
        return read_table(path, overrides)
    table: dict[str, Any] = {}
    for override in overrides:
        apply_override(table, override)
    return table


def experiment(options: argparse.Namespace) -> Experiment:
    """The experiment of ``SPEC`` and ``--set``."""
    from fedstrata.spec.experiment import Experiment

    table = read_spec(options.spec, options.overrides)
    return located(options, lambda: Experiment.from_table(table))


def located(options: argparse.Namespace, work: Callable[[], R]) -> R:
    """``work()``, whose errors name the line of the spec file."""
    from fedstrata.spec.experiment import with_location

    try:
        return work()
    except SpecError as error:
        # A key that --set gave stands in no file.
        given = [override.partition("=")[0].strip() for override in options.overrides]
        by_hand = any(key == error.key or error.key.startswith(f"{key}.") for key in given)
        in_file = options.spec and Path(options.spec).is_file() and not by_hand
        error = elsewhere(error)
        raise (with_location(error, options.spec) if in_file else error) from None


def elsewhere(error: SpecError) -> SpecError:
    """An error about an unknown key, with the sections that do have it."""
    from fedstrata.cli.known import owners

    *outer, word = error.key.split(".")
    if not error.problem.startswith("unknown key") or "belongs to" in error.problem or "did you mean" in error.problem:
        return error
    if not (places := owners(word, besides=".".join(outer))):
        return error
    return SpecError(error.key, f"{error.problem}; {word} belongs to {' and '.join(places[:3])}", error.value)


def seeds(options: argparse.Namespace) -> list[int] | None:
    """The seeds of ``--seeds``; None where it was not given.

    Raises:
        SpecError: They are no different whole numbers of at least 0.
    """
    if options.seeds is None:
        return None
    try:
        found = [int(seed) for seed in options.seeds.split(",")]
    except ValueError:
        problem = "expected comma-separated whole numbers, such as --seeds 0,1,2"
        raise SpecError("--seeds", problem, options.seeds) from None
    if len(set(found)) < len(found) or min(found) < 0:
        problem = "expected different whole numbers of at least 0, such as --seeds 0,1,2"
        raise SpecError("--seeds", problem, options.seeds)
    return found


def jobs(options: argparse.Namespace) -> int | None:
    """The number of ``--jobs``; None where it was not given.

    Raises:
        SpecError: It is below 1.
    """
    found: int | None = options.jobs
    if found is not None and found < 1:
        raise SpecError("--jobs", "expected a whole number of at least 1, such as --jobs 4", found)
    return found


def stamp() -> str:
    """Return the date and time as part of a folder's name."""
    return time.strftime("%Y%m%d-%H%M%S")


@contextmanager
def run_folder(given: Path | None, name: str) -> Iterator[Path]:
    """The folder that was given, else a new one under ``runs``: several processes may start within a second."""
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


NO_STEP = 3
"""The exit code where a run, or one of several, never took a step for want of replies that could be used."""


def show_run(history: History, as_json: bool = False) -> int:
    """Print how a run went; the exit code."""
    if as_json:
        print_json({**history.summary, "folder": str(history.path)})
        return NO_STEP if history.warning else 0
    import rich

    from fedstrata.reporting.summary import failures, summary_panel

    rich.print(summary_panel(history))
    if (problems := failures(history)) is not None:
        print(problems)
    print(f"written to {history.path}")
    return NO_STEP if history.warning else 0


def exit_code(runs: Mapping[str, Sequence[History]]) -> int:
    """The exit code of several runs."""
    return NO_STEP if any(history.warning for members in runs.values() for history in members) else 0
