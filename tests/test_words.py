"""The budget of words: what counts as a word of a page, and which page has too many."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from programs import tool


@pytest.fixture
def budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = tool("words")
    monkeypatch.setattr(module, "LIMITS", tmp_path / "words.json")
    monkeypatch.setattr("sys.argv", ["words.py", "--write"])
    return module


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("# A page\n\nThe loss is 0.5 – or less.\n", 8),
        ("[two words](a-page.md#anchor) and {doc}`a page <page>`", 5),
        ("| method | loss |\n|---|--:|\n| `fedavg` | 0.5 |", 4),
        ("one\n\n```bash\nfedstrata run\n```\n\ntwo", 2),
        (":::{dropdown} Sources\nfolded text\n:::\n\none", 1),
        ("<details><summary>title</summary>\n\nfolded\n\n</details>\none <b>two</b> <!-- three -->", 2),
        ("---\nhtml_theme: x\n---\n\none\n\n::::{grid} 1 2\n:gutter: 3\n:::{grid-item-card} title\ntwo\n:::\n::::", 2),
    ],
)
def test_what_counts_as_a_word(budget: ModuleType, text: str, number: int) -> None:
    assert budget.words(text) == number


def test_tables_of_results_do_not_count(budget: ModuleType) -> None:
    assert budget.words("one\n\n| two |\n|---|\n| three |\n", tables=False) == 1


@pytest.mark.parametrize(
    ("page", "number", "limits", "code", "after"),
    [
        ("docs/a.md", 1101, {"all pages": 9000}, 1, {"all pages": 9000}),
        ("docs/a.md", 1100, {"all pages": 9000}, 0, {"all pages": 1100}),
        ("docs/a.md", 1200, {"all pages": 9000, "docs/a.md": 1300}, 0, {"all pages": 1200, "docs/a.md": 1200}),
        ("docs/a.md", 900, {"all pages": 9000, "docs/a.md": 1300}, 0, {"all pages": 900}),
        ("docs/a.md", 1000, {"all pages": 999}, 1, {"all pages": 999}),
        ("docs/reference/spec/a.md", 2000, {"all pages": 9000}, 0, {"all pages": 2000}),
    ],
)
def test_a_count_above_its_limit_fails_and_limits_only_fall(
    budget: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    page: str,
    number: int,
    limits: dict[str, int],
    code: int,
    after: dict[str, int],
) -> None:
    monkeypatch.setattr(budget, "ROOT", tmp_path)
    monkeypatch.setattr(budget, "FILES", ())
    (tmp_path / page).parent.mkdir(parents=True)
    (tmp_path / page).write_text("word " * number)
    budget.LIMITS.write_text(json.dumps(limits))
    assert budget.main() == code
    assert json.loads(budget.LIMITS.read_text()) == after
