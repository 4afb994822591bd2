"""How far a run is, as an administrator, a server's and a site's folder tell it."""

from __future__ import annotations

import io
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from urllib.request import urlopen

import pytest
from processes import started

from fedstrata.base.errors import FedstrataError
from fedstrata.cli import main
from fedstrata.sites.cli.deploy import _report
from fedstrata.sites.configuration import ERROR, described
from fedstrata.sites.live import serving
from fedstrata.sites.progress import STATUS, SiteProgress
from fedstrata.sites.status import Source, source_of
from fedstrata.sites.submit import Report


class _Session:
    """A server as an administrator sees it: its jobs, the newest last."""

    def __init__(self) -> None:
        self.jobs: list[dict[str, str]] = []
        self.trouble: list[Exception] = []
        self.downloads: list[str] = []
        self.table: dict[str, Any] = {"round": 5, "rounds": 9, "sites": {}, "bytes_up": 0, "bytes_down": 0}

    def has(self, *statuses: str) -> None:
        self.jobs = [
            {"job_id": str(number), "job_name": "run", "status": status, "submit_time": str(number)}
            for number, status in enumerate(statuses)
        ]

    def close(self) -> None:
        pass

    def list_jobs(self) -> list[dict[str, str]]:
        if self.trouble:
            raise self.trouble.pop()
        return self.jobs

    def show_stats(self, job: str, target: str) -> dict[str, Any]:
        from nvflare.fuel.flare_api.api_spec import JobNotRunning

        if self.jobs[int(job)]["status"] != "RUNNING":
            raise JobNotRunning(job)
        return {target: {"fedstrata": {**self.table, "run": job}}}

    def download_job_result(self, job: str, place: str) -> str:
        self.downloads.append(job)
        run = Path(place) / job / "fedstrata"
        run.mkdir(parents=True)
        (run / ERROR).write_text(json.dumps(described(FedstrataError("no site takes part"))))
        return str(Path(place) / job)


@pytest.fixture
def admin(tmp_path: Path) -> Path:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "meta.json").write_text(json.dumps({"name": "run", "deploy_map": {"app": ["server", "a"]}}))
    return tmp_path


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> _Session:
    flare_api = pytest.importorskip("nvflare.fuel.flare_api.flare_api")
    from fedstrata.sites import status, submit

    session = _Session()
    monkeypatch.setattr(flare_api, "new_secure_session", lambda *_, **__: session)
    for module in (submit, status):
        monkeypatch.setattr(module, "POLL", 0.01)
    return session


Look = Callable[[Path, Report], Source]


@pytest.fixture
def look() -> Iterator[Look]:
    with ExitStack() as open_ones:
        yield lambda folder, tell: open_ones.enter_context(closing(source_of(folder, tell)))


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """A site's folder, or the server's."""
    (tmp_path / "startup").mkdir()
    (tmp_path / "fedstrata").mkdir()
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("end", ["FINISHED:ABANDONED", "FINISHED:EXECUTION_EXCEPTION"])
def test_a_job_that_comes_again_is_followed(admin: Path, server: _Session, look: Look, end: str) -> None:
    told: list[str] = []
    source = look(admin, told.append)
    server.has("RUNNING")
    assert (source.table() or {})["run"] == "0"
    server.has(end)
    assert source.table() == source.table() == {"waiting": f"its job ended with the status {end}"}, "it comes again"
    assert told == [f"the job ended with the status {end}; to continue it, run 'fedstrata submit'"]
    server.has(end, "RUNNING")
    assert [(source.table() or {})["run"] for _ in range(2)] == ["1", "1"]
    server.has(end, "FINISHED:ABORTED")
    assert (source.table() or {})["over"] == "FINISHED:ABORTED"
    server.has(end, "FINISHED:ABORTED", "RUNNING")
    assert (source.table() or {})["run"] == "2", "of a job that is over the next one may begin"


@pytest.mark.slow
def test_what_a_run_ended_with_is_fetched_once_a_job(admin: Path, server: _Session, look: Look) -> None:
    source = look(admin, print)
    server.has("FINISHED:COMPLETED")
    assert {(source.table() or {})["over"] for _ in range(3)} == {"no site takes part"}
    server.has("FINISHED:COMPLETED", "FINISHED:COMPLETED")
    assert {(source.table() or {})["over"] for _ in range(3)} == {"no site takes part"}
    assert server.downloads == ["0", "1"]
    server.trouble = [ConnectionError("refused")] * 2
    assert (source.table() or {})["over"] == "no site takes part", "its server may be shut down afterwards"
    server.has("FINISHED:COMPLETED", "FINISHED:COMPLETED", "SUBMITTED")
    assert source.table() == {"waiting": "its job is SUBMITTED"}
    server.trouble = [ConnectionError("refused")] * 2
    assert source.table() == {"away": "ConnectionError: refused"}, "of the next run nothing is known"


@pytest.mark.slow
def test_a_server_that_is_away_is_no_server_without_a_run(
    admin: Path, server: _Session, capsys: pytest.CaptureFixture[str]
) -> None:
    away = "the server cannot be reached: ConnectionError: refused"
    for option in ((), ("--json",)):
        server.trouble = [ConnectionError("refused")] * 2
        assert main(["status", str(admin), *option]) == 1
        out, err = capsys.readouterr()
        assert (out, err.splitlines()[-1]) == ("", f"fedstrata: {away}")
    server.has("FINISHED:COMPLETED")
    server.trouble = [ConnectionError("refused")] * 2
    assert main(["status", str(admin), "--watch"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first == away
    assert last.startswith("the run is over: no site takes part; ")
    server.has("RUNNING")
    server.trouble = [ConnectionError("refused")]
    assert main(["status", str(admin)]) == 0, "a session that has run out is no server that is away"
    assert capsys.readouterr().out.startswith("round 5 of 9")


def test_a_run_whose_job_is_ending_is_shown_as_it_ended(
    admin: Path, server: _Session, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While NVFlare waited for a site that had died at its end it said that a run waits."""
    source = look(admin, print)
    server.has("RUNNING")
    server.table |= {"round": 9, "over": "complete"}
    assert (source.table() or {})["over"] == "complete"
    monkeypatch.setattr(server, "show_stats", lambda job, target: {})
    assert (source.table() or {})["over"] == "complete"
    server.has("FINISHED:ABORTED", "RUNNING")
    server.has("FINISHED:ABORTED")
    assert (source.table() or {})["over"] == "FINISHED:ABORTED"
    server.has("FINISHED:ABORTED", "RUNNING")
    assert source.table() == {"waiting": "its job is RUNNING"}, "the next one"


def test_a_run_that_has_not_begun_is_no_server_without_a_run(
    admin: Path, server: _Session, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", str(admin)]) == 0
    assert capsys.readouterr().out == "no run is in progress\n"
    server.has("DISPATCHED")
    assert main(["status", str(admin)]) == 0
    assert capsys.readouterr().out == "a run waits: its job is DISPATCHED\n"


@pytest.mark.slow
def test_the_page_says_that_the_server_is_away_and_goes_on(admin: Path, server: _Session, look: Look) -> None:
    with serving(look(admin, print)) as (address, once):

        def status() -> dict[str, Any]:
            once()
            with urlopen(f"{address}status.json", timeout=30) as answer:
                found: dict[str, Any] = json.load(answer)
            return found

        server.trouble = [ConnectionError("refused")] * 2
        assert status()["away"] == "ConnectionError: refused"
        server.has("SUBMITTED")
        assert status()["waiting"] == "its job is SUBMITTED"
        server.has("RUNNING")
        assert status()["round"] == 5


def test_a_table_for_programs_is_json(admin: Path, server: _Session, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(constant: str) -> NoReturn:
        raise AssertionError(constant)

    server.has("RUNNING")
    server.table["loss"] = float("nan")
    assert main(["status", str(admin), "--json"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=refuse)["loss"] is None


@pytest.mark.skipif(not Path("/proc/mounts").exists() or os.geteuid() != 0, reason="mounts a small disk")
def test_a_full_disk_of_a_party_is_said(kit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk, site = kit / "fedstrata", SiteProgress(kit / STATUS)
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("may not mount a disk")
    try:
        site.write()
        assert main(["status", str(kit)]) == 0
        assert "disk" not in capsys.readouterr().out
        with suppress(OSError):
            (disk / "all").write_bytes(bytes(8 << 20))
        site.question(10**9)
        site._written = 0.0
        with pytest.raises(OSError, match="No space left on device"):
            site.write()
        assert main(["status", str(kit)]) == 0
        assert "the disk is full (0.0 kB left): new progress cannot be written" in capsys.readouterr().out
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("text", ["", '{"round": 3, "rou', "[]", "{}", "\0\0"])
def test_a_damaged_file_is_named(kit: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (kit / STATUS).write_text(text)
    assert main(["status", str(kit)]) == 2
    assert f"{STATUS}: the file is damaged" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param("--watch", marks=pytest.mark.long), "--serve"])
def test_who_looks_may_be_told_to_end(kit: Path, how: str) -> None:
    begun = {"--watch": "no run is in progress", "--serve": "shows the run"}
    with started("-u", "-m", "fedstrata", "status", str(kit), how, cwd=kit) as command:
        command.wait_until(lambda: begun[how] in command.said)
        said = command.said
        command.process.terminate()
        assert command.ended() == 0
        assert command.said == said


def _refused(work: Callable[[], int]) -> int:
    try:
        return work()
    except SystemExit as stop:
        return int(stop.code or 0)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--serve", "--json"], "--json: cannot be combined with --serve. Remove one of the two options."),
        (["--serve", "result"], "fedstrata status [-h] [--watch | --serve [PORT]] [--json] DIR"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    kit: Path, capsys: pytest.CaptureFixture[str], options: list[str], problem: str
) -> None:
    assert _refused(lambda: main(["status", str(kit), *options])) == 2
    assert problem in capsys.readouterr().err


def test_a_run_is_waited_for_when_nobody_reads_its_progress_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> NoReturn:
            raise BrokenPipeError

    tell = _report(SimpleNamespace(json=False))
    monkeypatch.setattr("sys.stdout", Closed())
    tell("round 1 of 9")


def test_an_interrupted_submit_says_how_it_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_args: Any, **_more: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedstrata.sites.submit.submit", interrupt)
    assert main(["submit", "k", "--out", "o"]) == 130
    assert (
        capsys.readouterr().err
        == "fedstrata: interrupted. The job continues. To watch the job again, repeat the command.\n"
    )
