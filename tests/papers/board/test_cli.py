from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedstrata.cli import main

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

MINE = """
import fedstrata as fs


class Mine(fs.FedAvg):
    pass
"""


@pytest.mark.slow
def test_a_new_board_lacks_everything(capsys):
    assert main(["board", "list", "fedavg", "stratify", "--columns", "iid-label,fedau-cyclic"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| iid-label | 18 | 0 | 10 min |" in lines  # nine runs of 8 s, and nine of 60 s
    assert "| stratify | 18 | 0 | 18 min |" in lines
    assert lines[-1] == "Missing runs: 36 (about 20 min on one core)"
    assert main(["board", "list", "--json"]) == 0
    progress = json.loads(capsys.readouterr().out)
    assert len(progress["columns"]) == 12
    assert len(progress["entries"]) > 41


def test_before_the_first_run_the_command_says_how_many_are_missing(capsys, monkeypatch):
    def interrupt(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedstrata.papers.board.running.Board.run", interrupt)
    assert main(["board", "run", "fedavg", "--columns", "iid-label", "--seeds", "0,1"]) == 130
    # Four trials and two seeds of 8 s.
    assert capsys.readouterr().out == "Missing runs: 6 (about 1 min on one core)\n"


def test_wrong_arguments(capsys):
    assert main(["board", "run", "fedav"]) == 2
    assert "did you mean 'fedavg'" in capsys.readouterr().err
    assert main(["board", "run", "--columns", "iid"]) == 2
    assert "--columns = 'iid': is not a column" in capsys.readouterr().err
    assert main(["board", "run", "--seeds", "0,7"]) == 2
    assert "7 is not a seed of the protocol. Use seeds from 0,1,2,3,4." in capsys.readouterr().err


@pytest.mark.slow
def test_a_method_of_ones_own_is_added_to_the_board(capsys):
    Path("methods").mkdir()
    Path("methods/own.py").write_text(MINE)
    words = ["fedavg", "scaffold", "methods/own.py:Mine", "fedtan", "--quick"]
    assert main(["board", "run", *words]) == 0
    told = capsys.readouterr().out
    assert told.count("own:Mine/") == 4 + 3
    assert main(["board", "list", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| own:Mine | 7 | 7 | – |" in lines
    assert "| fedtan | 0 | 0 | cannot run |" in lines
    assert main(["board", "show", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["written"] == ["board-dirichlet-label.svg", "board.md", "board.json"]
    methods = json.loads(Path("quick-board/board.json").read_text())["columns"]["dirichlet-label"]["methods"]
    assert methods["own:Mine"]["accuracy"] == methods["fedavg"]["accuracy"], "a copy of FedAvg gives the same results"
    text = Path("quick-board/board.md").read_text()
    assert "| own:Mine |" in text
    assert "At small scale" in text
