"""The page docs/project/privacy-tests.md names the test behind each statement on privacy: all of them exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "project" / "privacy-tests.md"


@pytest.mark.slow
def test_every_test_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text(encoding="utf-8")))
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 50
    assert [name for name in sorted(named) if f"def {name}(" not in tests] == []


def test_every_line_of_its_tables_names_one() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert [row for row in rows if "`test_" not in row and not row.endswith("| test |")] == []
