"""Deployments: what is asked for, what is written, and one that runs as separate processes with mutual TLS."""

from __future__ import annotations

import importlib.util
import json
import stat
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
from waiting import free_port

import fedstrata as fs
from fedstrata.base.errors import DataError, ExtraMissingError, FedstrataError, SpecError
from fedstrata.base.jsonl import MetricsLog
from fedstrata.cli import main
from fedstrata.data.catalog import names_there
from fedstrata.runs.run_folder import WEIGHTS
from fedstrata.sites.configuration import CLASSES, ERROR, described, raised, write_job
from fedstrata.sites.disclosure import hash_of
from fedstrata.sites.federation import Sites
from fedstrata.sites.ledger import PLACE, check
from fedstrata.sites.policy import Policy
from fedstrata.sites.provision import provision
from fedstrata.sites.settings import LOCAL, JobSpec, SiteSettings
from fedstrata.sites.simulator import _sites_before
from fedstrata.sites.site_server import SiteServer

pytestmark = pytest.mark.slow

needs_nvflare = pytest.mark.skipif(importlib.util.find_spec("nvflare") is None, reason="needs the extra nvflare")
HOSPITALS = Path(__file__).parents[2] / "examples" / "hospitals"
EXAMPLE = HOSPITALS / "sites.toml"
SPEC = """
method = "scaffold"
model = { name = "mlp", hidden = [16] }
[partition]
name = "dirichlet"
clients = 3
[training]
rounds = 2
local_steps = 3
execution = "per-client"
"""


def _sites(path: Path, text: str) -> Sites:
    (path / "sites.toml").write_text(text)
    return Sites.read(path / "sites.toml")


def test_the_example_are_four_hospitals_with_their_own_data() -> None:
    sites = Sites.read(EXAMPLE)
    assert list(sites.site) == ["cleveland", "hungary", "switzerland", "va-long-beach"]
    assert sites.own_data
    files = [HOSPITALS / str(site.data) for site in sites.site.values()]
    header, *rows = (HOSPITALS / "heart.csv").read_text().splitlines()
    parts = [file.read_text().splitlines() for file in files]
    assert {part[0] for part in parts} == {header.partition(",")[2]}
    names = ("Cleveland", "Hungary", "Switzerland", "VA Long Beach")
    for name, (_, *part) in zip(names, parts, strict=True):
        assert part == [row.partition(",")[2] for row in rows if row.startswith(f"{name},")]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "site: is required"),
        ("[site]", "site"),
        ("[site.a]\nfile = 'x'", r"site.a.file.*line 2\): is not a known key\. Use one of: data, keys"),
        ("[site.a]\n[site.'b c']", "site = 'b c'.*: is not a valid name. Use letters, digits and hyphens"),
        ("[site.server]", "site = 'server'.*: is not a valid name"),
        (f"[site.{'a' * 65}]", "has 65 characters. Use at most 64"),
        (f"federation = '{'a' * 300}'\n[site.a]", "has 300 characters. Use at most 64"),
        (f"server.host = '{'a' * 65}'\n[site.a]", "server.host = 'a+' .*: has 65 characters. Use at most 64"),
        ("server.host = '::1'\n[site.a]", "server.host = '::1' .*: is an IPv6 address or has a port"),
        ("server.host = '[::1]:8002'\n[site.a]", r"server.host = '\[::1\]:8002' .*: is an IPv6 address or has a port"),
        ("least = 3\n[site.a]", "least = 3 .*: is above the number of sites. Use at most 1"),
        ("[site.a]\ndata = 'a.csv'", "site.a.data = 'a.csv' .*: requires own_data = true"),
        ("site = 3 =", "is not valid TOML"),
    ],
)
def test_what_is_wrong_with_the_sites_is_said_and_where(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        _sites(tmp_path, text)


def test_a_missing_file_of_sites_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="the file does not exist"):
        Sites.read(tmp_path / "none.toml")


def test_clients_of_the_partition_are_dealt_to_the_sites_in_order(tmp_path: Path) -> None:
    spec = fs.Experiment(partition=fs.IID(clients=5))
    assert _sites(tmp_path, "[site.b]\n[site.a]").site_of_client(spec) == ("b", "b", "b", "a", "a")
    with pytest.raises(SpecError, match=r"there are 6 sites, each with at least one client\. Use at least 6"):
        _sites(tmp_path, "".join(f"[site.s{n}]\n" for n in range(6))).site_of_client(spec)


def test_a_plan_survives_json() -> None:
    plan = JobSpec("run.toml", "run", 2, ("a", "b"), True, 3.0, False)
    assert JobSpec.from_table(json.loads(json.dumps(asdict(plan)))) == plan


def test_a_sites_own_settings(tmp_path: Path) -> None:
    assert SiteSettings.read(tmp_path) == SiteSettings()
    (tmp_path / LOCAL).parent.mkdir()
    (tmp_path / LOCAL).write_text('data = "own.npz"\nsecure = true')
    assert SiteSettings.read(tmp_path) == SiteSettings(data=tmp_path / "own.npz", secure=True)
    settings = SiteSettings(data=tmp_path / "own.npz", patience=8.0, allow=["own"], simulated=True)
    (tmp_path / LOCAL).write_text(tomli_w.dumps(settings.table()))
    assert SiteSettings.read(tmp_path) == settings


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('date = "own.npz"', r"date = 'own.npz'.* is not a known key; did you mean 'data'"),
        ("patience = -1", r"patience = -1.* must be greater than 0"),
        ('patience = "long"', r"patience = 'long'.*number"),
        ('secure = "perhaps"', r"secure = 'perhaps'.*true or false"),
        ("data = 5", r"data = 5.*path"),
        ('allow = "own"', r"allow = 'own'.*list"),
    ],
)
def test_what_is_wrong_with_a_sites_own_settings_is_said_and_where(tmp_path: Path, line: str, problem: str) -> None:
    (tmp_path / LOCAL).parent.mkdir()
    (tmp_path / LOCAL).write_text(f"# ours\n{line}")
    with pytest.raises(SpecError, match=problem) as caught:
        SiteSettings.read(tmp_path)
    assert f"({tmp_path / LOCAL}, line 2): " in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        SpecError("method.mu", "too large", 7),
        SpecError("method.mu", "needed"),
        SpecError("data", "no file", Path("own.npz")),
        SpecError("shape", "too long", (1, 2)),
        ExtraMissingError("NVFlare", "nvflare"),
        DataError("gone"),
        FedstrataError("x"),
        ValueError("y"),
    ],
)
def test_errors_of_a_server_come_back_as_what_they_were(tmp_path: Path, error: Exception) -> None:
    (tmp_path / ERROR).write_text(json.dumps(described(error)))
    again = raised(tmp_path / ERROR)
    assert type(again) is (type(error) if isinstance(error, FedstrataError) else FedstrataError)
    assert str(again) == (str(error) if isinstance(error, FedstrataError) else "ValueError: y")


def test_without_the_extra_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ExtraMissingError, match=r"fedstrata\[nvflare\]"):
        provision(fs.Experiment(), Sites.read(EXAMPLE), tmp_path / "out")


@pytest.mark.parametrize("attack", ["sign-flip", "label-flip"])
def test_an_attack_is_not_deployed(tmp_path: Path, attack: str) -> None:
    pytest.importorskip("nvflare")
    spec = fs.Experiment.from_table({"attack": attack})
    with pytest.raises(SpecError, match=rf"attack = '{attack}': attacks are possible only in simulations, not in"):
        provision(spec, Sites.read(EXAMPLE), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("privacy", "evaluation", "sites", "problem"),
    [
        ({}, {}, "", r"privacy\.sums = 'secure': the server needs its own test samples"),
        ({}, {}, "server.data = 't.csv'", r"privacy\.largest: is required, because the server"),
        (
            {"largest": 9},
            {"validation": 0.2},
            "server.data = 't.csv'",
            r"evaluation\.validation = 0\.2: would disclose metrics",
        ),
        (
            {"largest": 9},
            {"client_test": 0.2},
            "server.data = 't.csv'",
            r"evaluation\.client_test = 0\.2: would disclose metrics",
        ),
        ({"largest": 9}, {}, "server.data = 't.csv'\npolicy.parties = 4", r"site\.a: .*'policy\.parties'.*requires 4"),
    ],
)
def test_secure_sums_that_show_more_than_sums_are_not_deployed(
    tmp_path: Path, privacy: dict[str, Any], evaluation: dict[str, Any], sites: str, problem: str
) -> None:
    pytest.importorskip("nvflare")
    schema = {"label": "ill", "classes": ["no", "yes"], "columns": {"age": {"type": "number", "range": [0, 120]}}}
    table = {"data": {"schema": schema}, "partition": "natural", "evaluation": evaluation}
    (tmp_path / "t.csv").write_text("age,ill\n40,no\n60,yes\n50,no\n70,yes\n")
    spec = fs.Experiment.from_table(table | {"privacy": {"sums": "secure", **privacy}})
    federation = _sites(tmp_path, f"own_data = true\n{sites}\n[site.a]\n[site.b]\n[site.c]")
    with pytest.raises(SpecError, match=problem):
        provision(spec, federation, tmp_path / "out", base_dir=tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_site_of_secure_sums_has_one_client(tmp_path: Path) -> None:
    pytest.importorskip("nvflare")
    spec = fs.Experiment(partition=fs.IID(clients=4), privacy={"sums": "secure"})
    with pytest.raises(SpecError, match=r"privacy\.sums = 'secure': a secure sum needs sites with one client each"):
        provision(spec, _sites(tmp_path, "[site.a]\n[site.b]\n[site.c]"), tmp_path / "out")


def test_a_job_does_not_say_where_a_server_writes(tmp_path: Path) -> None:
    pytest.importorskip("nvflare")
    spec = fs.Experiment.from_table({"tracking": {"tensorboard": {"dir": "/srv"}}})
    with pytest.raises(SpecError, match="tracking: cannot be set in the job of a deployment"):
        provision(spec, Sites.read(EXAMPLE), tmp_path / "out")
    assert not (tmp_path / "out").exists()


class _Line:
    """Sites in this process, as a server reaches them."""

    def __init__(self, folder: Path) -> None:
        self.sites = {
            name: SiteServer(name, folder / name, lambda target, data: b"", SiteSettings()) for name in ("a", "b", "c")
        }

    def is_reachable(self, site: str) -> bool:
        return True

    def struck(self, site: str) -> bool:
        return False

    def send(self, site: str, data: bytes, patience: float, number: int) -> object:
        return self.sites[site].call("server", data)


@pytest.mark.slow
@needs_nvflare
def test_a_server_does_not_answer_a_changed_spec_with_the_old_runs_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    from fedstrata.sites.job import Server, folder_of

    old = fs.Experiment.from_table(tomllib.loads(SPEC)).to_toml()
    new = old.replace("rounds = 2", "rounds = 1")
    assert new != old
    plan, deployed, simulated = JobSpec("run.toml", "run", 3), SiteSettings(), SiteSettings(simulated=True)
    for settings in (deployed, simulated):
        folder = folder_of(plan, old, tmp_path / "server", settings)
        Server([])._run(plan, old, folder, _Line(tmp_path / "sites"), SiteSettings(simulated=True))  # type: ignore[arg-type]
        assert len(fs.History.load(folder)) == 2
    other = folder_of(plan, new, tmp_path / "server", deployed)
    Server([])._run(plan, new, other, _Line(tmp_path / "sites"), SiteSettings(simulated=True))  # type: ignore[arg-type]
    assert len(fs.History.load(other)) == 1
    with pytest.raises(SpecError, match=r"training\.rounds = 1: the run in this folder has 2"):
        Server([])._run(plan, new, folder, _Line(tmp_path / "sites"), SiteSettings(simulated=True))  # type: ignore[arg-type]
    assert (folder / "spec.toml").read_text() == old


@needs_nvflare
def test_a_server_writes_down_which_sites_are_gone_though_nothing_is_heard_of_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedstrata.sites import job, progress

    found: list[list[str]] = []

    class Silent(_Line):
        def is_reachable(self, site: str) -> bool:
            return site != "c"

        def send(self, site: str, data: bytes, patience: float, number: int) -> object:
            end = time.monotonic() + 10
            while not found and time.monotonic() < end:
                if (tmp_path / progress.STATUS).exists():
                    found.append(json.loads((tmp_path / progress.STATUS).read_text())["sites"]["c"])
                time.sleep(0.01)
            return super().send(site, data, patience, number)

    monkeypatch.setattr(progress, "STEP", 0.01)
    workspace = SimpleNamespace(get_root_dir=lambda: str(tmp_path))
    monkeypatch.setattr(job, "collab", SimpleNamespace(workspace=workspace))
    spec = fs.Experiment.from_table(tomllib.loads(SPEC)).to_toml()
    plan = JobSpec("run.toml", "run", 3)
    job.Server([])._run(plan, spec, tmp_path / "run", Silent(tmp_path / "sites"), SiteSettings())  # type: ignore[arg-type]
    # Sites are asked at the same time, so that more than one may have read the file.
    assert found
    assert all(row == ["gone", "it has not joined, or cannot be reached"] for row in found)
    assert json.loads((tmp_path / progress.STATUS).read_text())["over"] == "complete"


@needs_nvflare
def test_a_run_that_is_over_is_there_for_whoever_fetches_it_though_its_sites_are_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job came again, waited for a site that had died after the last round, and undid what was written."""
    from fedstrata.sites.job import Server

    class Empty(_Line):
        def is_reachable(self, site: str) -> bool:
            raise AssertionError("nobody need be there")

    spec, folder = fs.Experiment.from_table(tomllib.loads(SPEC)).to_toml(), tmp_path / "run"
    plan, settings = JobSpec("run.toml", "run", 3, least=3, fewer="wait"), SiteSettings(simulated=True)
    Server([])._run(plan, spec, folder, _Line(tmp_path / "sites"), settings)  # type: ignore[arg-type]
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    Server([])._run(plan, spec, folder, Empty(tmp_path / "other"), settings)  # type: ignore[arg-type]
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == files


@needs_nvflare
def test_a_slip_in_a_sites_own_settings_leaves_that_site_out_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVFlare ended the job of all sites, and nobody was told whose settings it was."""
    from fedstrata.sites import idempotency, job, progress
    from fedstrata.sites.policy import FILE
    from fedstrata.sites.wire import Refused, SiteRefusedError, read

    heard = threading.Event()

    class Peer:
        def __call__(self, **options: Any) -> Peer:
            return self

        def heartbeat(self, number: int, size: int) -> None:
            heard.set()

    (tmp_path / "local").mkdir()
    (tmp_path / FILE).write_text('min_samples = "many"')
    workspace = SimpleNamespace(get_root_dir=lambda: str(tmp_path), get_run_dir=lambda job: str(tmp_path))
    context = SimpleNamespace(get_job_id=lambda: "job")
    here = SimpleNamespace(
        workspace=workspace, site_name="b", clients=[], server=Peer(), fl_ctx=context, caller="server"
    )
    monkeypatch.setattr(job, "collab", here)
    monkeypatch.setattr(idempotency, "HEARTBEAT", 0.01)
    site = job.Site()
    site.init()
    assert heard.wait(30)  # it is there, and says why it takes no part
    with pytest.raises(SiteRefusedError, match=r"its settings cannot be used \(SpecError\)\. Read the log of the site"):
        read(site.call(b"anything"), Refused)
    end = time.monotonic() + 30
    while not (tmp_path / progress.STATUS).exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert "min_samples" in json.loads((tmp_path / progress.STATUS).read_text())["refused"]


@needs_nvflare
@pytest.mark.parametrize(("fewer", "connected"), [("wait", 2), ("abort", 1), ("go-on", 1)])
def test_what_is_done_with_fewer_sites_the_run_decides_and_not_nvflare(
    tmp_path: Path, fewer: Any, connected: int
) -> None:
    """NVFlare did not begin a job with fewer, and gave it up after forty minutes."""
    plan = JobSpec("run.toml", "run", 3, ("a", "b", "c"), least=2, fewer=fewer)
    write_job(tmp_path / "job", [plan], [SPEC])
    assert json.loads((tmp_path / "job" / "meta.json").read_text())["min_clients"] == connected


@needs_nvflare
def test_nothing_is_imported_from_where_jobs_are_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedstrata.sites.job import _settings

    monkeypatch.chdir(tmp_path)
    before = [str(tmp_path), "", *(entry for entry in sys.path if entry)]
    monkeypatch.setattr(sys, "path", list(before))
    assert _settings(tmp_path).packages == []
    assert sys.path == before[2:]


SILENT = 99
"""The round in which a job's server says nothing of itself."""


class _Session:
    """A server as an administrator sees it, which says what a test tells it to."""

    def __init__(self, folder: Path, *trouble: Exception, at: str, jobs: list[dict[str, str]]) -> None:
        self.folder, self.trouble, self.at, self.jobs = folder, list(trouble), at, jobs
        self.submitted = 0
        self.course: list[tuple[str, int]] = []
        """Status and round of the job, look by look; complete afterwards."""
        self.asked: list[str] = []
        """Sites that were asked what they work on; all as a star."""
        self.gone: dict[str, str] = {}
        """Sites of which nothing is heard, and why."""

    def _answer(self, what: str, answer: object) -> Any:
        if what == self.at and self.trouble:
            raise self.trouble.pop(0)
        return answer

    def close(self) -> None:
        pass

    def get_connected_client_list(self) -> Any:
        return [SimpleNamespace(name=name) for name in "abc" if self.gone.get(name) != "dead"]

    def list_jobs(self) -> Any:
        return self.jobs

    def submit_job(self, path: str) -> Any:
        self.submitted += 1
        return self._answer("submit", "new")

    def get_job_status(self, job: str) -> Any:
        status, self.round = self.course.pop(0) if self.course else ("FINISHED:COMPLETED", 0)
        return self._answer("status", status)

    def show_stats(self, job: str, target: str) -> Any:
        sites = {name: ["gone" if name in self.gone else "in", ""] for name in "abc"}
        table = {"round": self.round, "rounds": 9, "bytes_up": 0, "bytes_down": 0, "sites": sites}
        if self.round == 9:
            table |= {"over": "complete"}
        return {target: {"fedstrata": table}} if self.round != SILENT else {}

    def get_client_job_status(self, names: list[str] | None = None) -> Any:
        from nvflare.fuel.flare_api.api_spec import NoConnection

        self.asked += list(names or "*")
        if any(self.gone.get(name) == "stopped" for name in names or "abc"):
            raise NoConnection("no answer in time")
        return [{"client_name": name, "status": "no_jobs"} for name in names or "abc" if name in self.gone]

    def abort_job(self, job: str) -> None:
        self.gone = {}

    def download_job_result(self, job: str, place: str) -> Any:
        self._answer("fetch", None)
        (Path(place) / job / "fedstrata").mkdir(parents=True)
        (Path(place) / job / "fedstrata" / "of").write_text(job)
        why = {"round": 1, "kind": "absent", "reason": "site b does not take part: column 'age' = '130'"}
        MetricsLog(Path(place) / job / "fedstrata" / "events.jsonl").append(
            {"round": 1, "kind": "late", "reason": "x"}, why, why
        )
        return str(Path(place) / job)


@pytest.fixture
def submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, _Session, list[str]]]:
    """Submits a job to a server with some trouble; which job's result came, the server, and what was told."""
    from nvflare.fuel.flare_api import flare_api

    from fedstrata.sites import submit

    def go(
        *trouble: Exception,
        at: str = "",
        jobs: Sequence[tuple[str, str]] = (),
        course: Sequence[tuple[str, int]] = (),
        gone: Mapping[str, str] | None = None,
    ) -> tuple[str, _Session, list[str]]:
        plan = JobSpec("run.toml", "run", 3, ("a", "b", "c") if gone else ())
        write_job(tmp_path / "admin" / "job", [plan], [SPEC])
        name = json.loads((tmp_path / "admin" / "job" / "meta.json").read_text())["name"]
        listed = [{"job_id": n.format(name), "job_name": n.format(name), "status": status} for n, status in jobs]
        session = _Session(tmp_path, *trouble, at=at, jobs=listed)
        session.course, session.gone = list(course), dict(gone or {})
        monkeypatch.setattr(flare_api, "new_secure_session", lambda *_, **__: session._answer("login", session))
        monkeypatch.setattr(submit, "POLL", 0.01)
        told: list[str] = []
        submit.submit(tmp_path / "admin", tmp_path / "out", wait=0.5, report=told.append)
        return (tmp_path / "out" / "of").read_text(), session, told

    return go


Submitted = Callable[..., tuple[str, _Session, list[str]]]


@needs_nvflare
@pytest.mark.parametrize("at", ["submit", "status", "fetch"])
def test_a_server_that_is_away_is_waited_for(submitted: Submitted, at: str) -> None:
    from nvflare.fuel.flare_api.api_spec import NoConnection, SessionClosed

    job, _, told = submitted(NoConnection("gone"), SessionClosed("gone"), at=at)
    assert job == "new"
    assert told[-1] == "site b does not take part: column 'age' = '130'"
    assert [line for line in told if "waiting" in line] == [
        "waiting for the server (NoConnection: gone)", "waiting for the server (SessionClosed: gone)",
    ]  # fmt: skip


@needs_nvflare
@pytest.mark.parametrize("at", ["submit", "status", "fetch"])
def test_a_server_that_has_just_come_back_is_waited_for(submitted: Submitted, at: str) -> None:
    from nvflare.fuel.flare_api.api_spec import AuthenticationError, JobNotRunning, NoClientsAvailable

    trouble = NoClientsAvailable("no clients"), JobNotRunning("not yet"), AuthenticationError("no such session")
    job, _, told = submitted(*trouble, at=at)
    assert job == "new"
    assert sum("waiting for the server" in line for line in told) == 3


@needs_nvflare
def test_a_server_that_never_let_us_in_refuses(submitted: Submitted) -> None:
    from nvflare.fuel.flare_api.api_spec import AuthenticationError

    with pytest.raises(
        FedstrataError, match="the server refused the request: AuthenticationError: unknown certificate"
    ):
        submitted(AuthenticationError("unknown certificate"), at="login")


@needs_nvflare
@pytest.mark.parametrize("at", ["submit", "status", "fetch"])
def test_a_server_that_refuses_is_not_asked_again(submitted: Submitted, at: str) -> None:
    from nvflare.fuel.flare_api.api_spec import AuthorizationError, InvalidJobDefinition

    for refusal in (InvalidJobDefinition("no meta"), AuthorizationError("not you")):
        with pytest.raises(
            FedstrataError, match=f"the server refused the request: {type(refusal).__name__}: {refusal}"
        ):
            submitted(refusal, at=at)


@needs_nvflare
def test_only_the_very_same_job_is_found_at_work(submitted: Submitted) -> None:
    job, server, _ = submitted(jobs=[("fedstrata", "RUNNING"), ("fedstrata-0123", "RUNNING"), ("{}", "FINISHED:X")])
    assert (job, server.submitted) == ("new", 1)


@needs_nvflare
def test_a_job_that_was_submitted_before_is_found_at_work(submitted: Submitted) -> None:
    job, server, told = submitted(jobs=[("fedstrata-0123", "RUNNING"), ("{}", "RUNNING")])
    assert server.submitted == 0
    assert told[0] == f"{job} runs already"


@needs_nvflare
def test_a_job_that_breaks_off_now_and_then_comes_again_as_long_as_it_gets_further(submitted: Submitted) -> None:
    """It ended with the fourth process that was killed, however many rounds lay between."""
    broken = [("RUNNING", round) if half else ("FINISHED:EXECUTION_EXCEPTION", 0) for round in range(1, 9)
              for half in (True, False)]  # fmt: skip
    _, server, _ = submitted(course=broken)
    assert server.submitted == 1 + 8


@needs_nvflare
def test_a_job_that_breaks_off_at_the_same_place_is_given_up(submitted: Submitted) -> None:
    round = [("RUNNING", 1), ("RUNNING", 2), ("FINISHED:EXECUTION_EXCEPTION", 0)]
    with pytest.raises(FedstrataError, match="the job ended with the status FINISHED:EXECUTION_EXCEPTION"):
        submitted(course=round * 5)


@needs_nvflare
def test_a_site_that_is_stopped_is_no_server_that_is_away_and_hides_no_other(submitted: Submitted) -> None:
    """All sites were asked at once: with one that did not answer the server's answer came too late."""
    course = [("RUNNING", round) for round in range(1, 10)]
    _, server, told = submitted(course=course, gone={"a": "stopped"})
    assert server.submitted == 1
    assert not any("waiting for the server" in line for line in told)
    assert "site a: gone" in told


@needs_nvflare
def test_the_job_comes_again_for_a_site_that_was_started_again_while_another_is_stopped(submitted: Submitted) -> None:
    course = [("RUNNING", round) for round in range(1, 10)]
    _, server, told = submitted(course=course, gone={"a": "stopped", "b": "started again"})
    assert server.submitted == 2
    assert any(line.startswith("site b is connected, but does not take part") for line in told)


@needs_nvflare
@pytest.mark.parametrize("last", [9, SILENT])
def test_a_run_that_is_over_does_not_come_again_for_a_site_that_died_at_its_end(
    submitted: Submitted, last: int
) -> None:
    """NVFlare waits for the dead site; meanwhile all others are at work on nothing, and were taken for idle ones."""
    course = [("RUNNING", 8), ("RUNNING", 9), *[("RUNNING", last)] * 9]
    _, server, _ = submitted(course=course, gone={"a": "started again", "b": "started again"})
    assert server.submitted == 1


@needs_nvflare
def test_a_job_that_a_server_forgot_when_it_was_started_again_is_brought_again(submitted: Submitted) -> None:
    """It goes on calling the job running, and nobody works on it."""
    course = [("RUNNING", 3), *[("RUNNING", SILENT)] * 9]
    _, server, _ = submitted(course=course, gone=dict.fromkeys("abc", "started again"))
    assert server.submitted == 2


@needs_nvflare
def test_so_is_one_that_a_server_forgot_after_its_last_round(
    submitted: Submitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was waited for as one that is about to end, for ever."""
    monkeypatch.setattr("fedstrata.sites.submit.ENDS", 0.02)
    course = [("RUNNING", 9), *[("RUNNING", SILENT)] * 20]
    _, server, _ = submitted(course=course, gone=dict.fromkeys("abc", "started again"))
    assert server.submitted == 2


@needs_nvflare
@pytest.mark.parametrize(("whole", "away"), [(True, False), (True, True), (False, False)])
def test_what_a_job_left_that_missed_a_site_at_its_end_is_fetched(
    submitted: Submitted, monkeypatch: pytest.MonkeyPatch, whole: bool, away: bool
) -> None:
    """It was brought again, and NVFlare did not begin it without that site; also if the server just went away."""
    from nvflare.fuel.flare_api.api_spec import NoConnection

    download = _Session.download_job_result

    def leave(session: _Session, job: str, place: str) -> Any:
        found = download(session, job, place)
        if whole:
            (Path(found) / "fedstrata" / WEIGHTS).write_bytes(b"")
        return found

    monkeypatch.setattr(_Session, "download_job_result", leave)
    monkeypatch.setattr("fedstrata.sites.submit.sign", lambda *_: None)
    course = [("RUNNING", 9), *[("FINISHED:ABNORMAL", 9)] * (1 + away)]
    _, server, _ = submitted(*[NoConnection("gone")] * away, at="fetch", course=course)
    assert server.submitted == (1 if whole else 2)


@needs_nvflare
def test_before_a_job_comes_again_its_sites_are_waited_for(
    submitted: Submitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is started again gets its sites back one by one; a job that began with the first was aborted."""
    late = iter([["a", "b", "c"], ["a"], ["a", "b"], ["a", "b", "c"]])

    def connected(session: _Session) -> Any:
        session.last = next(late)  # type: ignore[attr-defined]
        return [SimpleNamespace(name=name) for name in session.last]  # type: ignore[attr-defined]

    monkeypatch.setattr(_Session, "get_connected_client_list", connected)
    _, server, told = submitted(course=[("FINISHED:ABANDONED", 1)], gone={"x": "nobody"})
    assert server.submitted == 2
    assert "not connected yet: b, c" in told
    assert next(late, None) is None, "all were there when the job came again"


@needs_nvflare
def test_a_server_is_not_asked_about_a_site_that_it_cannot_reach(submitted: Submitted) -> None:
    """It complained of that in its log, every two seconds."""
    course = [("RUNNING", round) for round in range(1, 9)]
    _, server, _ = submitted(course=course, gone={"a": "dead", "b": "stopped"})
    assert server.asked == ["b"], "of which it learns only then that it does not answer, and not again so soon"


@needs_nvflare
def test_a_job_that_the_server_took_before_it_went_away_is_not_brought_twice(
    submitted: Submitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs of one run met in its folder, and the second was refused."""
    from nvflare.fuel.flare_api.api_spec import NoConnection

    def take(session: _Session, path: str) -> str:
        name = json.loads((Path(path) / "meta.json").read_text())["name"]
        session.submitted += 1
        session.jobs.append({"job_id": f"job-{session.submitted}", "job_name": name, "status": "RUNNING"})
        if session.submitted == 2:
            raise NoConnection("gone")
        return f"job-{session.submitted}"

    monkeypatch.setattr(_Session, "submit_job", take)
    job, server, told = submitted(course=[("RUNNING", 1), ("FINISHED:ABANDONED", 1)])
    assert (job, server.submitted) == ("job-2", 2)
    assert "job-2 runs already" in told


def test_the_name_of_a_job_tells_its_spec_and_plan(tmp_path: Path) -> None:
    def name(plan: JobSpec, spec: str) -> str:
        write_job(tmp_path, [plan], [spec])
        return str(json.loads((tmp_path / "meta.json").read_text())["name"])

    plan = JobSpec("run.toml", "run", 2, ("a", "b"))
    others = [(plan, SPEC + "\n"), (JobSpec("run.toml", "run", 2, ("a", "c")), SPEC)]
    assert name(plan, SPEC) == name(plan, SPEC)
    assert len({name(plan, SPEC), *(name(*other) for other in others)}) == 3


@pytest.mark.parametrize("given", [None, 3])
def test_a_simulation_that_goes_on_keeps_its_number_of_sites(tmp_path: Path, given: int | None) -> None:
    (tmp_path / "sites.json").write_text('{"sites": 3}')
    assert _sites_before([tmp_path], given) == 3
    assert _sites_before([tmp_path / "none"], given) == given
    with pytest.raises(SpecError, match=r"sites = 5: the run in .* stored its clients' states at 3"):
        _sites_before([tmp_path], 5)


@needs_nvflare
def test_a_run_of_another_engine_does_not_go_on_in_the_simulator(tmp_path: Path) -> None:
    spec = fs.Experiment.from_table({**tomllib.loads(SPEC), "evaluation": {"every": 0, "checkpoint_every": 1}})
    fs.run(spec, out=tmp_path / "out")
    before = sorted(path.name for path in (tmp_path / "out").iterdir())
    with pytest.raises(SpecError, match=r"engine = 'nvflare': .*'local' or 'ray'"):
        fs.run(spec, out=tmp_path / "out", engine="nvflare", resume=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``fedstrata deploy`` writes."""
    place = tmp_path_factory.mktemp("deploy")
    arguments = ["deploy", str(HOSPITALS / "hospitals.toml"), "--sites", str(EXAMPLE), "--out", str(place / "kits")]
    assert main(arguments) == 0
    return place / "kits"


@pytest.mark.slow
@needs_nvflare
def test_everybody_gets_a_folder_with_what_to_do(kits: Path) -> None:
    assert {path.name for path in kits.iterdir()} == {
        "server", "admin", "authority", "cleveland", "hungary", "switzerland", "va-long-beach",
    }  # fmt: skip
    for path in kits.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, "it holds a private key"
        if path.name != "authority":
            text = (path / "README.md").read_text()
            assert ("allow = [" in text) == (path.name != "admin"), "what specs may name is said"
            described = "`chol` (numbers from 50 to 700 mg/dl)" in text
            assert described == (path.name not in ("server", "admin")), "what a site's file is"
            assert ("fedstrata submit" if path.name == "admin" else "bash startup/start.sh") in text


@pytest.mark.slow
@needs_nvflare
def test_a_site_lets_a_job_name_our_classes_and_bring_no_code(kits: Path) -> None:
    for name in ("server", "cleveland"):
        resources = json.loads((kits / name / "local" / "resources.json").read_text())
        if name == "server":
            scheduler = next(each for each in resources["components"] if each["id"] == "job_scheduler")["args"]
            assert scheduler["max_jobs"] == 1  # two would write into one run folder
            # NVFlare looked ever less often at a job that waits for its sites, and gave it up after forty minutes.
            assert scheduler["max_schedule_interval"] * scheduler["max_schedule_count"] > 30 * 24 * 3600
            # With 10.0, its own default, it broke down at the 1026th look.
            latest = min(
                scheduler["max_schedule_interval"],
                2 ** scheduler["max_schedule_count"] * scheduler["min_schedule_interval"],
            )
            assert latest == 30
        assert resources["class_allow_list"] == list(CLASSES)
        assert resources["class_list_enforcement_mode"] == "enforce"
        rights = json.loads((kits / name / "local" / "authorization.json").read_text())["permissions"]
        assert {role: (all_["byoc"], all_["shell_commands"]) for role, all_ in rights.items()} == {
            "lead": ("none", "none")
        }


@needs_nvflare
@pytest.mark.parametrize(
    ("table", "problem"),
    [
        (
            {"method": {"name": "stratify", "mode": "single"}},
            "site.a: the rule 'policy.min_samples' of this site refuses the job, because ",
        ),
        ({"data": "mnist"}, "site.a: the rule 'data' of this site refuses the job, because data.name = 'mnist'"),
        (
            {"method": "asking:Counted"},
            "site.a: this site would refuse the job. method.name = 'asking:Counted': .*'allow' is empty",
        ),
    ],
    ids=str,
)
def test_a_job_that_its_sites_would_refuse_is_not_deployed(tmp_path: Path, table: dict[str, Any], problem: str) -> None:
    if table.get("data") == "mnist" and "mnist" not in names_there():
        pytest.skip("needs mnist.npz")
    spec = fs.Experiment.from_table({"partition": {"name": "iid", "clients": 2}, **table})
    with pytest.raises(SpecError, match=problem):
        provision(spec, Sites.model_validate({"site": {"a": {}, "b": {}}}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@needs_nvflare
def test_a_request_that_is_not_declared_is_not_deployed(tmp_path: Path) -> None:
    spec = fs.Experiment.from_table({"partition": {"name": "iid", "clients": 2}, "method": "asking:Counted"})
    sites = Sites.model_validate({"site": {"a": {"allow": ["asking"]}, "b": {"allow": ["asking"]}}})
    with pytest.raises(SpecError, match=r"site\.a: the rule 'declared' of this site refuses the job"):
        provision(spec, sites, tmp_path / "out")


@needs_nvflare
def test_code_that_the_server_would_refuse_is_not_deployed(tmp_path: Path) -> None:
    spec = fs.Experiment.from_table({"partition": {"name": "iid", "clients": 2}, "model": "combinations:tiny_norm"})
    allowed = {"allow": ["combinations"]}
    sites: dict[str, Any] = {"site": {"a": allowed, "b": allowed}}
    problem = r"server\.allow = \[\]: the server would refuse the job: model\.name = 'combinations:tiny_norm'"
    with pytest.raises(SpecError, match=problem):
        provision(spec, Sites.model_validate(sites), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    provision(spec, Sites.model_validate({**sites, "server": allowed}), tmp_path / "out")


@needs_nvflare
def test_a_job_that_its_server_would_refuse_is_not_deployed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("client,first,last\n0,1,9\n1,1,9\n")
    table = {"partition": {"name": "iid", "clients": 2}, "availability": {"name": "trace", "file": str(trace)}}
    spec, named = fs.Experiment.from_table(table), {"catalog": [str(trace)]}
    sites: dict[str, Any] = {"site": {"a": named, "b": named}}
    with pytest.raises(SpecError, match=r"server\.catalog = \[\]: the server would refuse the job: .*trace\.csv"):
        provision(spec, Sites.model_validate(sites), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    provision(spec, Sites.model_validate({**sites, "server": named}), tmp_path / "out")
    assert SiteSettings.read(tmp_path / "out" / "server").catalog == [str(trace)]


@needs_nvflare
def test_a_site_accepts_the_job_that_it_was_made_for(kits: Path) -> None:
    spec = fs.Experiment.from_toml(HOSPITALS / "hospitals.toml")
    for name in ("cleveland", "hungary"):
        policy = Policy.read(kits / name)
        assert (policy.jobs, policy.approved) == ("approved", [hash_of(spec)])
        assert (policy.methods, policy.rounds, policy.relay) == (["fedavg"], spec.training.rounds, "direct")
        assert policy.min_samples == 2, "as the example's file of sites says"
        assert "local/policy.toml" in (kits / name / "README.md").read_text()
    assert not (kits / "server" / "local" / "policy.toml").exists()


@needs_nvflare
def test_the_job_has_no_source_and_no_path_of_a_site(kits: Path) -> None:
    files = [path for path in (kits / "admin" / "job").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".toml"}
    assert not any("data = " in path.read_text() for path in files)


@needs_nvflare
def test_certificates_are_never_written_over(kits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["deploy", str(HOSPITALS / "hospitals.toml"), "--sites", str(EXAMPLE), "--out", str(kits)]
    assert main(arguments) == 2
    assert "never overwritten" in capsys.readouterr().err


@pytest.mark.long
@needs_nvflare
@pytest.mark.slow
@pytest.mark.xdist_group("servers")
@pytest.mark.filterwarnings("ignore:ssl_context is deprecated:DeprecationWarning")
def test_hospitals_with_mutual_tls_end_with_the_model_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the example's four, each with its own CSV file, and the same rows in one table."""
    monkeypatch.chdir(HOSPITALS.parents[1])
    rows = (HOSPITALS / "heart.csv").read_text().splitlines(keepends=True)
    two = [row for row in rows if row.startswith(("hospital,", "Hungary,", "Switzerland,"))]
    (tmp_path / "two.csv").write_text("".join(two))
    overrides = (f"data.name={tmp_path / 'two.csv'}", "training.rounds=2", "training.clients_per_round=2")
    settings = ["--set", "evaluation.every=1", *(word for each in overrides for word in ("--set", each))]
    spec = str(HOSPITALS / "hospitals.toml")
    assert main(["run", spec, *settings, "--out", str(tmp_path / "here")]) == 0
    port = free_port()
    names = ("hungary", "switzerland")
    sites = "".join(f'[site.{name}]\ndata = "{HOSPITALS}/sites/{name}.csv"\n' for name in names)
    # Of one column Hungary has three values only.
    head = f"own_data = true\npolicy = {{ min_samples = 2 }}\n[server]\nport = {port}"
    (tmp_path / "sites.toml").write_text(f"{head}\n{sites}")
    deploy = ["deploy", spec, *settings, "--sites", str(tmp_path / "sites.toml")]
    assert main([*deploy, "--out", str(tmp_path / "fed"), "--try"]) == 0
    there, here = fs.History.load(tmp_path / "fed" / "result"), fs.History.load(tmp_path / "here")
    # The server has no test samples: what is measured are both sites' test rows together.
    assert [record["accuracy"] for record in there] == pytest.approx([record["accuracy"] for record in here])
    model = "model.safetensors"
    assert (tmp_path / "fed" / "result" / model).read_bytes() == (tmp_path / "here" / model).read_bytes()
    # Each hospital's own ledger is whole, and as the server was told.
    for name in names:
        kit, result = str(tmp_path / "fed" / name), str(tmp_path / "fed" / "result")
        assert main(["ledger", kit, "--verify", "--told", result]) == 0
        found = check(tmp_path / "fed" / name / PLACE)
        assert {"Survey", "Fit", "Evaluate"} <= {entry["kind"] for entry in found.entries}
