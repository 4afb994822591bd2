"""Augmentation at sites: the same bytes as in one process, and no function that a site does not allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from asked import Site
from near_sites import near_sites, through_the_server

import fedstrata as fs
from fedstrata.runs.simulation import run_prepared
from fedstrata.sites.wire import Begun, Refused


@pytest.fixture(scope="module", autouse=True)
def _needed() -> None:
    """Import nvflare when the first test of this file runs, because the import takes seconds."""
    pytest.importorskip("nvflare")


METHODS: dict[str, Any] = {
    "asks": "fedavg",
    "relays": "sfl",
    "together": {"name": "stratify", "cap": 10},
    "relays by stratum": {"name": "stratify", "mode": "single", "cap": 5},
}
CROPS = {"name": "crop-flip", "padding": 2}


def spec_of(way: str, augment: Any) -> fs.Experiment:
    return fs.Experiment.from_table(
        {
            "data": {"name": "digits", "limit": 60, "augment": augment},
            "method": METHODS[way],
            "partition": {"name": "iid", "clients": 4},
            "model": {"name": "mlp", "hidden": [4]},
            "training": {"rounds": 2, "batch_size": 8, "local_epochs": 1, "execution": "per-client"},
        }
    )


def same(one: fs.History, other: fs.History) -> None:
    volatile = {"seconds", "bytes_evaluation"}
    rows = [[{key: row[key] for key in row if key not in volatile} for row in each] for each in (one, other)]
    assert rows[0] == rows[1]
    assert all((one.params[name] == other.params[name]).all() for name in one.params)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("make", [near_sites, through_the_server])
@pytest.mark.parametrize("way", METHODS)
@pytest.mark.parametrize("augment", [CROPS, "augmentations:noise"], ids=str)
def test_sites_give_the_same_bytes(way: str, augment: Any, make: Any, tmp_path: Path) -> None:
    spec = spec_of(way, augment)
    prepared = fs.prepare(spec)
    same(run_prepared(prepared, None, make(prepared, tmp_path, None)), fs.run(spec))


@pytest.mark.slow
def test_a_site_calls_only_functions_that_it_allows(tmp_path: Path) -> None:
    table = {"data": {"name": "digits", "limit": 60, "augment": "augmentations:noise"}}
    refused = Site(tmp_path / "closed", table).begin()
    assert isinstance(refused, Refused)
    assert refused.reason.startswith(
        "data.augment.name = 'augmentations:noise': is not in a package that this party allows. The party's list "
        "'allow' is empty."
    )
    assert isinstance(Site(tmp_path / "open", table, allow=["augmentations"]).begin(), Begun)
    table["data"]["augment"] = CROPS
    assert isinstance(Site(tmp_path / "bundled", table).begin(), Begun)
