"""Text of other parties (names, labels, error texts), made safe for terminals, tables and spreadsheets."""

from __future__ import annotations

from typing import TextIO

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def printable(text: object) -> str:
    r"""Return text in one line, with line breaks, control characters and invisible characters as ``repr`` shows them.

    So no text can move the cursor of a terminal, change the direction of writing or add lines to a log. Text that is
    printable already is not changed, not even its backslashes.

    >>> print(printable("α\nb\x1b[2J"))
    α\nb\x1b[2J
    """
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in str(text))


def print_lines(*lines: object, file: TextIO | None = None) -> None:
    """Print printable lines, by default to standard output."""
    print(*map(printable, lines), sep="\n", file=file, flush=True)


def csv_cell(value: object) -> object:
    r"""Return a value for a CSV file: text is printable and is not a formula for a spreadsheet.

    >>> csv_cell("=1+1"), csv_cell(-1.5)
    ("'=1+1", -1.5)
    """
    if not isinstance(value, str):
        return value
    return f"'{printable(value)}" if value.startswith(_FORMULA) else printable(value)
