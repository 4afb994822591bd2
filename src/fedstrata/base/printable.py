"""Make strings from other parties, such as names and errors, safe to show in terminals, tables and spreadsheets."""

from __future__ import annotations

from typing import TextIO

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def printable(text: object) -> str:
    r"""Replace line breaks, control characters and invisible characters with escapes, such as ``\n``.

    The result cannot move a terminal's cursor, change the direction of writing or add lines to a log. All other
    characters, including backslashes, do not change.

    >>> print(printable("α\nb\x1b[2J"))
    α\nb\x1b[2J
    """
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in str(text))


def print_lines(*lines: object, file: TextIO | None = None) -> None:
    """Print each text in one line, with escapes for unprintable characters. By default, print to standard output."""
    print(*map(printable, lines), sep="\n", file=file, flush=True)


def csv_cell(value: object) -> object:
    r"""Convert a value so that it is safe in a CSV file.

    Strings become printable, and spreadsheets do not interpret them as formulas.

    >>> csv_cell("=1+1"), csv_cell(-1.5)
    ("'=1+1", -1.5)
    """
    if not isinstance(value, str):
        return value
    return f"'{printable(value)}" if value.startswith(_FORMULA) else printable(value)
