"""The library works, and is tested, without the outer packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedstrata.base.outer import OUTER, installed

ROOT = Path(__file__).parents[2]
KEPT = ("src", "tests", "docs", "examples", "benchmarks", "tools", "*.md", "*.toml", "constraints.txt", "CITATION.cff")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(installed() != list(OUTER), reason="this is such a copy"),
]


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository without papers, audits and sites, and without their tests."""
    place = tmp_path_factory.mktemp("copied")
    for path in (path for pattern in KEPT for path in ROOT.glob(pattern)):
        if path.is_file():
            shutil.copy(path, place)
        else:
            shutil.copytree(path, place / path.name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in OUTER:
        shutil.rmtree(place / "src" / "fedstrata" / name)
        shutil.rmtree(place / "tests" / name)
    shutil.rmtree(place / "tests" / "hostile")  # of sites
    return place


def python(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a module in the copy."""
    environment = os.environ | {"PYTHONPATH": str(place / "src")}
    call = [sys.executable, "-m", *words]
    return subprocess.run(call, cwd=place, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "words", [["run", "--out", "run"], ["compare", "--methods", "fedavg,stratify", "--out", "both"]]
)
def test_the_library_runs_without_outer_packages(copied: Path, words: list[str]) -> None:
    done = python(copied, "fedstrata", *words, "--set", "training.rounds=1", "--quiet")
    assert done.returncode == 0, done.stderr


def test_what_needs_an_outer_package_says_so(copied: Path) -> None:
    done = python(copied, "fedstrata", "run", "--engine", "nvflare", "--out", "sites", "--set", "training.rounds=1")
    assert done.returncode == 1
    assert "the package fedstrata.sites is not installed" in done.stderr
    assert "deploy" not in python(copied, "fedstrata", "--help").stdout


def test_the_fast_tests_pass_without_outer_packages(copied: Path) -> None:
    fast = ("-q", "-n", "2", "--dist", "loadgroup", "-m", "not slow and not long", "-p", "no:cacheprovider")
    done = python(copied, "pytest", *fast)
    assert done.returncode == 0, done.stdout[-5000:]
