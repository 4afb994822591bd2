"""What can go wrong in a deployment beside kills: real processes with certificates of their own, over mutual TLS."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import slowly
from lazy import Lazy
from waiting import free_port, until

import fedstrata as fs
from fedstrata.base.jsonl import read_jsonl
from fedstrata.sites import ledger
from fedstrata.sites.certificates import renew
from fedstrata.sites.configuration import write_job
from fedstrata.sites.federation import Sites
from fedstrata.sites.local_deployment import Processes
from fedstrata.sites.provision import ADMIN, JOB, SERVER, provision
from fedstrata.sites.settings import JobSpec

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("servers")]
nvflare = Lazy("nvflare")
MODEL = "model.safetensors"


def spec_of(rounds: int, clients: int = 2, **training: Any) -> fs.Experiment:
    return fs.Experiment.from_table(
        {
            "method": "slowly:Slow",
            "partition": {"name": "dirichlet", "alpha": 1.0, "clients": clients},
            "model": {"name": "mlp", "hidden": [16]},
            "training": {"rounds": rounds, "local_steps": 5, "execution": "per-client", **training},
            "evaluation": {"every": 0, "checkpoint_every": 1},
        }
    )


class Deployment:
    """Kits, and the processes that a test starts from them."""

    def __init__(self, kits: Path, processes: Processes, port: int) -> None:
        self.kits, self.processes, self.port = kits, processes, port

    def start(self, *names: str, **environment: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for key, value in environment.items():
                patch.setenv(key, value)
            for name in names:
                self.processes.start(name)

    @contextmanager
    def submitting(self, name: str = "result") -> Iterator[subprocess.Popen[bytes]]:
        """``fedstrata submit`` as a process that ends with the block."""
        line = [sys.executable, "-m", "fedstrata", "submit", str(self.kits / ADMIN), "--out", str(self.kits / name)]
        with (self.kits / "submit.txt").open("wb") as log:
            process = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def submit(self, name: str = "result", code: int = 0) -> Path:
        """Wait for the end of a job; return the run folder."""
        with self.submitting(name) as process:
            self.require_end(process, code)
        return self.kits / name

    def require_end(self, process: subprocess.Popen[bytes], code: int = 0) -> None:
        assert process.wait(240) == code, (self.kits / "submit.txt").read_text()

    def rounds(self) -> int:
        """Rounds that the newest run at the server has."""
        logs = sorted((self.kits / SERVER / "fedstrata").glob("*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
        return len(read_jsonl(logs[-1])) if logs else 0

    def told(self, party: str) -> str:
        return (self.kits / party / "console.txt").read_text(errors="replace")

    def give(self, spec: fs.Experiment, *sites: str) -> None:
        """Put another job into the administrator's folder."""
        shutil.rmtree(self.kits / ADMIN / JOB)
        plan = JobSpec("run.toml", "run", len(sites), sites, least=len(sites), fewer="wait")
        write_job(self.kits / ADMIN / JOB, [plan], [spec.to_toml()])


@contextmanager
def deployment(place: Path, spec: fs.Experiment, *names: str, **options: Any) -> Iterator[Deployment]:
    own = {"allow": ["slowly"]}
    table = {"server": {"port": free_port(), **own}, "site": dict.fromkeys(names, own), **options}
    sites = Sites.model_validate(table)
    provision(spec, sites, place / "fed", base_dir=place)
    with Processes(place / "fed") as processes:
        yield Deployment(place / "fed", processes, sites.server.port)


@pytest.fixture
def hurry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file; without it each client takes half a second."""
    monkeypatch.setenv(slowly.HURRY, str(tmp_path / "hurry"))
    monkeypatch.setenv("PYTHONPATH", str(Path(slowly.__file__).parent), prepend=os.pathsep)
    return tmp_path / "hurry"


def model_of(spec: fs.Experiment, place: Path) -> bytes:
    fs.run(spec, out=place)
    return (place / MODEL).read_bytes()


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_clocks_that_are_hours_apart_change_no_byte(tmp_path: Path, hurry: Path) -> None:
    """Sites are an hour behind and an hour ahead of the server, and the administrator two hours behind."""
    hurry.touch()
    moved = tmp_path / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", moved, Path(__file__).parent / "support" / "clock.c"], check=True)
    spec = spec_of(5)
    with deployment(tmp_path, spec, "a", "b", least=2, fewer="wait") as made:
        for hours, name in ((2, SERVER), (1, "a"), (3, "b")):
            made.start(name, LD_PRELOAD=str(moved), CLOCK_AHEAD=str(3600 * hours))
        result = made.submit()
        clocks = [ledger.check(made.kits / name / ledger.PLACE) for name in "ab"]
    assert (result / MODEL).read_bytes() == model_of(spec, tmp_path / "here")
    assert [each.problems for each in clocks] == [[], []]
    assert {record["clients_returned"] for record in fs.History.load(result)} == {2}


def test_a_site_that_never_answers_costs_its_own_answers(tmp_path: Path, hurry: Path) -> None:
    """Its processes live and its heart beats, but its client never ends its work."""
    hurry.touch()
    spec = spec_of(3, clients=3)
    with deployment(tmp_path, spec, "a", "b", "c", least=2, patience=10) as made:
        made.start(SERVER, "a", "b")
        made.start("c", **{slowly.STUCK: "1"})
        with made.submitting() as process:
            until("the last round", lambda: made.rounds() == 3)
            over = time.monotonic()
            made.require_end(process)
            print(f"the job was over {time.monotonic() - over:.0f} s after its last round")
    result = made.kits / "result"
    assert [record["clients_returned"] for record in fs.History.load(result)] == [2, 2, 2]
    late = [
        event
        for event in read_jsonl(result / "events.jsonl")
        if "it did not answer within 10 s" in str(event.get("reason"))
    ]
    assert {event["round"] for event in late if event["clients"] == [2]} == {1, 2, 3}


def test_a_server_that_comes_back_with_another_spec_mixes_no_two_runs(tmp_path: Path, hurry: Path) -> None:
    old, new = spec_of(40), spec_of(4, lr=0.01)
    with deployment(tmp_path, old, "a", "b", least=2, policy={"jobs": "within-policy"}) as made:
        made.start(SERVER, "a", "b")
        with made.submitting():
            until("round 3", lambda: made.rounds() >= 3)
            made.processes.kill(SERVER)
        first = next((made.kits / SERVER / "fedstrata").glob("*/metrics.jsonl"))
        before, kept = first.read_bytes().splitlines()[:2], shutil.copytree(made.kits / ADMIN / JOB, tmp_path / "job")
        made.give(new, "a", "b")
        hurry.touch()
        made.start(SERVER)
        assert (made.submit("new") / MODEL).read_bytes() == model_of(new, tmp_path / "new")
        # The first run is as it was, and goes on when its own job comes again.
        shutil.rmtree(made.kits / ADMIN / JOB)
        kept.rename(made.kits / ADMIN / JOB)
        assert (made.submit("old") / MODEL).read_bytes() == model_of(old, tmp_path / "old")
        assert first.read_bytes().splitlines()[:2] == before


def test_a_certificate_that_ends_ends_no_run_and_lets_nobody_in_again(tmp_path: Path, hurry: Path) -> None:
    spec = spec_of(200)
    with deployment(tmp_path, spec_of(200, 3), "a", "b", "gone", policy={"jobs": "within-policy"}) as made:
        made.give(spec, "a", "b")
        path, authority = made.kits / "b" / "startup" / "client.crt", made.kits / "authority"
        ends = renew(authority, path, 120 / 86400).timestamp()  # type: ignore[arg-type]  # seconds of a day
        renew(authority, made.kits / "gone" / "startup" / "client.crt", -1)
        made.start(SERVER, "a", "b", "gone")
        with made.submitting() as process:
            until("round 2", lambda: made.rounds() >= 2)
            assert time.time() < ends, "this machine was too slow for the test"
            assert made.processes.running["gone"].wait(60) == 1
            assert "client.crt has been invalid since" in made.told("gone")
            assert is_turned_away(made.kits / "gone" / "startup", made.port)
            until("the end of the certificate of site b", lambda: time.time() > ends + 1)
            assert is_turned_away(path.parent, made.port)
            assert not is_turned_away(made.kits / "a" / "startup", made.port)
            hurry.touch()
            made.require_end(process)
    assert (made.kits / "result" / MODEL).read_bytes() == model_of(spec, tmp_path / "here")


def is_turned_away(startup: Path, port: int) -> bool:
    """Return whether the server answers nothing to a party that has these certificates."""
    context = ssl.create_default_context(cafile=str(startup / "rootCA.pem"))
    context.load_cert_chain(startup / "client.crt", startup / "client.key")
    line = socket.create_connection(("localhost", port))
    with line, context.wrap_socket(line, server_hostname="localhost") as connection:
        try:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return not connection.recv(1)
        except (ssl.SSLError, ConnectionError):
            return True


def test_kits_that_were_tampered_with_get_no_job_and_bring_none(tmp_path: Path, hurry: Path) -> None:
    """Site c calls itself b, and the administrator's job is another one."""
    hurry.touch()
    with deployment(tmp_path, spec_of(3, clients=3), "a", "b", "c") as made:
        made.give(spec_of(3), "a", "b")
        script = made.kits / "c" / "startup" / "sub_start.sh"
        script.write_text(script.read_text().replace("uid=c ", "uid=b "))
        made.start(SERVER, "a", "c")
        until("c to be turned away", lambda: "authenticated as 'c' but claimed endpoint 'b'" in made.told(SERVER), 120)
        made.start("b")
        made.submit("tampered", code=1)
        assert "policy.approved" in (made.kits / "submit.txt").read_text()
    assert list((made.kits / "c").rglob("run.toml")) == []
