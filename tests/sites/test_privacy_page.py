"""The page on privacy names the test behind each line: all of them exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "privacy" / "index.md").read_text(encoding="utf-8")))
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 30
    assert [name for name in sorted(named) if f"def {name}(" not in tests] == []


def test_every_line_of_its_tables_names_one() -> None:
    page = (ROOT / "docs" / "privacy" / "index.md").read_text(encoding="utf-8")
    tables = page.partition("## Who sees what")[2].partition("## The ledger")[0]
    rows = [line for line in tables.splitlines() if line.startswith("|") and not line.startswith("|---")]
    without = [line for line in rows if "`test_" not in line and "| tests |" not in line]
    assert [line for line in without if "the same |" not in line and "**yes** | |" not in line] == []
