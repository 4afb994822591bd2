"""How far a run is: what a server and a site say of it, and how it is shown."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

import fedstrata as fs
from fedstrata.cli import main
from fedstrata.sites import progress as module
from fedstrata.sites.progress import STATUS, Progress, SiteProgress, headline, shown


def test_a_run_says_how_far_it_is_and_who_takes_part() -> None:
    status = {"a": ("in", ""), "b": ("refused", "column 'age': 900")}
    progress = Progress(10, ["b", "a", "a"], status.__getitem__)
    assert progress.table()["seconds_left"] is None
    assert shown(progress.table())[0] == "round 0 of 10; 1 of 2 sites in; 0.0 kB up, 0.0 kB down"
    for round in (4, 5):  # a run that goes on
        record = {"round": round, "accuracy": 0.5, "loss": None, "clients_returned": 1}
        progress({**record, "bytes_up": 10, "bytes_down": 7})
    progress._begun -= 60
    table = json.loads(json.dumps(progress.table()))
    assert (table["round"], table["accuracy"], table["bytes_up"], table["bytes_down"]) == (5, 0.5, 20, 14)
    assert table["seconds_left"] == pytest.approx(150, abs=2)  # two rounds in a minute, five are left
    assert "loss" not in table
    assert shown(table)[1:] == ["  a  in", "  b  refused     column 'age': 900"]
    assert headline(table).startswith("round 5 of 10, accuracy 0.5; 1 returned; 1 of 2 sites in; ")


def test_a_site_says_what_its_own_part_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "startup").mkdir()
    assert main(["status", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "no run is in progress\n"

    def lines() -> list[str]:
        return shown(json.loads((tmp_path / STATUS).read_text()))

    site = SiteProgress(tmp_path / STATUS)
    site.question(2_000_000)
    site.write()
    assert main(["status", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "this site works; 1 requests; 2.0 MB in, 0.0 kB out\n"
    site.answer(500, "its data file: column 'age'")
    site.write()
    assert len(lines()) == 1, "it is not written at every question"
    site._written = 0.0
    site.write()
    assert lines()[0] == "this site waits for the next request; 1 requests; 2.0 MB in, 0.5 kB out"
    assert lines()[1] == "  refused: its data file: column 'age'"
    table = json.loads((tmp_path / STATUS).read_text())
    (tmp_path / STATUS).write_text(json.dumps({**table, "at": time.time() - 90}))
    assert "last message 1 min 30 s ago" in lines()[0]


def test_a_folder_of_nobody_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 2
    assert "is neither the folder of a party (with startup/) nor a run folder. Give" in capsys.readouterr().err


def test_a_run_that_goes_on_knows_the_rounds_before_and_a_round_without_an_evaluation_the_last_one() -> None:
    before = fs.History({"round": n, "accuracy": n / 10, "clients_returned": 2, "bytes_up": 5} for n in (1, 2, 3))
    progress = Progress(10, ["a"], lambda site: ("in", ""), before)
    assert (progress.table()["round"], progress.table()["seconds_left"]) == (3, None)
    progress({"round": 3, "accuracy": None, "clients_returned": 1, "bytes_up": 5})  # the checkpoint was of round 2
    table = progress.table()
    assert table["curves"] == {"accuracy": [[1, 2], [0.1, 0.2]], "returned": [[1, 2, 3], [2, 2, 1]]}
    assert (table["accuracy"], table["bytes_up"]) == (0.3, 20)


def test_a_curve_is_thinned_and_has_its_last_point() -> None:
    records = fs.History({"round": n, "loss": float(n)} for n in range(1, 5001))
    rounds, values = Progress(5000, [], lambda site: ("", ""), records).table()["curves"]["loss"]
    assert len(rounds) <= 302
    assert rounds == values
    assert (rounds[0], rounds[-1]) == (1, 5000)


def test_a_server_writes_down_how_far_its_run_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "startup").mkdir()
    gone: list[str] = []

    def status(site: str) -> tuple[str, str]:
        assert not gone, "the job is over"
        return "in", ""

    progress = Progress(3, ["a"], status, path=tmp_path / STATUS, about={"run": "r"})
    progress.write()
    progress({"round": 1})
    gone.append("a")
    progress.end()
    assert main(["status", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("the run is over: complete; round 1 of 3; 1 of 1 sites in; ")
    assert main(["status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == "r"
    assert main(["status", str(tmp_path), "--watch"]) == 0, "it is over"
    assert "complete" in capsys.readouterr().out


def test_what_became_of_a_run_is_written_though_the_last_look_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go, write = threading.Event(), threading.Event(), module.write_json

    def slow(path: Path, table: object) -> None:
        begun.set()
        assert go.wait(30)
        write(path, table)

    monkeypatch.setattr(module, "write_json", slow)
    progress = Progress(3, ["a"], lambda site: ("in", ""), path=tmp_path / STATUS)
    last = threading.Thread(target=progress.write)
    last.start()
    assert begun.wait(30)
    end = threading.Thread(target=progress.end)
    end.start()
    end.join(0.1)  # it waits, or has given up
    go.set()
    for thread in (last, end):
        thread.join(30)
    assert json.loads((tmp_path / STATUS).read_text())["over"] == "complete"


def test_a_status_that_cannot_be_written_stops_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP", 0.01)
    (tmp_path / "fedstrata").touch()
    progress = Progress(3, ["a"], lambda site: ("in", ""), path=tmp_path / STATUS)
    with progress.writing():
        time.sleep(0.05)
        (tmp_path / "fedstrata").unlink()
        end = time.monotonic() + 30
        while not (tmp_path / STATUS).exists():
            assert time.monotonic() < end
            time.sleep(0.01)
    (tmp_path / STATUS).unlink()
    time.sleep(0.05)
    assert not (tmp_path / STATUS).exists(), "the run is over"


def test_the_folder_of_a_comparison_names_one_of_its_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in ("scaffold/seed-0", "fedavg/seed-0"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "metrics.jsonl").touch()
    assert main(["status", str(tmp_path)]) == 2
    example = f"Give the folder of one run, for example {tmp_path / 'fedavg/seed-0'}.\n"
    assert capsys.readouterr().err.endswith(f"is the folder of a comparison with 2 runs. {example}")
