from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedstrata.cli import main
from fedstrata.papers.tables import tables

# The readings take seconds to compute, so the files that need them run in the same process.
pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.xdist_group("readings")]


def test_what_there_is_and_what_it_lacks(capsys):
    assert main(["reproduce", "rebafl/lost", "--list"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("| `rebafl/lost` | 4 | 0 |")
    assert main(["reproduce", "rebafl/lost", "--list", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["table"], row["cells"], row["done"]) == ("rebafl/lost", 4, 0)


def test_a_table_that_is_not_there(capsys):
    assert main(["reproduce", "rebafl/last"]) == 2
    assert "did you mean 'rebafl/lost'" in capsys.readouterr().err


def test_an_interrupted_table_says_how_it_goes_on(capsys, monkeypatch):
    def interrupt(*_args, **_more):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedstrata.papers.running.run", interrupt)
    assert main(["reproduce"]) == 130
    told = capsys.readouterr()
    assert told.out.startswith("Missing runs: 1,450 (")
    assert told.err.endswith("fedstrata: interrupted. To continue from the last checkpoint, repeat the command.\n")


@pytest.mark.long
@pytest.mark.slow
def test_a_table_at_small_scale_and_once_more(capsys):
    cells = [cell.key for cell in tables()["fedssar/emnist"].cells(quick=True)]
    assert main(["reproduce", "fedssar/emnist", "--quick", "--out", "here"]) == 0
    assert capsys.readouterr().out.count("seed-0: ") == len(cells) > 0
    assert sorted(json.loads(Path("here/cells/fedssar/emnist.json").read_text())) == sorted(cells)
    assert "At small scale" in Path("here/claims.md").read_text()
    assert main(["reproduce", "fedssar/emnist", "--quick", "--out", "here", "--json"]) == 0
    told = capsys.readouterr()
    assert "seed-0: " not in told.out + told.err
    assert "claims.md" in json.loads(told.out)["written"]


@pytest.mark.slow
def test_data_that_are_not_there_fail_loudly(capsys):
    # The tables of domains have no small scale without their images, and these tests have no data.
    assert main(["reproduce", "stratify/chunks-digits3", "--quick", "--out", "here"]) == 1
    shown = capsys.readouterr().err
    assert "digits3" in shown
    assert len([line for line in shown.splitlines() if "stratify/chunks-digits3/" in line]) == 6
    assert "6 runs or files are missing. The lines above" in shown


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # FedSTaS clips sizes, as published, and says so
def test_all_of_it_at_small_scale(monkeypatch, tmp_path):
    monkeypatch.undo()  # the data are those of whoever runs this
    needed = {table.spec["data"]["name"] for table in tables().values() if "name" not in table.quick.get("data", {})}
    from fedstrata.data.catalog import names_there

    if absent := needed - set(names_there()):
        pytest.skip(f"needs {', '.join(sorted(absent))}")
    assert main(["reproduce", "--quick", "--out", str(tmp_path)]) == 0
