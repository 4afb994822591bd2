"""The command ``fedstrata recommend``: its text, its JSON and its errors."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from fedstrata.cli import main
from fedstrata.cli.main import parser
from fedstrata.papers.recommend.properties import SHOWN
from fedstrata.spec.experiment import read_table, variants

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
SPEC = Path(__file__).parents[3] / "examples/specs/demo.toml"
CHANGES = ["--set", "availability=label-correlated", "--set", "training.rounds=20"]


def shown(capsys, *options):
    """What the command prints."""
    assert main(["recommend", str(SPEC), *CHANGES, *options]) == 0
    return capsys.readouterr().out


def test_text_and_json_have_the_same_facts(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    text, facts = " ".join(shown(capsys).split()), json.loads(shown(capsys, "--json"))
    assert set(SHOWN) == set(facts["properties"])
    assert all(each.label in text for each in SHOWN.values())
    assert facts["properties"]["clients"] == 100
    assert [each["method"] for each in facts["methods"]][:2] == ["rebafl", "fedgs"]
    sentences = [reason["text"] for each in facts["methods"] for reason in each["reasons"]]
    assert len(sentences) >= len(facts["methods"]) >= 3
    for sentence in [*sentences, *facts["refused"].values(), *facts["limits"], facts["command"]]:
        assert sentence in text
    assert "fedtan" in facts["refused"]


def test_the_command_to_know_more_is_one_that_runs(capsys):
    words = shlex.split(json.loads(shown(capsys, "--json", "--set", "method=fedprox"))["command"])
    options = parser().parse_args(words[1:])
    assert options.overrides == CHANGES[1::2]
    specs = variants(read_table(options.spec), options.methods.split(","), options.overrides)
    assert list(specs)[:2] == ["fedavg", "rebafl"]
    assert all(spec.availability.name == "label-correlated" for spec in specs.values())


@pytest.mark.parametrize("width", [60, 80, 160])
def test_lines_fit_the_terminal(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    *lines, command = shown(capsys).splitlines()
    assert command.startswith("  fedstrata compare ")
    assert max(map(len, lines)) <= width


def test_without_a_reason_the_command_compares_with_references(capsys):
    assert main(["recommend", "--set", "partition=iid", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["methods"] == []
    assert facts["command"] == "fedstrata compare --methods fedavg --references local,centralised " + (
        "--set partition=iid --seeds 0,1,2,3,4"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "partition.alfa=1"], "partition.alfa = 1: is not a known key"),
        (["--set", "partition.clients=100000"], "partition.clients = 100000: digits has only"),
        (
            ["--set", "method=rebafl", "--set", "task=regression", "--set", "partition=iid"],
            "method = 'rebafl': has a loss",
        ),
    ],
)
def test_a_bad_spec(options, message, capsys):
    assert main(["recommend", *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
