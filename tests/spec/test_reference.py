"""What a spec can say, as the command line and the pages in docs/reference/spec tell it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.cli import main
from fedstrata.evaluation.history import STANDARD, History
from fedstrata.spec.reference import SECTIONS, kinds, rows, specific

DOCS = Path(__file__).parents[2] / "docs"
PAGES = DOCS / "reference" / "spec"


@pytest.mark.slow
def test_the_pages_are_what_the_settings_say_now(tmp_path):
    for page in PAGES.glob("*.md"):
        shutil.copy(page, tmp_path)
    assert main(["settings", "--markdown", str(tmp_path)]) == 0
    for page in tmp_path.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert (PAGES / page.name).read_text(encoding="utf-8") == text, (
            f"docs/reference/spec/{page.name} is out of date: run 'make reference'"
        )


@pytest.mark.slow
def test_each_setting_is_described_once(tmp_path):
    main(["settings", "--markdown", str(tmp_path)])
    text = "\n".join(page.read_text(encoding="utf-8") for page in tmp_path.glob("*.md"))
    items = [line for line in text.splitlines() if line.startswith("- `") and ": as in [`" not in line]
    assert len(items) == len(set(items)) > 150
    for section in SECTIONS:
        for name, cls in kinds(section):
            assert all(f"`{row[0]}`" in text or f"`{row[0]} = " in text for row in rows(cls)), f"{section} {name}"
            assert f"## `{name or section}`" in text


def test_the_page_on_runs_has_every_key_of_a_record_and_of_the_summary():
    page = (DOCS / "reference" / "run-folder.md").read_text(encoding="utf-8")
    missing = [key for key in [*STANDARD, *History().summary] if f"`{key}`" not in page]
    assert not missing


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_says_what_it_means_and_what_it_takes(section):
    for name, cls in kinds(section):
        for key, taken, _, meaning in rows(cls):
            assert meaning, f"{section} {name} {key} has no line under Args"
            assert taken != "anything", f"{section} {name} {key}"


def words(kind) -> set[str]:
    """The words that a type takes."""
    if get_origin(kind) is Literal:
        return {word for word in get_args(kind) if isinstance(word, str)}
    return {word for part in get_args(kind) for word in words(part)}


@pytest.mark.parametrize("section", SECTIONS)
def test_words_are_hyphenated(section):
    for name, cls in kinds(section):
        taken = {word for field in cls.model_fields.values() for word in words(field.annotation)}
        assert not [word for word in {name, *taken} if "_" in word]


def test_limits_and_defaults_are_those_of_the_settings():
    found = {row[0]: row[1:3] for row in specific("availability", dict(kinds("availability"))["persistent"])}
    assert found == {"p": ("number in (0, 1]", "0.5"), "period": ("integer > 0", "20")}
    assert ("mode", "`batch`, `single`, `hybrid`", "batch") in {
        row[:3] for row in specific("method", dict(kinds("method"))["stratify"])
    }
    assert {row[0]: row[2] for row in rows(fs.Trace)}["file"] == ""


@pytest.mark.slow
def test_the_command_shows_one_kind(capsys):
    assert main(["settings", "availability", "persistent"]) == 0
    shown = capsys.readouterr().out
    assert "period" in shown
    assert "bernoulli" not in shown
    assert main(["settings"]) == 0
    assert "method.objective" in capsys.readouterr().out
    assert main(["settings", "availability", "persistant"]) == 2
    assert "did you mean 'persistent'" in capsys.readouterr().err
    with pytest.raises(SpecError, match=r"Use one of: data, data.schema"):
        list(kinds("partitions"))
