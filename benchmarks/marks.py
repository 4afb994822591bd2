"""Tables in the documentation are written by programs, between two marks.

    python benchmarks/marks.py docs/results/measurements.md mnist runs/mnist/table.md

puts a file's text between ``<!-- mnist -->`` and ``<!-- end of mnist -->``.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def write(page: Path, name: str, lines: list[str]) -> None:
    """Put lines between the marks of a page, as far to the right as these are.

    Raises:
        ValueError: The page does not have them.
    """
    text, first, last = page.read_text(encoding="utf-8"), f"<!-- {name} -->", f"<!-- end of {name} -->"
    if text.count(first) != 1 or text.count(last) != 1:
        raise ValueError(f"{page} has no {first} with {last} after it, or has them twice")
    before, rest = text.split(first)
    indent = before.rpartition("\n")[2]
    # A blank line: a table right below a comment is none.
    new = "\n".join([first, "", *(f"{indent}{line}".rstrip() for line in lines), indent + last])
    page.write_text(before + new + rest.split(last)[1], encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("name")
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    write(options.page, options.name, options.file.read_text(encoding="utf-8").strip().splitlines())


if __name__ == "__main__":
    main()
