from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedstrata.cli import main

BASE = """[training]
rounds = 1
[partition]
clients = 10
"""


@pytest.mark.slow
def test_run_writes_prints_and_draws(capsys, tmp_path):
    Path("s.toml").write_text(BASE)
    assert main(["run", "s.toml", "--out", "runs/one", "--set", "method=scaffold", "--set", "seed=3"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""  # no bar where there is no terminal
    assert "scaffold" in captured.out
    assert "written to runs/one" in captured.out
    names = {path.name for path in Path("runs/one").iterdir()}
    assert names >= {"spec.toml", "metrics.jsonl", "summary.json", "model.safetensors", "partition.png"}
    assert "accuracy.png" not in names  # a single round has no curve
    summary = json.loads(Path("runs/one/summary.json").read_text())
    assert (summary["method"], summary["seed"], summary["rounds"]) == ("scaffold", 3, 1)
    assert main(["run", "s.toml", "--out", "runs/two", "--set", "training.rounds=2"]) == 0
    assert Path("runs/two/accuracy.png").stat().st_size > 5000
    capsys.readouterr()
    assert main(["run", "s.toml", "--out", "runs/one"]) == 2
    assert "out = 'runs/one': the folder already contains a run" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_without_out_gets_a_folder_of_its_own(capsys):
    assert main(["run", "--set", "training.rounds=1", "--set", "partition.clients=5", "--quiet"]) == 0
    [folder] = Path("runs").iterdir()
    assert folder.name.startswith("fedavg-digits-")
    assert (folder / "model.safetensors").exists()
    capsys.readouterr()


@pytest.mark.slow
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
    assert error.startswith("fedstrata: all 10 clients failed in round 1 of fedavg. For example, client ")
    assert "OSError: on fire (" in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_what_a_client_says_is_shown_as_it_is(tmp_path, monkeypatch, capsys):
    """Brackets in it are no markup, and nor are those in the name of a folder."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "saying.py").write_text(
        "from fedstrata.objectives.base import CrossEntropy\n"
        "class Saying(CrossEntropy):\n"
        "    def client_init(self, model, context):\n"
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
    assert " × failed. The first reason: client" in said
    assert "cannot open [/data/x]" in said
    assert "written to lr[0.1]/[b]" in said


@pytest.mark.slow
def test_runs_that_start_within_a_second_have_folders_of_their_own(monkeypatch):
    monkeypatch.setattr("fedstrata.cli.common.stamp", lambda: "now")
    Path("s.toml").write_text(BASE)
    for _ in range(3):
        assert main(["run", "s.toml", "--quiet"]) == 0
    names = sorted(path.name for path in Path("runs").iterdir())
    assert names == ["fedavg-digits-now", "fedavg-digits-now-2", "fedavg-digits-now-3"]


WILD = "[partition]\nclients = 4\n[training]\nrounds = 2\nlr = 1e9\nlocal_epochs = 1\n"


@pytest.mark.slow
@pytest.mark.filterwarnings("default:.*never changed")
def test_a_run_that_never_took_a_step_says_so_and_exits_with_3(capsys):
    Path("wild.toml").write_text(WILD)
    assert main(["run", "wild.toml", "--out", "wild", "--quiet"]) == 3
    said, warned = capsys.readouterr()
    message = "the model never changed, because no reply could be used in 2 rounds (8 failed or refused)"
    assert warned == f"fedstrata: warning: {message}\n"
    assert "warning" in said
    assert "8 × refused. The first reason: " in said
    assert json.loads(Path("wild/summary.json").read_text())["warning"] == message
    assert main(["run", "--resume", "wild", "--quiet"]) == 3  # it is over, and it still is what it is


@pytest.mark.slow
@pytest.mark.filterwarnings("default:.*no reply could be used")
def test_a_run_that_diverges_says_from_which_round_on_and_exits_with_3(capsys):
    diverging = "[partition]\nclients = 4\n[model]\nname = 'mlp'\nhidden = [12, 12, 12]\n"
    Path("wild.toml").write_text(diverging + "[training]\nrounds = 4\nlr = 1e12\nlocal_steps = 1\n")
    assert main(["run", "wild.toml", "--out", "wild", "--quiet"]) == 3
    message = "the model has not changed since round 1, because no reply could be used in the last 3 rounds "
    message += "(12 failed or refused)"
    assert capsys.readouterr().err == f"fedstrata: warning: {message}\n"
    assert json.loads(Path("wild/summary.json").read_text())["warning"] == message


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.filterwarnings("default:.*never changed")
def test_a_comparison_and_a_sweep_finish_the_others_and_exit_with_3(capsys):
    overlays = "[compare.wild]\nmethod = 'fedavg'\n[compare.tame]\nmethod = 'fedavg'\ntraining = { lr = 0.1 }\n"
    Path("s.toml").write_text(WILD + "[evaluation]\nvalidation = 0.2\n" + overlays)
    assert main(["compare", "s.toml", "--out", "cmp", "--jobs", "1", "--quiet"]) == 3
    said, warned = capsys.readouterr()
    assert "wild †" in said
    assert "† 1 run of wild broke down: no reply could be used from some round to the end." in " ".join(said.split())
    assert warned.startswith("fedstrata: warning: wild, seed 0: the model never changed")
    assert "wild †" in Path("cmp/table.md").read_text()
    assert Path("cmp/tame/seed-0/model.safetensors").exists()
    assert main(["sweep", "s.toml", "--set", "training.lr=1e9,0.1", "--out", "swp", "--jobs", "1", "--quiet"]) == 3
    said = capsys.readouterr().out
    assert "no reply could be used" in said
    assert "Best settings: lr=0.1" in said


@pytest.mark.long
@pytest.mark.slow
def test_a_comparison_prints_all_methods_of_its_folder_and_names_a_wrong_engine(capsys):
    Path("s.toml").write_text(BASE)
    few = ["--set", "training.rounds=1", "--out", "cmp", "--jobs", "1", "--quiet"]
    assert main(["compare", "s.toml", "--methods", "fedavg", *few]) == 0
    capsys.readouterr()
    assert main(["compare", "s.toml", "--methods", "fedprox", *few]) == 0
    said = capsys.readouterr().out
    assert "fedavg" in said
    assert "minus fedavg" in said
    assert main(["compare", "s.toml", "--methods", "moon", "--engine", "rey", *few]) == 2
    assert (
        "engine = 'rey': is not an engine; did you mean 'ray'? Use one of: local, ray, nvflare"
        in capsys.readouterr().err
    )


@pytest.mark.long
def test_a_comparison_on_ray_gives_the_same_models():
    pytest.importorskip("ray")
    Path("s.toml").write_text(BASE)
    for engine in ("local", "ray"):
        few = ["--set", "training.execution=per-client", "--engine", engine, "--out", engine, "--quiet"]
        assert main(["compare", "s.toml", "--methods", "fedavg,scaffold", *few]) == 0
    for method in ("fedavg", "scaffold"):
        model = f"{method}/seed-0/model.safetensors"
        assert (Path("ray") / model).read_bytes() == (Path("local") / model).read_bytes()
