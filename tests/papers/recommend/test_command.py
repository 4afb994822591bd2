"""The command ``fedstrata recommend``: its text, its JSON and its errors."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path

import pytest

from fedstrata.cli import main
from fedstrata.cli.main import parser
from fedstrata.papers.recommend import advice
from fedstrata.papers.recommend.properties import SHOWN
from fedstrata.spec.experiment import read_table, variants

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
SPEC = Path(__file__).parents[3] / "examples/specs/demo.toml"
CHANGES = ["--set", "availability=label-correlated", "--set", "training.rounds=20"]


def shown(capsys, *options):
    """What the command prints."""
    assert main(["recommend", str(SPEC), *CHANGES, *options]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_text_and_json_have_the_same_facts(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    text, facts = " ".join(shown(capsys).split()), json.loads(shown(capsys, "--json"))
    assert set(SHOWN) == set(facts["properties"])
    assert all(each.label in text for each in SHOWN.values())
    assert facts["properties"]["clients"] == 100
    assert [each["method"] for each in facts["methods"]][:4] == ["stratify", "rebafl", "fedgs", "fedau"]
    sentences = [reason["text"] for each in facts["methods"] for reason in each["reasons"]]
    assert len(sentences) >= len(facts["methods"]) >= 3
    for sentence in [*sentences, *facts["refused"].values(), *facts["limits"], facts["command"]]:
        assert sentence in text
    assert "fedtan" in facts["refused"]


@pytest.mark.slow
def test_the_command_to_know_more_is_one_that_runs(capsys):
    words = shlex.split(json.loads(shown(capsys, "--json", "--set", "method=fedprox"))["command"])
    options = parser().parse_args(words[1:])
    assert options.overrides == CHANGES[1::2]
    specs = variants(read_table(options.spec), options.methods.split(","), options.overrides)
    assert list(specs)[:2] == ["fedavg", "stratify"]
    assert all(spec.availability.name == "label-correlated" for spec in specs.values())


@pytest.mark.slow
def test_columns_of_the_board(capsys, monkeypatch):
    base = [0.70, 0.72, 0.68]
    cells = {"fedavg": 0.0, "fedau": 0.1, "fedprox": -0.1}
    results = {
        name: {"seeds": [0, 1, 2], "accuracy": [value + change * (1 + seed / 100) for seed, value in enumerate(base)]}
        for name, change in cells.items()
    }
    Path("board.toml").write_text("[spec]\ntraining = { rounds = 20, clients_per_round = 20 }\n")
    partition = {"name": "dirichlet", "clients": 100, "alpha": 0.1}
    columns = {
        "mine": {"partition": partition, "availability": {"name": "label-correlated"}, "methods": results},
        "other": {"partition": partition, "availability": {"name": "always"}, "methods": {}},
    }
    Path("board.json").write_text(json.dumps({"columns": columns}))
    monkeypatch.setattr(advice, "recommend", partial(advice.recommend, file=Path("board.json")))
    changes = ["--set", "training.batch_size=32"]
    text, facts = " ".join(shown(capsys, *changes).split()), json.loads(shown(capsys, *changes, "--json"))
    assert (facts["columns"][0]["column"], facts["columns"][0]["distance"]) == ("mine", 0)
    assert "Nearest columns of the board mine, distance 0.00: no property differs by more than 0.10 other, " in text
    assert "online 100 % (your spec: 10 %)" in text
    assert "online" in facts["columns"][1]["differs"]
    assert [each["method"] for each in facts["methods"] if each["ahead"]] == ["fedau"]
    worse = "With this method instead of FedAvg, the accuracy in the nearest column of the board changes by −10.1 ["
    assert f"Not recommended fedprox: {worse}" in text
    assert list(facts["behind"]) == ["fedprox"]


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 80, 160])
def test_lines_fit_the_terminal(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    *lines, command = shown(capsys).splitlines()
    assert command.startswith("  fedstrata compare ")
    assert max(map(len, lines)) <= width


@pytest.mark.slow
def test_without_a_reason_the_command_compares_with_references(capsys):
    assert main(["recommend", "--set", "partition=iid", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["methods"] == []
    assert facts["command"] == "fedstrata compare --methods fedavg --references local,centralised " + (
        "--set partition=iid --seeds 0,1,2,3,4"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "partition.alfa=1"], "partition.alfa = 1: is not a known key"),
        (["--set", "partition.clients=100000"], "partition.clients = 100000: digits has only"),
        (
            ["--set", "method=rebafl", "--set", "task=regression", "--set", "partition=iid"],
            "method = 'rebafl': has its own loss",
        ),
    ],
)
def test_a_bad_spec(options, message, capsys):
    assert main(["recommend", *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
