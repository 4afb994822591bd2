"""Format help and messages for terminals of any width: text wraps between words, and commands do not wrap."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from typing import NoReturn

from fedstrata.base.printable import printable
from fedstrata.base.screen import READABLE, WORDS

COLUMNS = re.compile(r"(?P<name> +\S.*?) {2,}(?P<text>\S.*)")
"""The pattern of an indented line with two columns: a name or command, and its description."""


class Layout(argparse.HelpFormatter):
    """A formatter for help. It keeps the line breaks of descriptions and examples, and wraps long lines."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=min(shutil.get_terminal_size().columns - 2, READABLE))
        # Set a minimum width for the first column. The width that argparse computes is too small for the names of
        # subcommands.
        self._action_max_length = 14

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(part for line in text.splitlines() for part in wrapped(line, width))

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _wrap(text, width)


class Parser(argparse.ArgumentParser):
    """An argument parser that reports errors as the commands do."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and exit with code 2."""
        self.print_usage(sys.stderr)
        say(f"{self.prog}: error: {message}")
        self.exit(2)


def say(message: object) -> None:
    """Print an error or a note on standard error.

    In a terminal, the text wraps between words. Elsewhere, it is one line.
    """
    text = printable(message)
    if sys.stderr.isatty():
        text = "\n".join(_wrap(text, min(shutil.get_terminal_size().columns, READABLE), rest="  "))
    print(text, file=sys.stderr, flush=True)


def wrapped(line: str, width: int) -> list[str]:
    """Wrap a line of a description or of examples.

    An indented line with only one column is a command to copy, and does not wrap. Text in a second column wraps within
    this column. If the second column would be too narrow, the text goes below the name.

    >>> wrapped("  fedstrata new spec    write a spec", 30)
    ['  fedstrata new spec', '      write a spec']
    """
    if len(line) <= width:
        return [line]
    if columns := COLUMNS.fullmatch(line):
        name, start = columns["name"], columns.start("text")
        if width - start >= WORDS:
            return _wrap(columns["text"], width, line[:start], " " * start)
        return [name, *_wrap(columns["text"], width, " " * 6, " " * 6)]
    return [line] if line.startswith(" ") else _wrap(line, width)


def _wrap(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
