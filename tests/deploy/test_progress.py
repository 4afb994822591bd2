"""How far a run is: what a server and a site say of it, and how it is shown."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from fedstrata.cli import main
from fedstrata.deploy.progress import STATUS, Progress, SiteProgress, headline, own_status, shown


def test_a_run_says_how_far_it_is_and_who_takes_part() -> None:
    standing = {"a": ("in", ""), "b": ("refused", "column 'age': 900")}
    progress = Progress(10, ["b", "a", "a"], standing.__getitem__)
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
    assert own_status(tmp_path) is None
    assert main(["status", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "nothing has run here yet\n"
    site = SiteProgress(tmp_path / STATUS)
    site.question(2_000_000)
    site.write()
    assert main(["status", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "this site works; 1 questions; 2.0 MB in, 0.0 kB out\n"
    site.answer(500, "its data file: column 'age'")
    site.write()
    assert len(own_status(tmp_path) or ()) == 1, "it is not written at every question"
    site._written = 0.0
    site.write()
    lines = own_status(tmp_path) or ()
    assert lines[0] == "this site waits for the next question; 1 questions; 2.0 MB in, 0.5 kB out"
    assert lines[1] == "  refused: its data file: column 'age'"
    table = json.loads((tmp_path / STATUS).read_text())
    (tmp_path / STATUS).write_text(json.dumps({**table, "at": time.time() - 90}))
    assert "last heard of 1 min 30 s ago" in (own_status(tmp_path) or ())[0]


def test_a_folder_of_nobody_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 2
    assert "no party's folder" in capsys.readouterr().err
