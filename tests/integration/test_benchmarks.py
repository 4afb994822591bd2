"""Every program in ``benchmarks`` can be loaded; a renamed class or module would otherwise break it unnoticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.is_dir(), reason="no benchmarks beside an installed package")
def test_every_benchmark_can_be_loaded():
    load = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    names = sorted(path.stem for path in FOLDER.glob("*.py"))
    done = subprocess.run(
        [sys.executable, "-c", load, *names], cwd=FOLDER, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
