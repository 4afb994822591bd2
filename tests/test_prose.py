"""The counts of what is hard to read: each rule finds what it is for, and a count may only fall."""

from __future__ import annotations

import ast
import importlib
import subprocess
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from programs import ROOT, tool


@pytest.fixture(scope="module")
def prose() -> ModuleType:
    return tool("prose")


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("10 unless given.", {"'unless given'": 1}),
        ("It is no folder, and is made anew.", {"'is no'": 1, "'anew'": 1}),
        ("It is not a folder. It is renewed.", {}),
        ("Whoever asks is answered.", {"statements that begin with a question word": 1}),
        ("Ask first. What leaves is counted.", {"statements that begin with a question word": 1}),
        ("What leaves a site?", {}),
        ("What a site\nsends is counted.", {"statements that begin with a question word": 1}),
        ("    clients: Who is\n        asked.", {"statements that begin with a question word": 1}),
        ("A client says\nWhat it has.", {}),
        ("- one\n- What leaves is counted.\n\nThere is\nno other.", {"'is no'": 1}),
    ],
)
def test_what_is_counted_in_a_text(prose: ModuleType, text: str, counts: dict[str, int]) -> None:
    assert prose.counts_of_text(text) == Counter(counts)


def test_what_is_counted_in_a_module(prose: ModuleType) -> None:
    source = 'def f(found):\n """All of them."""\n x.found = 1  # but for one\n # but\n # for another\n g(found=0)\n'
    assert prose.counts_of_module(source) == {
        "docstring summaries of three words or fewer": 1,
        "identifiers called 'found'": 3,
        "'but for'": 2,
    }
    assert prose.counts_of_module('def f():\n    """Return the number of clients."""\n') == {}


def test_a_risen_count_fails_and_is_not_written(
    prose: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prose, "BASELINE", tmp_path / "prose.json")
    monkeypatch.setattr("sys.argv", ["prose.py", "--write"])
    monkeypatch.setattr(prose, "today", lambda: Counter({"a": 2}))
    for before, code, after in (('{"a": 1}', 1, '{"a": 1}'), ('{"a": 3}', 0, '{\n "a": 2\n}\n')):
        prose.BASELINE.write_text(before)
        assert prose.main() == code
        assert prose.BASELINE.read_text() == after
    assert "a  ROSE" in capsys.readouterr().out
    prose.BASELINE.unlink()
    with pytest.raises(FileNotFoundError):
        prose.main()


def test_a_count_above_its_baseline_is_named(prose: ModuleType) -> None:
    assert prose.risen(Counter({"a": 3, "b": 2}), {"a": 3, "b": 1}) == ["b"]
    assert prose.risen(Counter({"new": 1}), {"a": 3}) == ["new"]


@pytest.mark.parametrize(
    ("subject", "good"),
    [
        ("sites, audits: name what was measured", True),
        ("tests: " + "a" * 65, True),
        ("tests: " + "a" * 66, False),
        ("Name what was measured", False),
        ("sites: named what was measured", False),
        ("sites: name what was measured.", False),
    ],
)
def test_what_a_subject_is_like(prose: ModuleType, subject: str, good: bool) -> None:
    assert (prose.SUBJECT.fullmatch(subject) is not None) is good


def test_subjects_are_read_where_there_is_a_history(
    prose: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    assert prose.subjects() == []

    def git(*words: str) -> str:
        call = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    assert prose.subjects() == []
    for subject in ("Before", "tests: check", "After"):
        git("commit", "-q", "--allow-empty", "-m", subject)
    assert prose.subjects() == []
    monkeypatch.setattr(prose, "CHECKED", git("rev-parse", "HEAD~2"))
    assert prose.subjects() == ["After", "tests: check"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("calls")


def test_what_is_too_large_is_counted_by_its_name(
    prose: ModuleType, calls: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "large", lambda: {"classes over 300 lines": {"A": 301}})
    assert prose.large() == {"classes over 300 lines: A": 301}


def test_private_bases_belong_to_a_class_and_of_equal_names_the_largest_counts(calls: ModuleType) -> None:
    tree = ast.parse("class _Base(B):\n def move(self):\n  self.a = 0\nclass B:\n x = 0\nclass A(_Base):\n x = 0")
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert [each.name for each in calls.parts_of(classes[2], classes)] == ["A", "_Base"]
    assert calls.reassigned(classes[0]) == {"a"}
    assert calls.over([("f", 9), ("g", 8), ("f", 3), ("h", 12)], 8) == {"h": 12, "f": 9}


@pytest.mark.parametrize(
    ("message", "faults"),
    [
        ("docs: say why\n\nBecause.\n", 0),
        ("docs: say why\n\n# Please enter the commit message\n", 1),
        ("docs: say why\nBecause.\n", 1),
        ("Words\n", 2),
        (f"docs: {'x' * 70}\n\nBecause.\n", 1),
        ("", 2),
    ],
)
def test_what_a_commit_message_needs(prose: ModuleType, message: str, faults: int) -> None:
    assert len(prose.faults_of_message(message)) == faults
