"""The library works without the outer packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fedstrata
from fedstrata.base.outer import OUTER

PACKAGE = Path(fedstrata.__file__).parent


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the package without papers, audits and sites."""
    place = tmp_path_factory.mktemp("copied")
    shutil.copytree(PACKAGE, place / "fedstrata", ignore=shutil.ignore_patterns("__pycache__"))
    for name in OUTER:
        shutil.rmtree(place / "fedstrata" / name)
    return place


def command(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(place)}
    call = [sys.executable, "-m", "fedstrata", *words]
    return subprocess.run(call, cwd=place, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.long
@pytest.mark.parametrize(
    "words", [["run", "--out", "run"], ["compare", "--methods", "fedavg,stratify", "--out", "both"]]
)
def test_the_library_runs_without_outer_packages(copied: Path, words: list[str]) -> None:
    assert not any((copied / "fedstrata" / name).exists() for name in OUTER)
    done = command(copied, *words, "--set", "training.rounds=1", "--quiet")
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_what_needs_an_outer_package_says_so(copied: Path) -> None:
    done = command(copied, "run", "--engine", "nvflare", "--out", "sites", "--set", "training.rounds=1")
    assert done.returncode == 1
    assert "the package fedstrata.sites is not installed here" in done.stderr
    assert "deploy" not in command(copied, "--help").stdout
