"""Looking at a spec or at a result never runs code that came with it."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedstrata as fs
from fedstrata.cli.main import main, parser

LOOK = {
    "approve": ["approve", "job.toml", "--kit", "kit"],
    "asks": ["asks", "job.toml"],
    "audit canaries": ["audit", "canaries", "result", "--quiet"],
    "audit gradients": ["audit", "gradients", "result", "--quiet"],
    "audit prototypes": ["audit", "prototypes", "result", "--quiet"],
    "audit updates": ["audit", "updates", "result", "--quiet"],
    "check": ["check", "kit"],
    "completion": ["completion", "bash"],
    "datasets": ["datasets"],
    "explain": ["explain", "alpha"],
    "keys": ["keys", "--out", "keys"],
    "ledger": ["ledger", "kit"],
    "methods": ["methods"],
    "new": ["new", "spec", "new.toml"],
    "partition": ["partition", "job.toml"],
    "predict": ["predict", "result", "rows.csv"],
    "recommend": ["recommend", "job.toml"],
    "renew": ["renew", "kit", "kit/x.crt"],
    "report": ["report", "result"],
    "request": ["request", "site"],
    "revoke": ["revoke", "kit", "site"],
    "status": ["status", "result"],
    "strata": ["strata", "job.toml"],
    "submit": ["submit", "result", "--out", "fetched"],
    "table": ["table", "result"],
    "verify": ["verify", "result"],
}
MORE = [
    ["asks", "job.toml", "--policy", "kit"],
    ["strata", "result"],
    ["status", "result", "--json"],
    ["partition", "own-partition.toml"],
]
IMPORT = {"board list", "board run", "board show", "compare", "deploy", "reproduce", "run", "settings", "sweep"}
"""Commands that train, or describe the class that is named on the command line."""

EVIL = """
from pathlib import Path
Path({marker!r}).touch()
import fedstrata as fs
class Method(fs.FedAvg):
    pass
class Partition(fs.IID):
    pass
class Callback(fs.Callback):
    pass
def metric(labels, probabilities):
    return 0.0
"""


def names(found: argparse.ArgumentParser, before: str = "") -> Iterator[str]:
    """Every command, also those inside another."""
    inner = [action for action in found._actions if isinstance(action, argparse._SubParsersAction)]
    for action in inner:
        for name, each in action.choices.items():
            yield from names(each, f"{before} {name}".strip())
    if not inner:
        yield before


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the hostile module leaves when it is imported; a hostile spec and a hostile result lie where one looks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    found = tmp_path / "the-code-ran"
    (tmp_path / "result").mkdir()
    for folder in (tmp_path, tmp_path / "result"):
        (folder / "evil.py").write_text(EVIL.format(marker=str(found)))
    for loaded in [name for name in sys.modules if name.split(".")[0] in ("evil", "result")]:
        monkeypatch.delitem(sys.modules, loaded)
    spec = fs.Experiment(training=fs.Training(rounds=1))
    fs.run(spec, out=tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "result", dirs_exist_ok=True)
    text = (tmp_path / "plain" / "spec.toml").read_text().replace('name = "fedavg"', 'name = "result.evil:Method"')
    assert "result.evil" in text
    (tmp_path / "result" / "spec.toml").write_text(text)
    (tmp_path / "result" / "events.jsonl").touch()
    (tmp_path / "job.toml").write_text(
        'callbacks = ["evil:Callback"]\n[method]\nname = "evil:Method"\n[evaluation]\nmetrics = ["evil:metric"]\n'
    )
    (tmp_path / "own-partition.toml").write_text('[partition]\nname = "evil:Partition"\n')
    (tmp_path / "kit" / "local").mkdir(parents=True)
    return found


def test_each_command_looks_or_imports() -> None:
    assert sorted(names(parser())) == sorted([*LOOK, *IMPORT])


@pytest.mark.slow
@pytest.mark.parametrize("words", [*LOOK.values(), *MORE], ids=" ".join)
def test_a_command_that_looks_imports_nothing(
    words: list[str], marker: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`asks`, `approve`, `status`, `partition`, `strata` and `audit` ran the code."""
    try:
        code = main(words)
    except SystemExit as stop:
        code = int(stop.code or 0)
    assert not marker.exists()
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    if words[0] in ("asks", "approve", "partition", "strata", "audit"):
        assert code == 2
        assert "names Python code" in printed.err or "allow" in printed.err


@pytest.mark.slow
@pytest.mark.parametrize("words", [["partition", "own-partition.toml"], ["asks", "job.toml"]], ids=" ".join)
def test_a_spec_that_is_trusted_is_imported(words: list[str], marker: Path) -> None:
    main([*words, "--trust"])
    assert marker.exists()


@pytest.mark.slow
def test_a_command_that_trains_finds_modules_in_the_working_directory(marker: Path) -> None:
    assert main(["run", "job.toml", "--quiet", "--out", "trained", "--set", "training.rounds=1"]) == 0
    assert marker.exists()


@pytest.mark.slow
def test_as_a_module_the_command_leaves_the_working_directory_alone(marker: Path) -> None:
    Path("matplotlib.py").write_text(EVIL.format(marker=str(marker)))
    command = [sys.executable, "-m", "fedstrata", "report", "plain"]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    assert not marker.exists()
