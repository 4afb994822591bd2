"""Count the words of each page of the documentation, and fail if a page or all pages together have too many.

python tools/words.py            # prints the words of each page beside the page's limit
python tools/words.py --write    # lowers the limits to today's counts

A word is a group of characters with a letter or a digit. Code blocks, folded text, addresses of links and the tables of
results are not counted. ``words.json`` has a limit for each page above the limit of all other pages, and for the sum.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = Path(__file__).with_name("words.json")
FILES = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
GENERATED = ("docs/concepts/", "docs/gallery/", "docs/results/tables/", "docs/reference/command-line.md")
"""Pages that the build of the site writes; the pages in ``FILES`` are copied to ``docs/project``."""
REFERENCE = "docs/reference/spec/"
PAGE = 1100
"""The largest number of words of a page outside ``REFERENCE``."""
TOTAL = "all pages"

UNCOUNTED = (
    re.compile(r"\A---\n.*?\n---\n", re.DOTALL),
    re.compile(r"^( *)(`{3,})[^\n]*\n.*?^\1\2 *$", re.DOTALL | re.MULTILINE),
    re.compile(r"^(:{3,})\{dropdown\}.*?^\1 *$", re.DOTALL | re.MULTILINE),
    re.compile(r"<details.*?</details>", re.DOTALL),
    re.compile(r"<!--.*?-->|<[a-z/][^>]*>", re.DOTALL),
    re.compile(
        r"\]\([^)\s]*\)|^\[[^\]]+\]: .*$|^:{3,}\{[^}]*\}[^\n]*$|^:[a-z-]+:.*$|\{(?:doc|ref|octicon)\}", re.MULTILINE
    ),
)
"""Patterns of text that is not counted: settings of a page, code, folded text, HTML, addresses and directives."""
TABLE = re.compile(r"^\|.*$", re.MULTILINE)
WORD = re.compile(r"\S*\w\S*")


def pages() -> list[str]:
    """List the paths of all pages that are written by hand or generated from the settings."""
    copied = {f"docs/project/{name.lower()}" for name in FILES} | {"docs/deploy/containers.md"}
    inside = (path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))
    return [*FILES, *(page for page in inside if page not in copied and not page.startswith(GENERATED))]


def words(text: str, tables: bool = True) -> int:
    """Count the words of a page.

    Args:
        text: The page in Markdown.
        tables: Whether the words in tables count.
    """
    for pattern in UNCOUNTED if tables else (*UNCOUNTED, TABLE):
        text = pattern.sub(" ", text)
    return len(WORD.findall(text))


def today() -> dict[str, int]:
    """Count the words of each page, and of all pages together. Tables of results do not count."""
    count = {page: words((ROOT / page).read_text(encoding="utf-8"), "docs/results/" not in page) for page in pages()}
    return {**count, TOTAL: sum(count.values())}


def limit(page: str, limits: dict[str, int]) -> int:
    """Return the largest number of words that a page may have."""
    return limits.get(page, sys.maxsize if page.startswith(REFERENCE) else PAGE)


def main() -> int:
    """Compare the counts with the limits; return 1 if a count is above its limit."""
    count, limits = today(), json.loads(LIMITS.read_text(encoding="utf-8"))
    longer = [page for page in count if count[page] > limit(page, limits)]
    for page in sorted(count, key=count.__getitem__):
        print(f"{count[page]:6} {page}{f'  LIMIT {limit(page, limits)}' if page in longer else ''}")
    if "--write" in sys.argv and not longer:
        kept = {page: count[page] for page in sorted(limits) if page == TOTAL or count.get(page, 0) > PAGE}
        LIMITS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return int(bool(longer))


if __name__ == "__main__":
    sys.exit(main())
