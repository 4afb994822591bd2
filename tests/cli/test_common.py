"""What a mistake on the command line is answered with."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedstrata.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["compare", "--methods", "fedavg", "--seeds", "0,0"],
            "--seeds = '0,0': must be integers of at least 0, without",
        ),
        (
            ["compare", "--set", "compare.fedavg=3"],
            "compare.fedavg = 3: must be a table of sections. Write, for example, [compare.LABEL.method].",
        ),
        (["compare", "--set", "compare.fedavg.method=3"], "compare.fedavg.method = 3: must be the name of a method"),
        (["partition", "--out", "p.foo"], "--out = 'p.foo': is not an image file"),
        (["run", "--set", "training.lr=inf"], "training.lr = inf: must be a finite number"),
    ],
)
def test_plain_mistakes_are_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(Path().iterdir())


def test_a_key_that_was_set_by_hand_is_not_blamed_on_the_file(capsys, tmp_path):
    spec = tmp_path / "spec.toml"
    spec.write_text("[partition]\nalpha = 0.1\n")
    assert main(["run", str(spec), "--set", "partition.alpha=-1", "--out", str(tmp_path / "run")]) == 2
    assert "line" not in capsys.readouterr().err
    spec.write_text("[partition]\nalpha = -1\n")
    assert main(["run", str(spec), "--out", str(tmp_path / "run")]) == 2
    assert "line 2" in capsys.readouterr().err
