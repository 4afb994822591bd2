"""Submit a job to the server, watch it until it ends, and fetch the result."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from fedstrata.base.errors import FedstrataError, SpecError
from fedstrata.base.jsonl import read_jsonl
from fedstrata.base.printable import print_lines
from fedstrata.runs.run_folder import EVENTS, WEIGHTS
from fedstrata.sites.certificates import faults
from fedstrata.sites.configuration import ERROR, RESULT, raised
from fedstrata.sites.manifest import sign
from fedstrata.sites.nvflare_workarounds import is_temporary, open_session, quiet_call
from fedstrata.sites.progress import FEDSTRATA, headline
from fedstrata.sites.provision import JOB
from fedstrata.sites.settings import USER
from fedstrata.sites.simulator import require_nvflare

COMPLETED, ABORTED = "FINISHED:COMPLETED", "FINISHED:ABORTED"
"""NVFlare's statuses of jobs that are never submitted again. Jobs with another FINISHED status may be submitted
again."""
POLL = 2.0
TELL = 10.0
"""The minimum number of seconds between two reports about rounds."""
QUIET = 10.0
"""The number of seconds after which the administrator's request is sent again to a site that did not reply."""
REJOIN = 20.0
"""The maximum number of seconds to wait for all sites before a failed job is submitted again."""
ENDS = 180.0
"""The maximum number of seconds for which NVFlare waits for sites between a job's last round and its end."""
MISSED = 5
"""The number of polls after which the job is submitted again if a connected site does not work on the job."""
AGAIN = 3
"""How many times in a row a job may be submitted again because of one site, or after failures without a new round."""

Report = Callable[[str], None]


def submit(
    admin: Path, out: Path, *, sites: int = 0, wait: float = 60.0, lost: float = 600.0, report: Report = print_lines
) -> Path:
    """Submit the administrator's job, wait for its end and fetch the run folder.

    The job is submitted again if the server was restarted, or if a connected site does not take part because it joined
    late or was restarted. The server then resumes the run from its last checkpoint.

    Args:
        admin: The administrator's folder, which ``provision`` wrote.
        out: The run folder to write.
        sites: The number of sites to await before the first submission; 0 for all sites.
        wait: The maximum number of seconds to wait for the sites.
        lost: The number of seconds for which the server may be unreachable before an error is raised.
        report: A function that is called with a line about each event.

    Raises:
        ExtraMissingError: NVFlare is not installed.
        SpecError: ``admin`` is not an administrator's folder, or ``out`` exists.
        FedstrataError: The server cannot be reached or refuses the job, or the run ended before its last round.
    """
    require_nvflare()
    if not (admin / JOB / "meta.json").is_file():
        raise SpecError(
            "ADMIN",
            "is not an administrator's folder, because it does not contain a job. Give the folder 'admin' that "
            "'fedstrata deploy' created.",
            str(admin),
        )
    if out.exists():
        raise SpecError("--out", "already exists. Give another folder.", str(out))
    refuse_expired(admin, report)
    watch = Watch(admin, lost, report)
    try:
        watch.wait_for_sites(sites, wait)
        while not (watch.finished() and watch.fetch(out)):
            time.sleep(POLL)
        return out
    finally:
        watch.close()


def refuse_expired(admin: Path, report: Report) -> None:
    """Check the administrator's certificate, and report if it expires soon.

    Raises:
        FedstrataError: The certificate has expired, or was signed by another federation.
    """
    has_certificate = (admin / "startup" / "client.crt").exists()
    for fatal, text in faults(admin) if has_certificate else ():
        if fatal:
            raise FedstrataError(f"{admin}: {text}")
        report(text)


class Watch:
    """The administrator's connection to the server. It submits and watches a job, and fetches the job's result.

    If the server is unreachable, each request waits for ``POLL`` seconds and then returns None.

    Args:
        admin: The administrator's folder.
        lost: The number of seconds for which the server may be unreachable before an error is raised.
        report: A function that is called with a line about each event.
    """

    def __init__(self, admin: Path, lost: float, report: Report) -> None:
        self.admin, self.lost, self.report = admin, lost, report
        self._session: Any = None
        self._job: str | None = None
        meta = json.loads((admin / JOB / "meta.json").read_text(encoding="utf-8"))
        self._name = str(meta["name"])
        self._named = {site for site in meta["deploy_map"]["app"] if site not in ("server", "@ALL")}
        self._resubmissions: Counter[str] = Counter()
        """For each party (a site or the server), how many times the job was submitted again because of this party. The
        number is reset to 0 when the party works again."""
        self._idle_polls: Counter[str] = Counter()
        self._working_polls: Counter[str] = Counter()
        self._away_since: float | None = None
        self._over, self._last_progress = False, -math.inf
        self._last_reports: dict[str, str] = {}
        """The last report on each subject, such as ``status``. A report with the same text is not repeated."""
        self._ask_again: dict[str, float] = {}
        self.away = ""
        """The error of the last request to the server; empty if the server replied."""
        self._round, self._furthest, self._last_report = 0, 0, -math.inf
        self._given_up: set[str | None] = set()
        self._states: dict[str, str] = {}

    def wait_for_sites(self, count: int, wait: float) -> None:
        """Wait for at most ``wait`` seconds until ``count`` sites (0 for all sites of the job) are connected."""
        end = time.monotonic() + wait
        while time.monotonic() < end:
            if (names := self._connected()) is not None:
                if names and (self._named <= names or 0 < count <= len(names)):
                    return
                self._tell("sites", f"not connected yet: {', '.join(sorted(self._named - names))}")
            time.sleep(POLL)

    def _tell(self, matter: str, text: str) -> None:
        """Report a message, unless the last message on this subject was the same."""
        if self._last_reports.get(matter) != text:
            self.report(text)
        self._last_reports[matter] = text

    def _connected(self) -> set[str] | None:
        """Return the sites that are connected to the server; None if the server is unreachable."""
        sites = self._call(lambda session: session.get_connected_client_list())
        return None if sites is None else {site.name for site in sites}

    def finished(self) -> bool:
        """Submit the job if it is not yet submitted, and return True if the job has ended with a result."""
        if self._job is None:
            if self._given_up:
                # After a restart of the server, sites connect one after another. Wait for them before the job is
                # submitted again.
                self.wait_for_sites(0, REJOIN)
            if submitted := self._call(self._submit):
                self._job, text = submitted
                self.report(text)
            return False
        status = self._call(lambda session: session.get_job_status(self._job))
        if status is None:
            return False
        self._tell("status", f"the job is {status}")
        if status == COMPLETED:
            return True
        if status.startswith("FINISHED"):
            if status != ABORTED and self._over:
                # All rounds are finished, so the result may be complete. NVFlare reports a failure, for example, if a
                # site did not answer at the end.
                complete = self._has_result()
                if complete or self.away:
                    return complete
            # After a restart, the server marks the jobs that were running as ABANDONED. Such a job is always submitted
            # again.
            if status == ABORTED or (status != "FINISHED:ABANDONED" and self._resubmissions["server"] >= AGAIN):
                raise FedstrataError(f"the job ended with the status {status}. See log.txt of the server.")
            self._give_up_job("server", f"the job ended as {status}")
        elif status == "RUNNING":
            states = self._report_progress()
            if states is not None:
                self._look_for_idle_sites(states)
        return False

    def progress(self) -> dict[str, Any] | None:
        """Return the server's report on the progress of the running job; None before the first report."""
        jobs = [] if self._job is None else [self._job]
        if not jobs:
            listed = self._call(lambda session: session.list_jobs()) or []
            jobs = [str(job["job_id"]) for job in listed if job["status"] == "RUNNING"]
        for job in jobs:
            stats = self._call(partial(_stats, job=job)) or {}
            table = (stats.get("server") or {}).get(FEDSTRATA)
            if isinstance(table, dict):
                return table
        return None

    def ended(self) -> tuple[str, str]:
        """Return the id and the status of the last job that was submitted.

        The id is empty if the job still runs, or if the job failed and can be submitted again. If no job was submitted,
        the id and the status are empty.
        """
        listed = self._call(lambda session: session.list_jobs()) or []
        same = [job for job in listed if job["job_name"] == self._name]
        last = max(same, key=lambda job: str(job.get("submit_time") or ""), default=None)
        job, status = (str(last["job_id"]), str(last["status"])) if last else ("", "")
        if status in (COMPLETED, ABORTED):
            return job, status
        if status.startswith("FINISHED"):
            self._tell(job, f"the job ended with the status {status}; to continue it, run 'fedstrata submit'")
        return "", status

    def _report_progress(self) -> dict[str, str] | None:
        """Report new rounds and new states of sites, and return a mapping from each site to its state.

        The mapping is empty if the states of the sites are not known. If the run is over, the result is None. The job
        may then still wait for a missing site.
        """
        table = self.progress()
        now = time.monotonic()
        if table is None:
            # After a restart, the server reports nothing about the job, but the job's status stays RUNNING. If the run
            # was over before the restart, it still counts as over for ``ENDS`` seconds. Otherwise, the states of the
            # sites are unknown.
            return None if self._over and now - self._last_progress < ENDS else {}
        self._last_progress, self._over = now, bool(table.get("over")) or table["round"] == table["rounds"]
        if table.get("over"):
            return None
        for site, (state, reason) in table["sites"].items():
            if self._states.get(site, "in") != state:
                self.report(f"site {site}: {state}{', ' if reason else ''}{reason}")
            self._states[site] = state
        if table["round"] > self._furthest:
            self._furthest = table["round"]
            self._resubmissions.pop("server", None)  # failures are counted from 0 again, because the job made progress
        if table["round"] != self._round and (now - self._last_report > TELL or table["round"] == table["rounds"]):
            self._round, self._last_report = table["round"], now
            self.report(headline(table))
        return {site: state for site, (state, _) in table["sites"].items()}

    def _submit(self, session: Any) -> tuple[str, str]:
        """Submit the job if it does not run yet, and return its id and a report.

        The job may already be running if the connection was lost before the server confirmed an earlier submission.
        """
        for job in session.list_jobs():
            number, status = str(job["job_id"]), str(job["status"])
            if job["job_name"] == self._name and number not in self._given_up and not status.startswith("FINISHED"):
                return number, f"{number} runs already"
        number = str(session.submit_job(str((self.admin / JOB).absolute())))
        return number, f"submitted as {number}"

    def _look_for_idle_sites(self, states: Mapping[str, str]) -> None:
        """Submit the job again if a connected site does not work on this job during several polls.

        ``states`` maps each site to its state, as the server reports it. The mapping is empty while the states are not
        known.
        """
        working = {site for site, state in states.items() if state == "in"}
        # Ask only connected sites for their jobs, because the server logs a line for each request to a site that is not
        # connected.
        away = states.keys() - working
        connected = (away and self._connected()) or set()
        now = time.monotonic()
        due = sorted(site for site in away & connected if self._ask_again.get(site, -math.inf) < now)
        # Ask each site in a separate request, because a request to several sites gets no answer if one of them is
        # stopped.
        asked: list[list[str] | None] = [[site] for site in due] if states else [None]
        listed: list[Any] = []
        for sites in asked:
            entries = self._call(partial(_jobs_of, sites=sites)) or []
            listed += entries
            if sites and not entries:
                self._ask_again[sites[0]] = time.monotonic() + QUIET
        working |= {entry.get("client_name") for entry in listed if entry.get("job_id") == self._job}
        idle = {entry.get("client_name") for entry in listed if entry.get("status") == "no_jobs"}
        for name in (idle & (self._named or idle)) - working:
            self._idle_polls[name] += 1
            if self._idle_polls[name] >= MISSED and self._resubmissions[name] < AGAIN:
                self._call(lambda session: session.abort_job(self._job))
                self._give_up_job(name, f"site {name} is connected, but does not take part")
                return
        for name in working:
            self._idle_polls.pop(name, None)
            self._working_polls[name] += 1
            if self._working_polls[name] >= MISSED:
                self._resubmissions.pop(name, None)

    def _give_up_job(self, cause: str, reason: str) -> None:
        """Report why the job failed. The next call of ``finished`` submits the job again."""
        self.report(f"{reason}: the job is submitted again, and continues from the last checkpoint")
        self._resubmissions[cause] += 1
        self._given_up.add(self._job)
        self._idle_polls.clear()
        self._working_polls.clear()
        self._job, self._over = None, False
        self._last_reports.clear()

    def _has_result(self) -> bool:
        """Return True if the job has a complete result. NVFlare may nevertheless report a failure."""
        with tempfile.TemporaryDirectory(prefix="fedstrata-submit-") as place:
            try:
                return self.fetch(Path(place) / "run") and (Path(place) / "run" / WEIGHTS).exists()
            except FedstrataError:
                return False

    def fetch(self, out: Path, job: str = "") -> bool:
        """Fetch the run folder of a job (by default, the current job). Return False if the server is unreachable."""
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as place:
            fetched = self._call(lambda session: [session.download_job_result(job or self._job, place)])
            if fetched is None:
                return False
            runs = [path for path in Path(fetched[0] or place).rglob(RESULT) if path.is_dir()]
            if not runs:
                raise FedstrataError("the result of the job does not contain a run folder. See log.txt of the server.")
            if (runs[0] / ERROR).exists():
                raise raised(runs[0] / ERROR)
            shutil.move(runs[0], out)
        if (out / WEIGHTS).exists():
            sign(out, self.admin)
        events = read_jsonl(out / EVENTS) if (out / EVENTS).exists() else []
        for reason in dict.fromkeys(str(event["reason"]) for event in events if event["kind"] == "absent"):
            self.report(reason)
        return True

    def close(self) -> None:
        """Close the connection to the server."""
        if self._session is not None:
            quiet_call(self._session.close)
            self._session = None

    def _call(self, work: Callable[[Any], Any]) -> Any:
        """Call ``work`` with a session, and return its result; None if the server is unreachable or not ready.

        Raises:
            FedstrataError: The server refuses the request, or was unreachable for too long.
        """
        try:
            if self._session is None:
                self._session = quiet_call(partial(open_session, USER, self.admin))
            outcome = quiet_call(partial(work, self._session))
            self._away_since, self.away = None, ""
            self._last_reports.pop("away", None)
        except Exception as error:
            known, session, self._session = self._session is not None, self._session, None
            with suppress(Exception):
                quiet_call(session.close)
            if not is_temporary(error, known):
                raise FedstrataError(f"the server refused the request: {type(error).__name__}: {error}") from error
            self.away = " ".join(f"{type(error).__name__}: {error}".split())
            self._away_since = self._away_since or time.monotonic()
            if time.monotonic() - self._away_since > self.lost:
                raise FedstrataError(
                    f"the server cannot be reached: {self.away}. Start the server, and open its port."
                ) from error
            self._tell("away", f"waiting for the server ({self.away})")
            time.sleep(POLL)
            return None
        return outcome


def _stats(session: Any, *, job: str) -> dict[str, Any]:
    """Return the server's reply to NVFlare's ``show_stats`` about a job; empty while the job begins or ends."""
    from nvflare.fuel.flare_api.api_spec import JobNotFound, JobNotRunning

    stats: dict[str, Any] = {}
    with suppress(JobNotFound, JobNotRunning):
        stats = session.show_stats(job, "server")
    return stats


def _jobs_of(session: Any, *, sites: list[str] | None) -> list[dict[str, Any]]:
    """Return the jobs on which these sites (or, with None, all sites) work; empty if a site does not reply."""
    from nvflare.fuel.flare_api.api_spec import InvalidTarget, NoConnection, NoReply

    try:
        entries: list[dict[str, Any]] = session.get_client_job_status(sites) or []
    except (InvalidTarget, NoConnection, NoReply):
        if sites is None:
            raise
        return []  # the server answered, but the site is stopped or unreachable
    return entries
