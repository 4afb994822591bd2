"""Whole deployments, as those who run them see them: real processes over mutual TLS."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import slowly
from waiting import free_port, until

import fedstrata as fs
from fedstrata.base.jsonl import read_jsonl
from fedstrata.cli import main
from fedstrata.sites.federation import Sites
from fedstrata.sites.local_deployment import Processes
from fedstrata.sites.provision import ADMIN, SERVER, provision
from fedstrata.sites.transport import STRUCK

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("servers")]

HOSPITALS = Path(__file__).parents[2] / "examples" / "hospitals"
MODEL = "model.safetensors"
ROUNDS = 200
OVER = 240.0
"""Seconds in which a job ends after its last round, whoever is dead then: NVFlare waits two minutes for the dead."""


def command(*words: object) -> str:
    line = [sys.executable, "-m", "fedstrata", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout


@contextmanager
def submitted(out: Path) -> Iterator[subprocess.Popen[bytes]]:
    line = [sys.executable, "-m", "fedstrata", "submit", str(out / ADMIN), "--out", str(out / "result")]
    with (out / "submit.txt").open("wb") as log:
        process = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_site_is_revoked_while_it_works_another_one_dies_and_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers counted for eight seconds more; and a run with a dead site was over ten minutes before its job."""
    pytest.importorskip("nvflare")
    monkeypatch.setenv(slowly.HURRY, str(tmp_path / "hurry"))
    monkeypatch.setenv("PYTHONPATH", str(Path(slowly.__file__).parent), prepend=os.pathsep)
    spec = fs.Experiment.from_table(
        {
            "method": "slowly:Slow",
            "partition": {"name": "dirichlet", "alpha": 1.0, "clients": 3},
            "model": {"name": "mlp", "hidden": [16]},
            "training": {"rounds": ROUNDS, "local_steps": 5, "execution": "per-client"},
            "evaluation": {"every": 0, "checkpoint_every": 1},
        }
    )
    own = {"allow": ["slowly"]}
    table = {"server": {"port": free_port(), **own}, "site": {"a": own, "b": own, "c": own}}
    out = tmp_path / "fed"
    provision(spec, Sites.model_validate(table), out, base_dir=tmp_path)
    with Processes(out) as processes:
        for name in (SERVER, "a", "b", "c"):
            processes.start(name)
        with submitted(out) as submitting:

            def records(name: str) -> list[dict[str, object]]:
                found = list((out / SERVER / "fedstrata").glob(f"*/{name}"))
                return read_jsonl(found[0]) if found else []

            def returned() -> int:
                return int(str(records("metrics.jsonl")[-1]["clients_returned"])) if records("metrics.jsonl") else 0

            def status(site: str, folder: str = ADMIN) -> str:
                status = json.loads(command("status", out / folder, "--json")) or {}
                return str(status.get("sites", {}).get(site, [""])[0])

            until("all three", lambda: returned() == 3)
            command("revoke", out / SERVER, "b")
            since = len(records("metrics.jsonl"))
            until("two more rounds", lambda: len(records("metrics.jsonl")) >= since + 2)
            # At most the round that was just being added up has its answer.
            later = [record["clients_returned"] for record in records("metrics.jsonl")[since + 1 :]]
            assert set(later) == {2}
            assert any(STRUCK in str(event.get("reason")) for event in records("events.jsonl"))
            assert status("b") == "revoked"
            until("the server to write it down", lambda: status("b", SERVER) == "revoked", 30)
            turned = "b is not on the list of sites that may connect, and was refused"
            until("its connection to be refused", lambda: turned in (out / SERVER / "log.txt").read_text(), 120)

            # Put on the list again it takes part again, in the same run.
            command("revoke", out / SERVER, "b", "--undo")
            if "b" in processes.running and processes.running["b"].poll() is not None:
                processes.running.pop("b")
            until("b to be back", lambda: returned() == 3, 240)

            processes.kill("c")
            until("c to be missed", lambda: status("c") == "gone", 60)
            (tmp_path / "hurry").touch()
            until("the last round", lambda: len(records("metrics.jsonl")) == ROUNDS)
            assert submitting.wait(OVER) == 0, (out / "submit.txt").read_text()
    assert (out / "result" / MODEL).exists()
    assert json.loads(command("status", out / SERVER, "--json"))["over"] == "complete"
    assert command("status", out / "result").startswith(f"the run is over: complete; round {ROUNDS} of {ROUNDS}")


def test_the_hospitals_by_hand_as_the_documentation_says(tmp_path: Path) -> None:
    """Every line as it stands there, in an empty folder; no step may be missing."""
    pytest.importorskip("nvflare")
    page = (HOSPITALS.parents[1] / "docs" / "deploy" / "quickstart.md").read_text(encoding="utf-8")
    (tmp_path / "sites.toml").write_text(page.partition("```toml\n")[2].partition("```")[0], encoding="utf-8")
    blocks = [block.partition("```")[0] for block in page.split("```bash\n")[1:]]
    lines = "".join(blocks).splitlines()
    own = str(Path(sys.executable).parent)
    environment = os.environ | {"HOSPITALS": str(HOSPITALS), "PATH": os.pathsep.join([own, os.environ["PATH"]])}
    begun = time.monotonic()
    options: dict[str, Any] = {"cwd": tmp_path, "env": environment, "stderr": subprocess.STDOUT, "check": False}
    try:
        for line in lines:
            with (tmp_path / "said.txt").open("wb") as said:
                done = subprocess.run(["bash", "-c", line], stdout=said, **options)
            assert done.returncode == 0, f"{line}\n{(tmp_path / 'said.txt').read_text(errors='replace')}"
    finally:  # what a line that fails leaves behind
        for script in tmp_path.glob("kits/*/startup/stop_fl.sh"):
            subprocess.run(["bash", str(script)], stdout=subprocess.PIPE, **options)
    print(f"{len(lines)} lines, {(time.monotonic() - begun) / 60:.1f} minutes")


@pytest.mark.parametrize("masking", ["none", "prf"])
def test_a_rehearsal_ends_with_the_bytes_of_the_deployment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, masking: str
) -> None:
    pytest.importorskip("nvflare")
    shutil.copytree(HOSPITALS, tmp_path / "examples" / "hospitals")
    monkeypatch.chdir(tmp_path)
    file = Path("examples/hospitals/sites.toml")
    text = file.read_text().replace("port = 8002", f"port = {free_port()}")
    # What sites tell of their samples would tell their labels: the server has test samples.
    text = text.replace('# data = "test.csv"', 'data = "sites/cleveland.csv"')
    if masking != "none":
        assert main(["keys", "--out", "keys"]) == 0
        text = text.replace('.csv"      #', f'.csv"\nkeys = "{tmp_path / "keys"}"  #')
        for name in ("hungary", "switzerland", "va-long-beach"):
            line = f'data = "sites/{name}.csv"'
            text = text.replace(line, f'{line}\nkeys = "{tmp_path / "keys"}"')
        assert text.count("keys =") == 4
    file.write_text(text)
    changes = ("method.name='stratify'", f"method.masking='{masking}'", "training.rounds=2", "privacy.min_samples=2")
    words = [word for change in changes for word in ("--set", change)]
    spec, sites = "examples/hospitals/hospitals.toml", ["--sites", str(file)]
    assert main(["run", spec, *words, *sites, "--quiet", "--out", "rehearsed"]) == 0
    command("deploy", spec, *words, *sites, "--try", "--out", "trial")
    assert Path("rehearsed", MODEL).read_bytes() == Path("trial", "result", MODEL).read_bytes()
    assert {record["clients_returned"] for record in fs.History.load(Path("trial/result"))} == {4}
