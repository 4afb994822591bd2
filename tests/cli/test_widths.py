"""What commands print at four widths: no name is split or cut, and no column is missing without a message."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from fedstrata.base.outer import installed
from fedstrata.cli.main import main
from fedstrata.methods.base import METHODS

pytestmark = pytest.mark.slow
WIDTHS = (60, 80, 100, 160)
LABELS = ["fedavg", "power-of-choice", "bsm-fedavg"]
SPEC = """
[training]
rounds = 2
clients_per_round = 4
[partition]
name = "dirichlet"
clients = 12
"""
COMPARE = ["compare", "s.toml", "--methods", ",".join(LABELS), "--seeds", "0,1,2", "--jobs", "1", "--out", "cmp"]
RATES = ["training.lr=0.1,0.01"]
SWEEP = ["sweep", "s.toml", "--set", *RATES, "--set", "evaluation.validation=0.2", "--jobs", "1", "--out", "swp"]
NAMES = {
    "compare": (COMPARE, LABELS),
    "table": (["table", "cmp"], LABELS),
    "table with all columns": (["table", "cmp", "--columns", "all"], LABELS),
    "sweep": (SWEEP, ["0.1", "0.01"]),
    "methods": (["methods"], list(METHODS)),
    "partition": (["partition", "s.toml"], [*map(str, range(12)), "min", "mean", "max"]),
}
"""The commands, and the names in the first column of their tables."""
if "papers" in installed():
    from fedstrata.papers.recommend.properties import SHOWN

    NAMES["recommend"] = (["recommend", "s.toml"], [each.label for each in SHOWN.values()])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a spec."""
    made = tmp_path_factory.mktemp("widths")
    (made / "s.toml").write_text(SPEC)
    return made


@pytest.fixture(scope="module")
def results(folder: Path) -> Path:
    """The folder with the spec, a comparison and a sweep."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main([*COMPARE, "--quiet"]) == 0
        assert main([*SWEEP, "--quiet"]) == 0
    return folder


def capture(
    arguments: list[str], width: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """The lines that a terminal of this width shows, without colours."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")
    capsys.readouterr()
    assert main(arguments) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\]8;[^\x1b]*\x1b\\", "", capsys.readouterr().out)
    return [line.rstrip() for line in text.splitlines()]


def headings(lines: list[str], above: int = 1) -> list[str]:
    """The headings of all tables: what stands above the first rule of each, divided at two spaces or more."""
    ruled = [index for index, line in enumerate(lines) if index and set(line.strip()) == {"─"}]
    rows = [line for index in ruled for line in lines[max(0, index - above) : index]]
    return [heading for line in rows for heading in re.split(r"\s{2,}", line.strip())]


def left_out(lines: list[str]) -> int:
    """The number of columns that are left out, as the message says."""
    return sum(int(found[1]) for line in lines if (found := re.match(r"(\d+) columns? more: ", line)))


@pytest.mark.parametrize(
    "name", [name if name == "methods" else pytest.param(name, marks=pytest.mark.long) for name in NAMES]
)
def test_names_stay_whole_and_columns_that_are_left_out_are_counted(name, request, monkeypatch, capsys):
    arguments, names = NAMES[name]
    folder = request.getfixturevalue("folder" if name == "methods" else "results")
    widest_lines = capture(arguments, 300, folder, monkeypatch, capsys)
    words, hidden = Counter(" ".join(headings(widest_lines)).split()), left_out(widest_lines)
    assert len(words) >= 2
    for width in WIDTHS:
        lines = capture(arguments, width, folder, monkeypatch, capsys)
        whole = [each for each in names if any(line == each or line.startswith(f"{each} ") for line in lines)]
        assert whole == names, (width, lines)
        assert all(len(line) <= width for line in lines if set(line.strip()) == {"─"}), width
        # The words of a heading may stand on two lines.
        lost = words - Counter(" ".join(headings(lines, above=2)).split())
        assert bool(lost) == (left_out(lines) > hidden), (width, lost)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_panel_of_a_run_is_closed_on_every_line(width, folder, monkeypatch, capsys):
    lines = capture(["run", "s.toml", "--out", f"run-{width}"], width, folder, monkeypatch, capsys)
    panel = [line for line in lines if line.startswith(("╭", "│", "╰"))]
    assert len(panel) >= 6
    assert {len(line) for line in panel} == {len(panel[0])}
    assert len(panel[0]) <= width
    assert all(line.endswith(("╮", "│", "╯")) for line in panel)


WRONG = [
    (["run", "s.toml", "--set", "training.lrr=1"], "did you mean", "training.lr"),
    (["run", "s.toml", "--set", "method=fedavgg"], "did you mean", "fedavg"),
    (["run", "missing.toml"], "missing.toml", "missing.toml"),
    (["explain", "alfa"], "did you mean", "alpha"),
    (["report", "s.toml"], "s.toml", "s.toml"),
]


@pytest.mark.parametrize(("arguments", "early", "word"), WRONG, ids=[" ".join(wrong[0]) for wrong in WRONG])
def test_an_error_is_one_line_whose_hint_is_seen_at_60_columns(arguments, early, word, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert word in error
    assert error.index(early) < 3 * 60
