"""A hostile server of a real federation: processes with certificates of their own, over NVFlare and mutual TLS."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
from waiting import free_port

import fedstrata as fs
from fedstrata.cli import main
from fedstrata.runs.preparation import prepare
from fedstrata.sites.federation import Sites
from fedstrata.sites.ledger import PLACE, check
from fedstrata.sites.local_deployment import Processes
from fedstrata.sites.policy import FILE, Policy
from fedstrata.sites.provision import ADMIN, SERVER, provision
from fedstrata.sites.submit import submit

PARTY = Path(__file__).parent / "party"
SPEC = fs.Experiment.from_table(
    {
        "method": {"name": "stratify", "masking": "prf"},
        "data": {"name": "digits", "limit": 300},
        "partition": {"name": "iid", "clients": 2},
        "model": {"name": "mlp", "hidden": []},
        "training": {"rounds": 1},
    }
)


@pytest.mark.long
@pytest.mark.xdist_group("servers")
@pytest.mark.filterwarnings("ignore:ssl_context is deprecated:DeprecationWarning")
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("nvflare", "tenseal"))), reason="needs the extras nvflare and he"
)
def test_what_a_hostile_server_gets_from_real_sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One site is as its kit was made; nothing guards the other one, the control."""
    assert main(["keys", "--out", str(tmp_path / "keys")]) == 0
    port = free_port()
    keys = {"keys": str(tmp_path / "keys")}
    sites = Sites.model_validate({"server": {"port": port}, "site": {"guarded": keys, "open": keys}})
    kits = tmp_path / "kits"
    provision(SPEC, sites, kits, base_dir=tmp_path)
    assert Policy.read(kits / "guarded").min_samples == 5
    (kits / "open" / FILE).write_text(Policy(jobs="within-policy", min_samples=1).to_toml())
    with Processes(kits) as processes:
        for name, party in ((SERVER, "hostile"), ("guarded", ""), ("open", "open")):
            with monkeypatch.context() as patch:
                if party:
                    patch.setenv("FEDSTRATA_PARTY", party)
                    found = [str(PARTY), str(PARTY.parent), os.environ.get("PYTHONPATH", "")]
                    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, found)))
                processes.start(name)
        result = submit(kits / ADMIN, tmp_path / "result", sites=2, lost=60.0, report=lambda text: None)
    loot = json.loads((result / "loot.json").read_text())
    prepared = prepare(SPEC)
    theirs = sorted(set(prepared.data.y_train[prepared.assignment[1]].tolist()))
    assert loot["labels"] == {"1": theirs}, "the control: labels in the clear, though they are masked"
    assert loot["samples"] == {"1": 1}, "the control: the gradient of a single sample"
    assert list(loot["no labels"]) == list(loot["no gradient"]) == ["0"]
    assert "site guarded: refused by the rule 'kind'" in loot["no labels"]["0"]
    assert "site guarded: refused by the rule 'order'" in loot["no gradient"]["0"]
    ledger = check(kits / "guarded" / PLACE)
    assert ledger.problems == []
    assert [entry["refused"] for entry in ledger.entries if "refused" in entry] == ["kind", "order"]
