from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest

from fedstrata.cli import main
from fedstrata.reporting.runs import keep_order
from fedstrata.spec.experiment import Experiment


def write_run(folder: Path, accuracies: list[float], *, over: bool = True, data: str = "digits") -> None:
    folder.mkdir(parents=True)
    records = [{"round": i + 1, "accuracy": a, "bytes_up": 500_000} for i, a in enumerate(accuracies)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    seed = int(folder.name.removeprefix("seed-"))
    (folder / "spec.toml").write_text(f'seed = {seed}\n[data]\nname = "{data}"\n[method]\nname = "fedavg"\n')
    if over:
        (folder / "summary.json").write_text("{}")


@pytest.fixture
def compared() -> Path:
    """Two methods with two seeds each; a third one was broken off."""
    for seed in (0, 1):
        write_run(Path(f"cmp/plain/seed-{seed}"), [0.3, 0.5 + seed / 10])
        write_run(Path(f"cmp/best/seed-{seed}"), [0.4, 0.6, 0.7 + seed / 5])
    write_run(Path("cmp/unfinished/seed-0"), [0.1], over=False)
    keep_order(Path("cmp"), ["plain", "best"])
    return Path("cmp")


def test_a_table_of_what_is_over_beside_the_first_label(compared, capsys):
    assert main(["table", str(compared)]) == 0
    shown, note = capsys.readouterr()
    assert note == "fedstrata: note: 1 run that has not ended is left out\n"
    assert "minus plain" in shown
    assert shown.index("final accuracy, %") < shown.index("accuracy at equal bytes (1 MB), %")
    assert "+25.00" in shown  # 0.2 and 0.3
    assert "Intervals need at least three seeds" in " ".join(shown.split())


@pytest.mark.slow
def test_formats_and_choices(compared, capsys):
    choice = [
        "table",
        str(compared),
        "--baseline",
        "best",
        "--metric",
        "best_accuracy, rounds_to_0.5",
        "--at",
        "bytes=5e5",
    ]
    assert main([*choice, "--format", "markdown"]) == 0
    text = capsys.readouterr().out
    assert "| best accuracy, % | plain | 55.00 ± 7.07 | −25.00 | 0.126 |" in text
    assert "| rounds to 50 % | plain | 2 | +0 | – |" in text
    assert "| accuracy at equal bytes (0.5 MB), % | best | 40.00 |" in text
    assert main([*choice, "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["measure"], row["label"]) for row in rows[:2]] == [
        ("best_accuracy", "plain"),
        ("best_accuracy", "best"),
    ]
    assert {row["data"] for row in rows} == {"digits"}
    assert main([*choice, "--format", "latex"]) == 0
    assert capsys.readouterr().out.partition("\n\\begin{table}\n")[0].startswith("% |")


def test_data_sets_have_tables_of_their_own(compared, capsys):
    write_run(Path("cmp/plain/seed-2"), [0.9], data="mnist")
    assert main(["table", str(compared), "--baseline", "best", "--format", "latex"]) == 0
    text = capsys.readouterr().out
    assert text.count("\\begin{table}") == 2
    assert text.index("% On digits:") < text.index("% On mnist:")


@pytest.mark.slow
def test_a_figure_of_the_differences(compared, capsys):
    assert main(["table", str(compared), "--figure", "differences.svg"]) == 0
    assert capsys.readouterr().err.endswith("fedstrata: note: drew differences.svg\n")
    assert "<svg" in Path("differences.svg").read_text()


def test_a_figure_needs_two_methods(capsys):
    write_run(Path("alone/seed-0"), [0.3])
    assert main(["table", "alone", "--figure", "differences.svg"]) == 2
    problem = "--figure = 'differences.svg': shows differences between methods, but the folders contain only one method"
    assert problem in capsys.readouterr().err
    assert not Path("differences.svg").exists()


@pytest.mark.parametrize(
    ("format", "line"),
    [
        ("csv", "a,plain,2,0.55,0.0707"),
        ("markdown", "| a | "),
        ("latex", "a & "),
        ("json", ' "a": {'),
        ("console", "a "),
    ],
)
def test_a_table_of_clients(compared, capsys, format, line):
    for folder in compared.glob("plain/*"):
        accuracy = 0.5 + int(folder.name.removeprefix("seed-")) / 10
        (folder / "clients.csv").write_text(f"client,name,train_samples,accuracy\n0,a,9,{accuracy}\n")
    assert main(["table", str(compared), "--by-client", "--format", format]) == 0
    shown = capsys.readouterr().out
    assert any(each.startswith(line) for each in shown.splitlines()), shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--figure", "f.txt"], "--figure = 'f.txt': must end with one of: .pdf, .png, .svg."),
        (["--figure", "f.svg", "--by-client"], "--figure = 'f.svg': shows differences between methods, not between"),
        (
            ["--baseline", "plan"],
            "--baseline = 'plan': is not a label of a finished run; did you mean 'plain'? Use one of: plain, best",
        ),
        (["--at", "bytes=much"], "--at = 'bytes=much': must have the form COST=NUMBER"),
        (["--at", "byte"], "--at = 'byte': is not a budget. Use one of: bytes, samples, seconds, simulated_seconds,"),
        (
            ["--metric", "los"],
            "--metric = 'los': is not a result of these runs. Use one of: final_accuracy, best_accuracy,",
        ),
    ],
)
def test_what_there_is_not(compared, capsys, arguments, message):
    assert main(["table", str(compared), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_runs(capsys):
    assert main(["table", "nowhere"]) == 2
    assert "folder = 'nowhere': is not a folder" in capsys.readouterr().err


@pytest.mark.slow
def test_a_sweep_is_refused_before_anything_is_written(capsys):
    for arguments, message in [
        (["training.lr=0.1,0.2"], "evaluation.validation: is required, because a sweep selects settings with"),
        (["training.lr=0.1"], "--set: a sweep needs a setting with several values"),
        (["training.lr=0.1,-1"], "training.lr = -1: must be greater than 0"),
        (["training.lr.x=0.1,1"], "training.lr"),
        (["training.lr=0.1,0.1"], "--set = 'lr=0.1': a value is listed twice. Remove one of the two."),
    ]:
        assert main(["sweep", *(part for each in arguments for part in ("--set", each))]) == 2
        assert message in capsys.readouterr().err
    assert main(["sweep", "--set", "training.lr=0.1,0.2", "--seeds", "0,0"]) == 2
    assert "--seeds = '0,0': must be integers of at least 0, without" in capsys.readouterr().err
    assert list(Path().iterdir()) == []


@pytest.mark.slow
def test_a_sweep_prints_its_table_and_writes_the_best_spec(capsys):
    Path("s.toml").write_text(
        "[partition]\nclients = 5\n[training]\nrounds = 2\n[evaluation]\nvalidation = 0.2\n[model]\nhidden = [9]\n"
    )
    command = ["sweep", "s.toml", "--set", "training.lr=0.0001,0.1", "--set", "model.hidden=[8, 8]"]
    assert main([*command, "--set", "training.batch_size=20", "--out", "out", "--jobs", "1", "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^0\.1  +\d+\.\d\d$", shown, flags=re.MULTILINE)
    assert "| 0.1 | **" in Path("out/sweep.md").read_text()
    assert "Best settings: lr=0.1. Test accuracy: " in shown
    best = Experiment.from_toml("out/best.toml")
    assert (best.training.lr, best.training.batch_size, best.model.hidden) == (0.1, 20, (8, 8))


@pytest.mark.slow
def test_a_sweep_of_methods_says_how_to_compare_them(capsys, monkeypatch):
    monkeypatch.setattr("fedstrata.reporting.html.write_comparison", lambda out: None)
    Path("s.toml").write_text(
        "[partition]\nclients = 2\n[training]\nrounds = 1\n[evaluation]\nvalidation = 0.2\n[model]\nhidden = [9]\n"
    )
    command = ["sweep", "s.toml", "--set", "method=fedavg,scaffold", "--set", "training.lr=0.0001,0.1", "--out", "out"]
    assert main([*command, "--jobs", "1", "--quiet"]) == 0
    advice = capsys.readouterr().out.splitlines()[-1].partition(": ")[2]
    assert advice == "fedstrata compare out/compare.toml"
    assert main([*advice.split()[1:], "--seeds", "0", "--jobs", "1", "--out", "compared", "--quiet"]) == 0
    for method in ("fedavg", "scaffold"):
        spec = Experiment.from_toml(f"compared/{method}/seed-0/spec.toml")
        assert (spec.method.name, spec.training.lr) == (method, 0.1)
