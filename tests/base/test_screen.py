from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from fedstrata.base.screen import ScreenTable

HEADINGS = ["", "final accuracy, %", "minus fedavg", "95 % interval", "MB sent"]
NAMES = ["a-method-with-a-name-of-33-letters", "scaffold", "[fedavg]"]
ROWS = [[name, "95.51 ± 0.20", "+1.30", "[−1.12, +3.70]", f"{n}.0"] for n, name in enumerate(NAMES)]


def printed(table: ScreenTable, width: int, *, terminal: bool = False) -> list[str]:
    console = Console(width=width, file=io.StringIO(), force_terminal=terminal, color_system=None)
    console.print(table, crop=False)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def test_a_table_by_hand() -> None:
    rows = [["fedavg", "94.2", "2"], ["scaffold", "95.5", "4"], [], ["mean", "94.9", "3"]]
    table = ScreenTable(["", "accuracy, %", "MB"], rows, title="digits", note="Two runs.")
    assert printed(table, 40) == [
        "digits",
        "          accuracy, %  MB",
        "─────────────────────────",
        "fedavg           94.2   2",
        "scaffold         95.5   4",
        "─────────────────────────",
        "mean             94.9   3",
        "Two runs.",
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160, 200])
@pytest.mark.parametrize("every", [False, True])
def test_no_name_or_number_is_split_and_columns_are_left_out_only_with_a_message(width: int, every: bool) -> None:
    lines = printed(ScreenTable(HEADINGS, ROWS, every=every), width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    kept = [cell for cell in ROWS[1][1:] if cell in text]
    if every:
        assert len(kept) == 4
        assert "more" not in text
    elif len(kept) < 4:
        assert f"{4 - len(kept)} column{'s' if len(kept) < 3 else ''} more: --columns all" in lines
    assert text.count("[fedavg]") == text.count("scaffold") == text.count("a-method-with-a-name")
    assert re.search(r"a-method-with-a-name\S*(…|letters) ", text)


def test_the_least_important_columns_are_left_out_first() -> None:
    text = "\n".join(printed(ScreenTable(HEADINGS, ROWS, order=[4, 2]), 200))
    assert "[−1.12" not in text
    assert "95.51" not in text
    assert "+1.30" in text
    assert text.endswith("2 columns more: --columns all")


def test_words_wrap_or_are_cut_to_one_line() -> None:
    rows = [["fedavg", "averages the models of all clients by their samples"]]
    wrapped = printed(ScreenTable(["method", "what it does"], rows, words=[1]), 40)
    assert wrapped[2:] == ["fedavg  averages the models of all", "        clients by their samples"]
    cut = printed(ScreenTable(["method", "what it does"], rows, words=[1], one_line=True), 40, terminal=True)
    assert cut[2:] == ["fedavg  averages the models of all clie…"]


def test_a_title_stands_above_its_rows() -> None:
    rows = [["accuracy"], ["a", "1"], ["loss"], ["a", "2"]]
    assert printed(ScreenTable(["", "mean"], rows), 30)[2:] == ["accuracy", "a      1", "", "loss", "a      2"]


def test_control_characters_are_shown_as_escapes() -> None:
    table = ScreenTable(["\x1b[2J", "n"], [["a\nb", "\x1b[1A"]], title="\r", note="\x07")
    text = "\n".join(printed(table, 80))
    assert "\x1b" not in text
    assert r"a\nb" in text
