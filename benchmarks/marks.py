"""Write tables into pages of the documentation, between two marks.

For example, the command

    python benchmarks/marks.py docs/results/measurements.md mnist runs/mnist/table.md

puts a file's text between ``<!-- mnist -->`` and ``<!-- end of mnist -->``.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def write(page: Path | None, name: str, lines: list[str]) -> None:
    """Write lines between the marks of a page, indented as far as the marks. Without a page, print the lines.

    Raises:
        ValueError: The page does not have exactly one pair of marks.
    """
    if page is None:
        print("\n".join(lines))
        return
    text, first, last = page.read_text(encoding="utf-8"), f"<!-- {name} -->", f"<!-- end of {name} -->"
    if text.count(first) != 1 or text.count(last) != 1:
        raise ValueError(f"{page} has no {first} with {last} after it, or has them twice")
    before, rest = text.split(first)
    indent = before.rpartition("\n")[2]
    # Without a blank line, Markdown would not recognise a table after the first mark, which is a comment.
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
