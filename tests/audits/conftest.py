"""Short runs of ReBaFL on the digits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import fedstrata as fs


def experiment(**changes: Any) -> dict[str, Any]:
    """Return the spec of a short run, into which ``changes`` are merged by section."""
    table: dict[str, Any] = {
        "seed": 1,
        "data": {"name": "digits"},
        "partition": {"name": "classes", "clients": 4, "per_client": 5},
        "availability": {"name": "bernoulli", "p": 0.7},
        "method": {"name": "rebafl"},
        "model": {"name": "cnn"},
        "training": {"rounds": 3, "clients_per_round": 4, "local_epochs": 1, "batch_size": 16, "lr": 0.05},
        "evaluation": {"checkpoint_every": 1},
    }
    for section, settings in changes.items():
        table[section] = table[section] | settings if section != "method" else settings
    return table


@pytest.fixture(scope="session")
def make_small() -> Callable[..., Path]:
    """Return a function that runs a changed spec with a small model and returns the run folder."""

    def make(folder: Path, **changes: Any) -> Path:
        fs.run(experiment(**{"model": {"channels": [4, 8], "hidden": 16}, **changes}), out=folder)
        return folder

    return make


@pytest.fixture
def make_run(make_small: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Return a function that runs a changed spec in the test's own folder and returns the run folder."""
    return partial(make_small, tmp_path / "run")


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run without changes."""
    folder = tmp_path_factory.mktemp("audit") / "run"
    fs.run(experiment(), out=folder)
    return folder
