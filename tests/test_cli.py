# ruff: noqa: E501  the table of bad specs has one a line
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedstrata.cli import main

BASE = """[training]
rounds = 1
[partition]
clients = 10
"""


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    """Commands write to the working directory unless told otherwise."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FEDSTRATA_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


BAD = {
    "unknown key": ("[partition]\nalfa = 0.1", "partition.alfa = 0.1: unknown key; accepted here: clients, min_size, alpha, balance; did you mean 'alpha'? (s.toml, line 2)"),
    "unknown section": ("seed = 1\n[trainin]\nrounds = 2", "trainin = {'rounds': 2}: unknown key; accepted here: seed, data, partition, availability, method, model, training, evaluation; did you mean 'training'? (s.toml, line 2)"),
    "a word for a number": ('[training]\nrounds = "five"', "training.rounds = 'five': input should be a valid integer, unable to parse string as an integer (s.toml, line 2)"),
    "a fraction for a whole number": ("[training]\nrounds = 2.5", "training.rounds = 2.5: input should be a valid integer"),
    "a number for a table": ("training = 3", "training = 3: input should be a valid dictionary"),
    "alpha 0": ("[partition]\nalpha = 0", "partition.alpha = 0: input should be greater than"),
    "alpha below 0": ("[partition]\nalpha = -1.5", "partition.alpha = -1.5: input should be greater than"),
    "more clients than samples": ("[partition]\nclients = 5000", "partition.clients = 5000: digits has 1437 training samples; at most 1437 for min_size = 1 (s.toml, line 2)"),
    "more invited than there are": ("[training]\nclients_per_round = 200", "training.clients_per_round = 200: the partition has 100 clients; give at most that (s.toml, line 2)"),
    "nobody invited": ("[training]\nclients_per_round = 0", "training.clients_per_round = 0: input should be greater than 0"),
    "epochs and steps": ("[training]\nlocal_epochs = 2\nlocal_steps = 3", "local_epochs and local_steps exclude each other; give one (s.toml, line 1)"),
    "unknown method": ('[method]\nname = "fedavgg"', "method.name = 'fedavgg': no such method; there are: fedavg, "),
    "its spelling": ('method = "scafold"', "did you mean 'scaffold'? (s.toml, line 1)"),
    "unknown data": ('data = "digts"', "data.name = 'digts': no such data set; there are: digits"),
    "data that are not there": ('data = "mnist"', "mnist"),
    "a missing file of data": ('[data]\nname = "nowhere.npz"', "data 'nowhere.npz': there is no file"),
    "a damaged file of data": ('[data]\nname = "damaged.npz"', "data 'damaged.npz': damaged.npz is no .npz file or is damaged"),
    "unknown model": ('[model]\nname = "mlpp"', "model.name = 'mlpp': no such model; there are: mlp, cnn, "),
    "unknown partition": ('partition = "irichlet"', "did you mean 'dirichlet'?"),
    "unknown objective": ('[method]\nobjective = "fedproxx"', "method.objective.name = 'fedproxx': no such objective; there are: cross-entropy, fedprox, "),
    "a setting of an objective": ('[method]\nobjective = { name = "fedprox", muu = 1 }', "method.objective.muu = 1: unknown key; accepted here: mu; did you mean 'mu'? (s.toml, line 2)"),
    "momentum with SCAFFOLD": ('method = "scaffold"\n[training]\nmomentum = 0.9', "training.momentum = 0.9: SCAFFOLD's control variates need plain SGD; use 0 (s.toml, line 3)"),
    "clipping with SCAFFOLD": ('method = "scaffold"\n[training]\nclip = 1.0', "training.clip = 1.0: SCAFFOLD's control variates need unclipped gradients (s.toml, line 3)"),
    "more strata than clients": ('[method]\nname = "fedsts"\nstrata = 200', "method.strata = 200: more strata than clients; give at most 100 (s.toml, line 3)"),
    "a missing trace": ('[availability]\nname = "trace"\nfile = "no.csv"', "availability.file = 'no.csv': no such file; expected a CSV file with the columns client,first,last (s.toml, line 3)"),
    "a wrong trace": ('[availability]\nname = "trace"\nfile = "wrong.csv"', "availability.file = 'wrong.csv': cannot be read as a trace: line 2: expected three whole numbers"),
    "groups that do not fit": ('[availability]\nname = "groups"\ngroups = [{ clients = 3, p = 0.5 }]', "availability.groups: their sizes add up to 3; the partition has 100 clients"),
    "p over 1": ('[availability]\nname = "bernoulli"\np = 1.5', "availability.p = 1.5: input should be less than or equal to 1 (s.toml, line 3)"),
    "a target over 1": ("[evaluation]\ntargets = [2]", "evaluation.targets = [2]: 2.0 is no accuracy in (0, 1] (s.toml, line 2)"),
    "a module that is not there": ('[method]\nname = "nowhere_at_all:Thing"', "no module 'nowhere_at_all' to load the method from"),
    "a thing that is no method": ('[method]\nname = "os:path"', "os:path is no method (a class derived from Method)"),
    "no TOML": ("[method", "spec = 's.toml': cannot be read as TOML: "),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_spec_is_one_line_and_code_2_and_nothing_is_written(capsys, case):
    text, message = BAD[case]
    Path("s.toml").write_text(text + "\n")
    Path("damaged.npz").write_bytes(b"PK\x03\x04 and then nothing")
    Path("wrong.csv").write_text("client,first,last\n1,a,2\n")
    before = sorted(Path().iterdir())
    for command in (["run", "s.toml", "--quiet"], ["run", "s.toml", "--out", "out"]):
        assert main(command) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("fedstrata: error: ")
        assert message in captured.err
        assert captured.err.count("\n") == 1
        assert captured.out == ""
        assert sorted(Path().iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "missing.toml"], "spec = 'missing.toml': no such file"),
        (["run", "."], "spec = '.': cannot be read as TOML"),
        (["run", "--set", "training.rounds"], "--set = 'training.rounds': expected section.key=value"),
        (["run", "--set", "=1"], "--set = '=1': expected section.key=value"),
        (["run", "--set", "training.rounds=many"], "training.rounds = 'many': input should be a valid integer"),
        (["run", "--set", "training.round=3"], "training.round = 3: unknown key"),
        (["run", "--set", "seed=1", "--set", "seed.x=1"], "--set = 'seed.x=1': seed is a value, not a section"),
        (["run", "--engine", "locl"], "engine = 'locl': no such engine; there are: local"),
        (["run", "--resume", "nowhere"], "--resume = 'nowhere': no run folder: it has no spec.toml"),
        (["run", "--resume", "x", "--set", "seed=1"], "--resume = 'x': goes with the run's own spec"),
        (["partition", "--set", "partition.alpha=0"], "partition.alpha = 0: input should be greater than"),
        (["compare", "--methods", "fedavgg"], "--methods = 'fedavgg': no such method or label"),
        (["compare", "--methods", "fedavg", "--seeds", "a"], "--seeds = 'a': expected comma-separated whole numbers"),
        (["compare", "--methods", "fedavg", "--jobs", "0"], "--jobs = 0: expected a whole number of at least 1"),
        (["compare", "--methods", "fedavg", "--set", "training.lr=0"], "training.lr = 0: input should be greater"),
        (["report", "nowhere"], "nowhere is no folder"),
    ],
    ids=" ".join,
)
def test_bad_arguments(capsys, arguments, message):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"fedstrata: error: {message}")
    assert captured.err.count("\n") == 1
    assert list(Path().iterdir()) == []


def test_as_a_process():
    def fedstrata(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "fedstrata", *arguments], capture_output=True, text=True, check=False
        )

    bad = fedstrata("run", "--set", "partition.alpha=-1")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("fedstrata: error: partition.alpha = -1: ")
    assert bad.stderr.count("\n") == 1
    assert list(Path().iterdir()) == []
    version = fedstrata("--version")
    assert version.stdout.startswith("fedstrata 0.")


def test_usage_errors_have_code_2(capsys):
    for arguments in ([], ["walk"], ["run", "--nonsense"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    assert "usage: fedstrata" in capsys.readouterr().err


def test_run_writes_prints_and_draws(capsys, tmp_path):
    Path("s.toml").write_text(BASE)
    assert main(["run", "s.toml", "--out", "runs/one", "--set", "method=scaffold", "--set", "seed=3"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""  # no bar where there is no terminal
    assert "scaffold" in captured.out
    assert "written to runs/one" in captured.out
    names = {path.name for path in Path("runs/one").iterdir()}
    assert names >= {"spec.toml", "metrics.jsonl", "summary.json", "model.safetensors", "partition.png", "accuracy.png"}
    summary = json.loads(Path("runs/one/summary.json").read_text())
    assert (summary["method"], summary["seed"], summary["rounds"]) == ("scaffold", 3, 1)
    assert main(["run", "s.toml", "--out", "runs/one"]) == 2
    assert "out = 'runs/one': holds a run already" in capsys.readouterr().err


def test_a_run_without_out_gets_a_folder_of_its_own(capsys):
    assert main(["run", "--set", "training.rounds=1", "--set", "partition.clients=5", "--quiet"]) == 0
    [folder] = Path("runs").iterdir()
    assert folder.name.startswith("fedavg-digits-")
    assert (folder / "model.safetensors").exists()
    capsys.readouterr()


def test_an_interrupted_run_says_so(capsys, monkeypatch):
    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedstrata.experiment.run", interrupt)
    assert main(["run", "--out", "out", "--quiet"]) == 130
    error = capsys.readouterr().err
    assert error.startswith("fedstrata: interrupted; ")
    assert "fedstrata run --resume DIR" in error


def test_failing_clients_are_told_in_one_line(capsys, tmp_path, monkeypatch):
    lines = (
        "import fedstrata as fs",
        "class Fails(fs.Objective):",
        "    def loss(*a):",
        "        raise OSError('on fire')",
    )
    Path("fails.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(Path.cwd())
    assert main(["run", "--set", "method.objective=fails:Fails", "--quiet", "--out", "out"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("fedstrata: all 10 clients failed in round 1 of fedavg; client ")
    assert "OSError: on fire (" in error
    assert error.count("\n") == 1


def test_methods_and_datasets_are_listed(capsys):
    assert main(["methods"]) == 0
    listed = capsys.readouterr().out
    for name in ("fedavg", "scaffold", "fedsts", "fedstas", "stratify"):
        assert name in listed
    assert "Karimireddy" in listed
    assert main(["datasets"]) == 0
    assert "digits" in capsys.readouterr().out


def test_partition_prints_its_table_and_draws_it(capsys):
    assert main(["partition", "--set", "partition.clients=4", "--set", "partition.name=iid"]) == 0
    out = capsys.readouterr().out
    assert "partition.png" in out
    assert Path("partition.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in Path().iterdir()] == ["partition.png"]


def test_report_writes_a_page(capsys):
    main(["run", "--set", "training.rounds=2", "--set", "partition.clients=5", "--quiet", "--out", "one"])
    capsys.readouterr()
    assert main(["report", "one"]) == 0
    assert capsys.readouterr().out.strip() == "one/report.html"
    assert "<html" in Path("one/report.html").read_text()


def test_what_a_client_says_is_shown_as_it_is(tmp_path, monkeypatch, capsys):
    """Brackets in it are no markup, and nor are those in the name of a folder."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "saying.py").write_text(
        "from fedstrata.objectives.base import CrossEntropy\n"
        "class Saying(CrossEntropy):\n"
        "    def begin(self, model, context):\n"
        "        if context.counts[0] > 0:\n"
        "            raise FileNotFoundError('cannot open [/data/x]')\n"
        "        return context\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "code")
    Path("s.toml").write_text(
        '[partition]\nname = "classes"\nclients = 10\nper_client = 1\n[training]\nrounds = 1\n'
        '[method]\nobjective = "saying:Saying"\n'
    )
    assert main(["run", "s.toml", "--out", "lr[0.1]/[b]", "--quiet"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert " × failed; the first: client" in said
    assert "cannot open [/data/x]" in said
    assert "written to lr[0.1]/[b]" in said


def test_runs_that_start_within_a_second_have_folders_of_their_own(monkeypatch):
    monkeypatch.setattr("fedstrata.comparison.stamp", lambda: "now")
    Path("s.toml").write_text(BASE)
    for _ in range(3):
        assert main(["run", "s.toml", "--quiet"]) == 0
    names = sorted(path.name for path in Path("runs").iterdir())
    assert names == ["fedavg-digits-now", "fedavg-digits-now-2", "fedavg-digits-now-3"]


def test_what_the_system_refuses_is_one_line(capsys):
    Path("s.toml").write_text(BASE)
    Path("file").write_text("")
    assert main(["run", "s.toml", "--out", "file/run", "--quiet"]) == 2
    assert "out = 'file/run': cannot be made a folder: Not a directory" in capsys.readouterr().err
    assert main(["partition", "s.toml", "--out", "file/picture.png"]) == 1
    assert capsys.readouterr().err.startswith("fedstrata: [Errno ")
