"""The kits of two federations with the same name, made once because this takes seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from waiting import free_port

import fedstrata as fs
from fedstrata.sites.federation import Sites
from fedstrata.sites.provision import provision

OWN = {
    "name": "own.csv",
    "schema": {
        "label": "ill",
        "classes": ["no", "yes"],
        "test": 0.2,
        "columns": {"age": {"type": "number", "range": [0, 120]}},
    },
}


@pytest.fixture(scope="session")
def federations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the federations ``fed`` and ``other``, each with sites a and b that have their own data."""
    pytest.importorskip("nvflare")
    place = tmp_path_factory.mktemp("federations")
    spec = fs.Experiment.from_table({"data": OWN, "partition": {"name": "natural"}})
    port = free_port()
    sites = Sites.model_validate({"own_data": True, "server": {"port": port}, "site": {"a": {}, "b": {}}})
    for name in ("fed", "other"):
        provision(spec, sites, place / name)
    return place
