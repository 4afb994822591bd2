"""``fedstrata COMMAND``: the commands put together, and what happens when one fails.

PyTorch, scikit-learn and matplotlib take seconds to import: a command imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import io
import os
import select
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from fedstrata import __version__
from fedstrata.base import outer
from fedstrata.base.errors import DataError, FedstrataError, SpecError
from fedstrata.base.loading import only_from
from fedstrata.base.signals import TERMINATED, Terminated, ending_in_order
from fedstrata.cli import inspect, results, run, teach

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130

NOT_IMPORTED = (
    "names code, which this command does not import. If you trust the author, give --trust where the command has it, "
    "or use a command that trains"
)

BEGIN = """to begin with:
  fedstrata new demo && fedstrata compare demo.toml --out demo    four methods, a table, demo/report.html
  fedstrata new spec && fedstrata run spec.toml                   an experiment of your own
  fedstrata explain alpha                                         what a key of a spec means
  fedstrata COMMAND --help                                        examples of each command
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    The exit code is 0, or 2 for bad input, 3 where a run never took a step, and 1 for any other failure we know of.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without "η" shows "?", and the command goes on
    whole = parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may come next
        from fedstrata.cli import completers

        completers.attach(whole)
        teach.complete(whole)
    options = whole.parse_args(arguments)
    warnings.showwarning = _one_line
    try:
        with ending_in_order(), _imports(options.imports):
            code: int = options.work(options)
            sys.stdout.flush()
        return code
    except (SpecError, DataError) as error:
        print(f"fedstrata: error: {_flat(error)}", file=sys.stderr)
        return BAD_INPUT
    except (FedstrataError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _reader_left():
            return 0
        print(f"fedstrata: {_flat(error)}", file=sys.stderr)
        return FAILED
    except (KeyboardInterrupt, Terminated) as stop:
        how, code = ("told to end", TERMINATED) if isinstance(stop, Terminated) else ("interrupted", INTERRUPTED)
        next_step = f"; {options.after_interrupt}" if "after_interrupt" in options else ""
        print(f"fedstrata: {how}{next_step}", file=sys.stderr)
        return code


@contextmanager
def _imports(allowed: bool) -> Iterator[None]:
    """Let the block import code that a spec names, also from the working directory; or refuse to."""
    if allowed and "" not in sys.path:
        sys.path.insert(0, "")
    with only_from(None if allowed else (), NOT_IMPORTED):
        yield


def parser() -> argparse.ArgumentParser:
    """All commands with their arguments.

    Of what it parses, ``work`` is the function to call, and ``after_interrupt``, where there is one, what somebody is
    told who interrupts it.
    """
    whole = argparse.ArgumentParser(
        prog="fedstrata",
        description="Federated learning that holds up when data are non-IID and clients drop out.",
        epilog=BEGIN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole.add_argument("--version", action="version", version=f"fedstrata {__version__}")
    commands = whole.add_subparsers(required=True, metavar="COMMAND")
    for family in (teach, run, results, inspect, *outer.commands()):
        for add in family.COMMANDS:
            add(commands)
    return whole


def _flat(error: Exception) -> str:
    """In one line, also where it quotes somebody else's error."""
    return " ".join(str(error).splitlines())


def _reader_left() -> bool:
    """Whether whoever reads what is printed has read enough, such as head."""
    with suppress(AttributeError, OSError, ValueError):  # no poll, as on Windows; or no file behind what is printed to
        end = sys.stdout.fileno()
        looked = select.poll()
        looked.register(end, 0)
        if any(event & select.POLLERR for _, event in looked.poll(0)):
            os.dup2(os.open(os.devnull, os.O_WRONLY), end)
            return True
    return False


def _one_line(message: Warning | str, *_: object, **__: object) -> None:
    print(f"fedstrata: warning: {message}", file=sys.stderr)
