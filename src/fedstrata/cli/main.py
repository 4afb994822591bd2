"""Run the command-line program ``fedstrata``: parse and run a command, and report its errors.

PyTorch, scikit-learn and matplotlib take seconds to import, so commands import them only when needed.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import select
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fedstrata import __version__
from fedstrata.base import outer
from fedstrata.base.errors import DataError, FedstrataError, SpecError, nearest
from fedstrata.base.loading import only_from
from fedstrata.base.signals import TERMINATED, Terminated, ending_in_order
from fedstrata.cli import inspect, masking, predict, results, run, teach
from fedstrata.cli.common import Commands
from fedstrata.cli.layout import Layout, Parser, say

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130

NOT_IMPORTED = (
    "names Python code, which this command does not import by default. If you trust the author of the code, add "
    "--trust, or use a command that trains."
)

REAL_SITES = """\
With the commands below, real sites such as hospitals train together over a network. Simulations do not need these \
commands.

Deploy to real sites"""
GROUPS = {
    "Start": ("new", "explain", "completion"),
    "Run experiments": ("recommend", "run", "compare", "sweep"),
    "Evaluate results": ("table", "report", "predict", "strata", "audit", "reproduce", "board"),
    "Look up": ("methods", "datasets", "settings", "partition"),
    REAL_SITES: (
        *("keys", "request", "deploy", "asks", "approve", "check", "submit", "status"),
        *("verify", "ledger", "renew", "revoke"),
    ),
}
"""The groups of commands in ``fedstrata --help``. The title of the last group begins with two explanatory sentences.
"""

ABOUT = "Federated learning that holds up when data are non-IID and clients drop out."

BEGIN = """examples:
  fedstrata new demo && fedstrata compare demo.toml --out demo    compare four methods in a report
  fedstrata new spec && fedstrata run spec.toml                   run an experiment of your own
  fedstrata explain alpha                                         explain a key of a spec
  fedstrata COMMAND --help                                        show the options of a command
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    The exit code is 0 for success, 1 for an expected failure, and 2 for invalid input. The exit code is 3 if a run
    broke down: from some round on, the server could not use any client's reply. If the command was
    interrupted, the exit code is 128 plus the number of the signal (130 for Ctrl-C).
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # the stream was closed, for example by ``>&-``
            setattr(sys, name, Path(os.devnull).open("r+", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # print "?" for a character that the terminal cannot show, such as "η"
    whole = parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        from fedstrata.cli import completers

        completers.attach(whole)
        teach.complete(whole)
    options = _parse(whole, (sys.argv[1:] if arguments is None else arguments) or ["--help"])
    if any("\0" in str(value) for value in vars(options).values()):
        whole.error("an argument contains a NUL character, which is not allowed. Remove the character.")
    warnings.showwarning = _one_line
    try:
        with ending_in_order(), _imports(options.imports):
            code: int = options.work(options) or 0
            sys.stdout.flush()
        return code
    except (SpecError, DataError) as error:
        say(f"fedstrata: error: {_flat(error)}")
        return BAD_INPUT
    except (FedstrataError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _is_reader_gone():
            return 0
        say(f"fedstrata: {_flat(error)}")
        return FAILED
    except (MemoryError, RuntimeError) as error:
        # PyTorch raises a plain RuntimeError if the memory of the CPU is full.
        if not isinstance(error, MemoryError) and not re.search("allocate memory|out of memory", str(error)):
            raise
        advice = "Use a smaller model or batch size, reduce training.workers, or free memory. Then repeat the command."
        say(f"fedstrata: the memory is full. {advice}")
        return FAILED
    except (KeyboardInterrupt, Terminated) as stop:
        how, code = ("terminated", TERMINATED) if isinstance(stop, Terminated) else ("interrupted", INTERRUPTED)
        next_step = f". {options.after_interrupt}" if "after_interrupt" in options else ""
        say(f"fedstrata: {how}{next_step}")
        return code


def _parse(whole: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments. If the command or an argument is unknown, print a one-line error and exit."""
    commands = next(action.choices for action in whole._actions if isinstance(action, argparse._SubParsersAction))
    name, *_ = arguments
    if name not in commands and not name.startswith("-"):
        problem = f"is not a command{nearest(name, commands)} List all commands with 'fedstrata --help'."
        say(f"fedstrata: error: {SpecError('COMMAND', problem, name)}")
        whole.exit(BAD_INPUT)
    options, unknown = whole.parse_known_args(arguments)
    if unknown:
        hint = nearest(unknown[0].partition("=")[0], commands[name]._option_string_actions)
        problem = f"is not an argument of 'fedstrata {name}'{hint} List all arguments with 'fedstrata {name} --help'."
        say(f"fedstrata: error: {SpecError(unknown[0], problem)}")
        whole.exit(BAD_INPUT)
    return options


@contextmanager
def _imports(allowed: bool) -> Iterator[None]:
    """During the ``with`` block, allow or forbid imports of Python code that a spec names.

    If imports are allowed, a spec may also name modules in the working directory.
    """
    if allowed and "" not in sys.path:
        sys.path.insert(0, "")
    with only_from(None if allowed else (), NOT_IMPORTED):
        yield


def parser() -> argparse.ArgumentParser:
    """Return the argument parser with all commands.

    The parsed options have the attribute ``work``, the function that runs the command. Some commands also set the
    attribute ``after_interrupt``, the advice that is printed after an interrupt.
    """
    usage = "fedstrata [-h] [--version] COMMAND ..."
    whole: argparse.ArgumentParser = Parser(prog="fedstrata", usage=usage, formatter_class=Layout)
    whole.add_argument("--version", action="version", version=f"fedstrata {__version__}")
    commands = whole.add_subparsers(required=True, metavar="COMMAND", prog="fedstrata", help=argparse.SUPPRESS)
    for family in (teach, run, results, predict, inspect, masking, *outer.commands()):
        for add in family.COMMANDS:
            add(commands)
    whole.description = f"{ABOUT}\n\n{_overview(commands)}"
    whole.epilog = BEGIN
    return whole


def _overview(commands: Commands) -> str:
    """Return the text that lists all commands by group."""
    helps = {action.dest: action.help for action in commands._get_subactions()}
    groups = ((title, [name for name in names if name in helps]) for title, names in GROUPS.items())
    return "\n\n".join(
        f"{title}:\n" + "\n".join(f"  {name:<12}{helps[name]}" for name in names) for title, names in groups if names
    )


def _flat(error: Exception) -> str:
    """Return an error message in one line, without the operating system's error number."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = ": ".join(str(part) for part in (error.filename, error.strerror) if part is not None)
    return " ".join(text.splitlines())


def _is_reader_gone() -> bool:
    """Return True if the program that reads standard output, such as ``head``, has closed the pipe.

    Discard further output, so that Python does not raise another error at exit.
    """
    with suppress(AttributeError, OSError, ValueError):  # Windows does not have poll, or standard output is not a file
        descriptor = sys.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, 0)
        if any(event & select.POLLERR for _, event in poll.poll(0)):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
            return True
    return False


def _one_line(message: Warning | str, *_: object, **__: object) -> None:
    say(f"fedstrata: warning: {message}")
