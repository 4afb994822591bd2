"""Secure sums over processes with mutual TLS, whose kits have the certificates: the model is that of a simulation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import free_port, until

import fedstrata as fs
from fedstrata.base.jsonl import read_jsonl
from fedstrata.cli import main
from fedstrata.sites.certificates import fingerprint
from fedstrata.sites.federation import Sites
from fedstrata.sites.ledger import PLACE, check
from fedstrata.sites.local_deployment import Processes
from fedstrata.sites.policy import FILE, Policy
from fedstrata.sites.provision import ADMIN, SERVER, provision

pytest.importorskip("cryptography")
from secure_sites import spec, without

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.xdist_group("servers"),
    pytest.mark.filterwarnings("ignore:ssl_context is deprecated:DeprecationWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _needed() -> None:
    """Import nvflare when the first test of this file runs, because the import takes seconds."""
    pytest.importorskip("nvflare")


def federation(names: str) -> Sites:
    table: dict[str, Any] = {"server": {"port": free_port()}, "policy": {"min_samples": 1}}
    return Sites.model_validate(table | {"site": {name: {} for name in names}})


def run(made: fs.Experiment, names: str, fed: Path) -> subprocess.Popen[bytes]:
    """Let each site know its peers by their fingerprints, and submit the job in a process of its own."""
    provision(made, federation(names), fed)
    known = {name: fingerprint(fed / name) for name in names}
    for name in names:
        policy = Policy.read(fed / name)
        assert (policy.sums, policy.parties) == ("secure", 3)
        peers = [known[other] for other in names if other != name]
        (fed / name / FILE).write_text(policy.model_copy(update={"peers": peers}).to_toml())
    return subprocess.Popen([sys.executable, "-m", "fedstrata", "submit", fed / ADMIN, "--out", fed / "result"])


def rounds_of(fed: Path) -> int:
    """Return how many rounds the server has finished."""
    return sum(len(read_jsonl(path)) for path in (fed / SERVER / "fedstrata").glob("*/metrics.jsonl"))


@pytest.mark.parametrize("sites", [3, 4])
def test_a_deployment_has_the_model_of_a_simulation(sites: int, tmp_path: Path) -> None:
    """With four sites, one is killed, and the run goes on without it."""
    names, fed = "abcd"[:sites], tmp_path / "fed"
    made = spec(sites, rounds=3 if sites == 3 else 40)
    with Processes(fed) as processes:
        submitting = run(made, names, fed)
        for name in (SERVER, *names):
            processes.start(name)
        if sites == 4:
            until("three rounds", lambda: rounds_of(fed) > 2)
            processes.kill("d")
        assert submitting.wait() == 0
    history = fs.History.load(fed / "result")
    trained = [record["clients_trained"] for record in history]
    first = trained.index(3) + 1
    assert trained == [sites] * (first - 1) + [3] * (len(trained) - first + 1)
    if sites == 3:
        fs.run(made, out=tmp_path / "here")
    else:
        without(3, first, made, tmp_path, out=tmp_path / "here")
    model = "model.safetensors"
    assert (fed / "result" / model).read_bytes() == (tmp_path / "here" / model).read_bytes()
    for name in "abc":
        assert main(["ledger", str(fed / name), "--verify", "--told", str(fed / "result")]) == 0
        entries = check(fed / name / PLACE).entries
        assert next(len(each["members"]) for each in entries if each["kind"] == "Roster") == sites
        assert {"Masked of Fit", "RevealAll", "Opened"} <= {entry["kind"] for entry in entries}
        assert not {"Fit", "Evaluate"} & {entry["kind"] for entry in entries}
