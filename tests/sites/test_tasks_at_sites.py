"""Tasks at sites, on the data of the spec: the same bytes as in a simulation."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from near_sites import near_sites, through_the_server
from quick import others_long

import fedstrata as fs
from fedstrata.runs.simulation import run_prepared
from fedstrata.sites.simulator import simulate


@pytest.fixture(scope="module", autouse=True)
def _needed() -> None:
    """Import nvflare when the first test of this file runs, because the import takes seconds."""
    pytest.importorskip("nvflare")


METHODS: dict[str, Any] = {
    "asks": "fedavg",
    "relays": "sfl",
    "together": {"name": "stratify", "batch_size": 8},
    "relays by stratum": {"name": "stratify", "mode": "single"},
}


def spec_of(method: Any, place: Path) -> fs.Experiment:
    """Return the spec of a regression of two targets from an ``.npz`` file."""
    generator = np.random.default_rng(3)
    x = generator.normal(size=(60, 4)).astype(np.float32)
    y = np.stack([100 + 20 * x[:, 0], x[:, 1] - x[:, 2]], axis=1)
    np.savez(place / "stays.npz", x_train=x[:44], y_train=y[:44], x_test=x[44:], y_test=y[44:])
    return fs.Experiment.from_table(
        {
            "task": {"name": "regression", "bins": 3},
            "data": str(place / "stays.npz"),
            "method": method,
            "partition": {"name": "iid", "clients": 4},
            "model": {"name": "mlp", "hidden": [4]},
            "training": {"rounds": 2, "batch_size": 4, "lr": 0.05, "execution": "per-client"},
            "evaluation": {"client_test": 0.2, "fine_tune": 1},
        }
    )


def same(one: fs.History, other: fs.History) -> None:
    volatile = {"seconds", "bytes_evaluation"}
    rows = [[{key: row[key] for key in row if key not in volatile} for row in each] for each in (one, other)]
    assert rows[0] == rows[1]
    assert all((one.params[name] == other.params[name]).all() for name in one.params)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "make"),
    others_long(
        itertools.product(METHODS, [near_sites, through_the_server]),
        [*((way, near_sites) for way in METHODS), ("relays", through_the_server)],
    ),
)
def test_sites_give_the_same_bytes(way: str, make: Any, tmp_path: Path) -> None:
    spec = spec_of(METHODS[way], tmp_path)
    prepared = fs.prepare(spec)
    same(run_prepared(prepared, None, make(prepared, tmp_path, None)), fs.run(spec))


@pytest.mark.long
@pytest.mark.xdist_group("servers")
def test_the_simulator_gives_the_same_bytes(tmp_path: Path) -> None:
    spec = spec_of("fedavg", tmp_path)
    (history,) = simulate([(spec, None)], sites=2)
    same(history, fs.run(spec))
