"""The counts of what is hard to read: each rule finds what it is for, and a count may only fall."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).resolve().parents[1] / "tools" / "prose.py"


@pytest.fixture(scope="module")
def prose() -> ModuleType:
    if not FILE.exists():
        pytest.skip("no tools beside an installed package")
    spec = importlib.util.spec_from_file_location("prose", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("10 unless given.", {"'unless given'": 1}),
        ("It is no folder, and is made anew.", {"'is no'": 1, "'anew'": 1}),
        ("It is not a folder. It is renewed.", {}),
        ("Whoever asks is answered.", {"statements that begin with a question word": 1}),
        ("Ask first. What leaves is counted.", {"statements that begin with a question word": 1}),
        ("What leaves a site?", {}),
    ],
)
def test_what_is_counted_in_a_text(prose: ModuleType, text: str, counts: dict[str, int]) -> None:
    assert prose.counts_of_text(text) == Counter(counts)


def test_what_is_counted_in_a_module(prose: ModuleType) -> None:
    source = 'def f():\n    """All of them."""\n    found = 1  # but for one\n    return found\n'
    assert prose.counts_of_module(source) == {
        "docstring summaries of three words or fewer": 1,
        "identifiers called 'found'": 2,
        "'but for'": 1,
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
