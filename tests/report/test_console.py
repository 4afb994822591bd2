from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from fedstrata.history import History
from fedstrata.report.console import RunProgress, summary_panel

RECORD = {"round": 3, "accuracy": 0.75, "clients_invited": 10, "clients_returned": 7}


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, color_system=None, width=120)


def written(console: Console) -> str:
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_bar_shows_where_the_run_is() -> None:
    console = terminal()
    with RunProgress(4, "fed[avg]", console=console) as progress:
        progress.update({"round": 2, "accuracy": 0.8})
        progress.update(RECORD)
        progress.update(RECORD | {"round": 4, "accuracy": None})
    last = next(line for line in reversed(written(console).splitlines()) if "4/4" in line)
    assert "fed[avg]" in last
    assert "accuracy 75.0 % (best 80.0 %)" in last
    assert "clients 7/10" in last


def test_a_resumed_run_starts_where_it_was() -> None:
    console = terminal()
    with RunProgress(40, "fedavg", done=30, best=0.9, console=console):
        pass
    assert "30/40" in written(console)
    assert "accuracy – (best 90.0 %)" in written(console)


@pytest.mark.parametrize(("quiet", "force"), [(True, True), (False, False)])
def test_silent_where_nobody_watches(quiet: bool, force: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=force)
    with RunProgress(4, "fedavg", quiet, console=console) as progress:
        progress.update(RECORD)
    assert progress.best == 0.75
    assert written(console) == ""


def test_standard_output_stays_clean(capfd: pytest.CaptureFixture[str]) -> None:
    with RunProgress(4, "fedavg") as progress:
        progress.update(RECORD)
    assert capfd.readouterr() == ("", "")


def test_the_bar_ends_with_an_error() -> None:
    console = terminal()
    with pytest.raises(RuntimeError, match="boom"), RunProgress(4, "fedavg", console=console):
        raise RuntimeError("boom")
    assert written(console).endswith("\x1b[?25h")  # the cursor is back


def test_panel_tells_how_good_who_and_where(tmp_path: Path) -> None:
    more = {"clients_dropped": 2, "clients_late": 1, "samples": 600, "bytes_up": 2_000_000, "seconds": 0.5}
    history = History([RECORD | more | {"round": 1}, {"round": 2}], method="[moon]", seed=5, path=tmp_path)
    console = Console(file=io.StringIO(), width=200)
    console.print(summary_panel(history))
    text = written(console)
    for part in (
        "[moon], seed 5",
        "75.00 % after 2 rounds",
        "50 % in round 1",
        "70.0 % of those invited, 2 dropped out, 1 late",
        "600 samples in 0.5 s",
        "2.0 MB by clients, 0.0 MB to clients",
        str(tmp_path),
    ):
        assert part in text


def test_panel_of_a_run_that_was_never_evaluated() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(summary_panel(History([{"round": 1}])))
    assert "– after 1 round " in written(console)
