from __future__ import annotations

import io

import pytest
from rich.console import Console

from fedstrata.reporting.progress import Progress

RECORD = {"round": 3, "accuracy": 0.75, "clients_invited": 10, "clients_returned": 7}


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, color_system=None, width=120)


def written(console: Console) -> str:
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def last_line(console: Console, part: str) -> str:
    return next(line for line in reversed(written(console).splitlines()) if part in line)


def test_the_bar_of_a_run_shows_where_it_is() -> None:
    console = terminal()
    with Progress(console=console) as progress:
        watch = progress.of_run("fed[avg]", 4)
        watch({"round": 2, "accuracy": 0.8})
        watch(RECORD)
        watch(RECORD | {"round": 4, "accuracy": None})
    last = last_line(console, "4/4")
    assert "fed[avg]" in last
    assert "accuracy 75.0 % (best 80.0 %)" in last
    assert "clients 7/10" in last


def test_a_resumed_run_starts_where_it_was() -> None:
    console = terminal()
    with Progress(console=console) as progress:
        progress.of_run("fedavg", 40, done=30)
    assert "accuracy – (best –)" in last_line(console, "30/40")


def test_a_comparison_has_a_bar_for_all_rounds_and_one_for_each_method() -> None:
    console = terminal()
    with Progress(console=console) as progress:
        runs = {("fedavg", 0): 10, ("fed[prox]", 0): 10, ("fed[prox]", 1): 10}
        watch = progress.of_runs(runs, lambda label, seed: f"{90 + seed}.0 %")
        watch("fedavg", 0, 10)
        watch("fed[prox]", 0, 10)
        watch("fed[prox]", 1, 4)
    assert "24/30" in last_line(console, "3 runs")
    assert "1 of 1 seed  90.0 %" in last_line(console, "fedavg")
    assert "1 of 2, round 4/10  91.0 %" in last_line(console, "fed[prox]")


def test_many_methods_have_a_bar_only_while_they_run() -> None:
    console = terminal()
    with Progress(console=console) as progress:
        watch = progress.of_runs({(f"method {n}", 0): 4 for n in range(20)})
        watch("method 1", 0, 4)
        watch("method 2", 0, 1)
    end = written(console).split("20 runs")[-1]
    assert "method 2" in end
    assert "method 1" not in end
    assert "method 3" not in end


def test_any_task_has_a_bar_and_a_note() -> None:
    console = terminal()
    with Progress(console=console) as progress:
        progress.show("audit", 0, 4, "round 9 again")
        progress.show("audit", 1, 8, "client 7: [variational]")
    last = last_line(console, "audit")
    assert "1/8" in last
    assert "client 7: [variational]" in last


@pytest.mark.parametrize(("quiet", "force"), [(True, True), (True, False), (False, False)])
def test_silent_where_nobody_watches_and_where_it_is_short(quiet: bool, force: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=force)
    with Progress(quiet, console) as progress:
        progress.of_run("fedavg", 4)(RECORD)
        progress.show("audit", 1, 4)
    assert written(console) == ""


def test_off_a_terminal_a_line_every_ten_seconds() -> None:
    console, now = Console(file=io.StringIO(), force_terminal=False, width=40), [100.0]
    with Progress(console=console, clock=lambda: now[0]) as progress:
        watch = progress.of_run("fed[avg]", 40, done=4)
        for round in range(5, 36):
            now[0] += 1.0
            watch({"round": round, "accuracy": round / 100, "clients_returned": 7, "clients_invited": 10})
    assert written(console).splitlines() == [
        "fed[avg]: 14/40 accuracy 14.0 % (best 14.0 %) clients 7/10 26 s left",
        "fed[avg]: 24/40 accuracy 24.0 % (best 24.0 %) clients 7/10 16 s left",
        "fed[avg]: 34/40 accuracy 34.0 % (best 34.0 %) clients 7/10 6 s left",
    ]


def test_the_line_of_a_comparison_is_about_all_of_it() -> None:
    console, now = Console(file=io.StringIO(), force_terminal=False, width=40), [0.0]
    with Progress(console=console, clock=lambda: now[0]) as progress:
        watch = progress.of_runs({("fedavg", 0): 10, ("fedprox", 0): 10})
        watch("fedavg", 0, 0)
        now[0] = 30.0
        watch("fedavg", 0, 5)
    assert written(console) == "2 runs: 5/20 rounds 1 min 30 s left\n"


def test_standard_output_stays_clean(capfd: pytest.CaptureFixture[str]) -> None:
    with Progress() as progress:
        progress.of_run("fedavg", 4)(RECORD)
    assert capfd.readouterr() == ("", "")


def test_the_bar_ends_with_an_error() -> None:
    console = terminal()
    with pytest.raises(RuntimeError, match="boom"), Progress(console=console):
        raise RuntimeError("boom")
    assert written(console).endswith("\x1b[?25h")  # the cursor is back
