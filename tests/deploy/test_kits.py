"""Start-up kits: who may read them, what they log, and that they work wherever they lie, with the right Python."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fedstrata.deploy.kits import LOGGING, RESOURCES
from fedstrata.deploy.start import start

pytestmark = pytest.mark.xdist_group("kits")


@pytest.fixture
def kits(federations: Path, tmp_path: Path) -> Path:
    shutil.copytree(federations / "fed", tmp_path / "fed")
    return tmp_path / "fed"


def test_nobody_else_can_read_a_kit(kits: Path) -> None:
    """The root's private key was readable, and kept safe by its folder alone."""
    for path in (kits, *kits.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() or path.suffix == ".sh" else 0o600), path
    assert stat.S_IMODE((kits / "authority" / "cert.json").stat().st_mode) == 0o600


def test_a_kit_has_no_filters_that_would_see_nothing(kits: Path) -> None:
    assert [path.name for path in kits.rglob("*") if "sample" in path.name or path.suffix == ".ipynb"] == []


def test_the_records_of_jobs_are_in_the_kit_wherever_it_is_moved(kits: Path, tmp_path: Path) -> None:
    """They were in a folder of all users, by the name of the federation: another one of that name found them."""
    for place in ("first", "second"):
        moved = kits / "server" if place == "first" else (kits / "server").rename(tmp_path / "elsewhere")
        assert start(moved, verbose=False) == 0
        text = (moved / RESOURCES).read_text()
        assert f'"{moved}/records/jobs-storage"' in text
        assert f'"{moved}/records/snapshot-storage"' in text
        assert "/var/tmp" not in text
        assert "/tmp/nvflare" not in text
    moved.rename(kits / "server")


@pytest.mark.parametrize("verbose", [False, True])
def test_nvflare_is_quiet_unless_it_is_asked(kits: Path, verbose: bool) -> None:
    start(kits / "a", verbose=verbose)
    config = json.loads((kits / "a" / LOGGING).read_text())
    assert config["loggers"]["root"]["level"] == "INFO"
    assert ("nvflare" not in config["loggers"]) == verbose
    assert set(config["handlers"]) == {"consoleHandler", "logFileHandler"}


@pytest.mark.parametrize("how", ["named", "command"])
def test_a_kit_starts_with_the_python_that_has_fedstrata(kits: Path, tmp_path: Path, how: str) -> None:
    """It took whatever python3 there was."""
    for name in ("python3", "own"):
        python = tmp_path / name
        python.write_text('#!/bin/bash\necho "$(basename "$0") $*"; [[ "$*" == *deploy.start* ]] || exit 7\n')
        python.chmod(0o755)
    command = tmp_path / "fedstrata"
    command.write_text(f"#!{tmp_path / 'own'}\n")
    command.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    if how == "named":
        command.unlink()
        environment["FEDSTRATA_PYTHON"] = str(tmp_path / "own")
    done = subprocess.run(
        ["bash", str(kits / "a" / "startup" / "sub_start.sh"), "--once", "--verbose"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    assert f"own -m fedstrata.deploy.start {kits / 'a'} --once --verbose" in done.stdout
    assert "own -u -m nvflare.private.fed.app.client.client_train" in done.stdout
    assert "python3" not in done.stdout


def test_a_kit_that_may_not_start_does_not(kits: Path, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("#!/bin/bash\necho 'no data'; exit 3\n")
    (tmp_path / "own").chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "FEDSTRATA_PYTHON": str(tmp_path / "own")}
    command = ["bash", str(kits / "a" / "startup" / "sub_start.sh"), "--once"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, "no data" in done.stdout) == (3, True)
    assert sys.executable not in done.stdout


@pytest.mark.parametrize(("given", "used"), [({}, "2"), ({"MALLOC_ARENA_MAX": "8"}, "8")])
def test_a_process_keeps_few_arenas_unless_told(kits: Path, tmp_path: Path, given: dict[str, str], used: str) -> None:
    """With one a thread, a server's memory grew for as long as messages came."""
    (tmp_path / "own").write_text('#!/bin/bash\necho "arenas: $MALLOC_ARENA_MAX"; exit 3\n')
    (tmp_path / "own").chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "FEDSTRATA_PYTHON": str(tmp_path / "own"), **given}
    command = ["bash", str(kits / "a" / "startup" / "sub_start.sh"), "--once"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert f"arenas: {used}\n" in done.stdout
