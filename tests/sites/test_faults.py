"""A deployment with mutual TLS in which everything goes wrong that can: real processes, real signals."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import slowly
from lazy import Lazy
from waiting import free_port, until

import fedstrata as fs
from fedstrata.base.jsonl import read_jsonl
from fedstrata.sites.configuration import write_job
from fedstrata.sites.federation import Sites
from fedstrata.sites.local_deployment import Processes
from fedstrata.sites.members import revoke
from fedstrata.sites.processes import send_signal
from fedstrata.sites.provision import ADMIN, JOB, SERVER, provision
from fedstrata.sites.settings import JobSpec

nvflare = Lazy("nvflare")
NOTICED = 10.0
"""Seconds in which a dead site is noticed, beside what this test needs to see it."""
ROUNDS = 200


def four_clients(spec: fs.Experiment) -> fs.Experiment:
    """The same for two sites more, so that they get certificates."""
    return fs.Experiment.from_table({**spec.to_spec(), "partition": {**spec.to_spec()["partition"], "clients": 4}})


class Deployment:
    """Two sites and a server, started; and the job, submitted by a process of its own."""

    def __init__(self, out: Path, spec: fs.Experiment, processes: Processes, port: int) -> None:
        self.out, self.spec, self.processes, self.port = out, spec, processes, port
        command = [sys.executable, "-m", "fedstrata", "submit", str(out / ADMIN), "--out", str(out / "result")]
        with (out / "submit.txt").open("wb") as log:
            self.submitting = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    @property
    def told(self) -> str:
        return (self.out / "submit.txt").read_text()

    @property
    def folder(self) -> Path:
        found = list((self.out / SERVER / "fedstrata").glob("*"))
        return found[0] if found else self.out / "none"

    def records(self, name: str) -> list[dict[str, object]]:
        path = self.folder / name
        return read_jsonl(path) if path.exists() else []

    def round(self) -> int:
        return len(self.records("metrics.jsonl"))

    def reasons(self, site: int, after: int = 0) -> str:
        found = self.records("events.jsonl")
        events = [e for e in found if e.get("clients") == [site] and int(str(e["round"])) > after]
        return " | ".join(str(event.get("reason")) for event in events)

    def wait_for_round(self, number: int) -> None:
        until(f"round {number}", lambda: self.submitting.poll() is not None or self.round() >= number)
        assert self.submitting.poll() is None, self.told

    def returned(self) -> int:
        records = self.records("metrics.jsonl")
        return int(str(records[-1]["clients_returned"])) if records else 0


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployment]:
    monkeypatch.setenv(slowly.HURRY, str(tmp_path / "hurry"))
    # Sites find what the job names like a package of their own that they installed.
    monkeypatch.setenv("PYTHONPATH", str(Path(slowly.__file__).parent), prepend=os.pathsep)
    spec = fs.Experiment.from_table(
        {
            "method": "slowly:Slow",
            "partition": {"name": "dirichlet", "alpha": 1.0, "clients": 2},
            "model": {"name": "mlp", "hidden": [16]},
            "training": {"rounds": ROUNDS, "local_steps": 5, "execution": "per-client"},
            "evaluation": {"every": 0, "checkpoint_every": 1},
        }
    )
    own, names = {"allow": ["slowly"]}, ("a", "b", "stranger", "unlisted")
    # Patience is what it is unless said otherwise: ten minutes.
    table: dict[str, Any] = {"server": {"port": free_port(), **own}, "site": dict.fromkeys(names, own)}
    # The job is another one than the kits', which are for two sites more.
    sites = Sites.model_validate(table | {"policy": {"jobs": "within-policy"}})
    provision(four_clients(spec), sites, tmp_path / "fed", base_dir=tmp_path)
    job = tmp_path / "fed" / ADMIN / JOB
    shutil.rmtree(job)
    write_job(job, [JobSpec("run.toml", "run", 2, ("a", "b"), fewer="wait")], [spec.to_toml()])
    # Somebody with certificates from an authority of their own, for the same federation and the same names.
    table["site"] = {"intruder": own}
    provision(spec, Sites.model_validate(table), tmp_path / "other", base_dir=tmp_path)
    shutil.move(tmp_path / "other" / "intruder", tmp_path / "fed" / "intruder")
    with Processes(tmp_path / "fed") as processes:
        revoke(tmp_path / "fed" / SERVER, "unlisted")
        for name in (SERVER, *names):
            processes.start(name)
        made = Deployment(tmp_path / "fed", spec, processes, sites.server.port)
        yield made
        made.submitting.kill()
        made.submitting.wait()


@pytest.mark.long
@pytest.mark.xdist_group("servers")
def test_whatever_happens_the_run_ends_and_the_events_say_what_happened(deployment: Deployment) -> None:
    processes = deployment.processes

    # A site stops for a minute: the round goes on without it within seconds, and when it is back it takes part again.
    deployment.wait_for_round(2)
    since = _stopped(deployment, "b", signal.SIGSTOP)
    until("b to be missed", lambda: "it has not answered for" in deployment.reasons(1), 60)
    assert time.monotonic() - since < 2 * NOTICED
    before, begun = deployment.round(), time.monotonic()
    time.sleep(60 - (begun - since))
    # It costs nothing while it is away: half a second is what the other one takes for a round.
    assert deployment.round() - before > (time.monotonic() - begun) / 3
    assert deployment.returned() == 1
    _stopped(deployment, "b", signal.SIGCONT)
    back = deployment.round()
    until("b to be back", lambda: deployment.returned() == 2, 60)
    assert deployment.round() - back < 15

    assert _turned_away(deployment.out / "intruder" / "startup", deployment.out / "a" / "startup", deployment.port)

    # kill -9 of a site in the middle of a round; started again, it is taken in.
    since = time.monotonic()
    processes.kill("a")
    until("a to be missed", lambda: "it has not answered for" in deployment.reasons(0), 60)
    assert time.monotonic() - since < 2 * NOTICED
    gone = deployment.round()
    deployment.wait_for_round(gone + 1)
    assert deployment.returned() == 1
    processes.start("a")
    until("the job to come again", lambda: "site a is connected" in deployment.told)
    until("a to be back", lambda: deployment.returned() == 2)

    # kill -9 of the process that works at a site: the others go on, and the job comes again for it, not for its end.
    told, gone = deployment.told.count("site b is connected"), deployment.round()
    _worker(processes.running["b"].pid).kill()
    until("b to be missed", lambda: "it has not answered for" in deployment.reasons(1, after=gone), 60)
    deployment.wait_for_round(deployment.round() + 2)
    assert deployment.returned() == 1
    until("the job to come again", lambda: deployment.told.count("site b is connected") > told)
    until("b to be back", lambda: deployment.returned() == 2)
    assert "the job ended as" not in deployment.told

    # kill -9 of the server, which is started again: the run goes on from its last checkpoint.
    before = deployment.round()
    processes.kill(SERVER)
    processes.start(SERVER)
    deployment.wait_for_round(before + 1)
    assert deployment.told.count("the job is RUNNING") >= 3
    words = [sys.executable, "-m", "fedstrata", "status", str(deployment.out / ADMIN)]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert f"of {ROUNDS}" in said
    assert "  a  in\n  b  in\n" in said
    words[-1] = str(deployment.out / "a")
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "this site works" in said or "this site waits" in said
    (deployment.out.parent / "hurry").touch()

    assert deployment.submitting.wait(240) == 0, deployment.told
    result = read_jsonl(deployment.out / "result" / "metrics.jsonl")
    assert [record["round"] for record in result] == list(range(1, ROUNDS + 1))
    assert (deployment.out / "result" / "model.safetensors").exists()
    assert "round " in deployment.told
    assert "site b: gone" in deployment.told
    # Who has a certificate, and is not on the list, is told nothing: neither the job nor its spec.
    # A site that is not on the list, or has foreign certificates, is turned away at the connection.
    said = (deployment.out / "unlisted" / "console.txt").read_text(errors="replace")
    assert "registration rejected" in said  # NVFlare's words
    server = (deployment.out / SERVER / "log.txt").read_text(errors="replace")
    assert "unlisted is not on the list of sites that may connect" in server
    assert "intruder" not in server
    for name, known in (("a", True), ("stranger", False), ("unlisted", False), ("intruder", False)):
        found = list((deployment.out / name).rglob("run.toml"))
        assert bool(found) == known, found


def _turned_away(intruder: Path, site: Path, port: int) -> bool:
    """Whether the server answers nothing to a certificate of a foreign authority.

    It trusts the server all the same: so it is the server that must turn it away. Its kit would not even start.
    """
    context = ssl.create_default_context(cafile=str(site / "rootCA.pem"))
    context.load_cert_chain(intruder / "client.crt", intruder / "client.key")
    line = socket.create_connection(("localhost", port))  # the server is there
    with line, context.wrap_socket(line, server_hostname="localhost") as connection:  # we take the server's own
        try:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return not connection.recv(1)
        except (ssl.SSLError, ConnectionError):
            return True


def _worker(leader: int) -> Any:
    import psutil

    family = psutil.Process(leader).children(recursive=True)
    return next(one for one in family if "nvflare.private.fed.app.client.worker_process" in one.cmdline())


def _stopped(deployment: Deployment, site: str, number: signal.Signals) -> float:
    send_signal(deployment.processes.running[site].pid, number)
    return time.monotonic()
