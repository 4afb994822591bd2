"""A hostile server of a real federation: processes with certificates of their own, over NVFlare and mutual TLS."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from waiting import free_port

import fedstrata as fs
from fedstrata.base import records
from fedstrata.cli import main
from fedstrata.runs.preparation import prepare
from fedstrata.sites.disclosure import hash_of
from fedstrata.sites.federation import Sites
from fedstrata.sites.ledger import PLACE, check
from fedstrata.sites.local_deployment import Processes
from fedstrata.sites.policy import FILE, Policy
from fedstrata.sites.provision import ADMIN, SERVER, provision
from fedstrata.sites.submit import submit
from fedstrata.sites.wire import Refused, Surveyed

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


CELLS = {"name": [f"Xq{n:02}vz" for n in range(40)], "age": [f"{31 + n}.{n:03}" for n in range(40)]}
SCHEMA = {"label": "disease", "classes": ["no", "yes"], "columns": {"age": "number"}}
PROBES: list[dict[str, Any]] = [
    SCHEMA,
    {**SCHEMA, "columns": {"name": {"type": "category", "categories": ["?"]}}},
    {**SCHEMA, "columns": {"age": {"type": "number", "range": [0, 40]}}},
    {**SCHEMA, "columns": {"age": {"impute": "median", "step": 0.001}}},
    {**SCHEMA, "columns": {"name": "number"}},
    {**SCHEMA, "columns": {"weight": "number"}},
]


def described(schema: dict[str, Any]) -> fs.Experiment:
    data = {"name": "x.csv", "schema": schema}
    table = {"data": data, "partition": "natural", "model": "tabular", "evaluation": {"client_test": 0.2}}
    return fs.Experiment.from_table({**table, "training": {"rounds": 1}})


@pytest.mark.long
@pytest.mark.xdist_group("servers")
@pytest.mark.filterwarnings("ignore:ssl_context is deprecated:DeprecationWarning")
@pytest.mark.skipif(not importlib.util.find_spec("nvflare"), reason="needs the extra nvflare")
def test_what_a_server_that_probes_learns_of_the_tables_of_real_sites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site that approved the job, one that takes any job within its policy, and one that is more generous."""
    rows = [
        f"{name},{age},{'yes' if n % 2 else 'no'}" for n, (name, age) in enumerate(zip(*CELLS.values(), strict=True))
    ]
    (tmp_path / "own.csv").write_text("\n".join(["name,age,disease", *rows, ""]))
    policies = {
        "approved": None,
        "within": Policy(jobs="within-policy"),
        "generous": Policy(jobs="within-policy", min_samples=1, surveys=9),
    }
    site = {name: {"data": "own.csv"} for name in policies}
    sites = Sites.model_validate({"own_data": True, "server": {"port": free_port()}, "site": site})
    kits = tmp_path / "kits"
    provision(described(SCHEMA), sites, kits, base_dir=tmp_path)
    for name, policy in policies.items():
        if policy is not None:
            (kits / name / FILE).write_text(policy.to_toml())
    jobs = [described(schema) for schema in PROBES]
    with Processes(kits) as processes:
        with monkeypatch.context() as patch:
            patch.setenv("FEDSTRATA_PARTY", "probing")
            patch.setenv("FEDSTRATA_PROBES", json.dumps([job.to_toml() for job in jobs]))
            patch.setenv("PYTHONPATH", os.pathsep.join([str(PARTY), os.environ.get("PYTHONPATH", "")]))
            processes.start(SERVER)
        for name in policies:
            processes.start(name)
        result = submit(kits / ADMIN, tmp_path / "result", sites=3, lost=60.0, report=lambda text: None)
    loot = {
        name: [*map(bytes.fromhex, found)] for name, found in json.loads((result / "loot.json").read_text()).items()
    }
    assert loot.keys() == policies.keys()
    for name, left in loot.items():
        answers = [records.decode(data) for data in left]
        assert isinstance(answers[0], Surveyed), "the control: the site answers a job that its data fit"
        assert answers[0].statistics.samples > 20
        assert not [data for data in left for cells in CELLS.values() for cell in cells if cell.encode() in data]
        assert all(isinstance(answer, Refused) for answer in answers[1:]), answers
        reasons = [answer.reason for answer in answers[1:]]
        assert not [reason for reason in reasons if re.search(r"line \d|\d+ (rows|values|training|samples)", reason)]
        assert ("column 'name'" in reasons[0]) == (name == "generous"), "the control: column and rule are told"
        ledger = check(kits / name / PLACE)
        assert ledger.problems == []
        probes = [entry for entry in ledger.entries if entry["kind"] == "Survey"]
        assert [entry["run"] for entry in probes] == [hash_of(job) for job in jobs]
        assert [bool(entry.get("refused") or entry.get("failed")) for entry in probes] == [False] + [True] * 5
