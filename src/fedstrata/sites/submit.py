"""Bring a job to the server, stay with it until it is done, and fetch the result."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fedstrata.base.errors import FedstrataError, SpecError
from fedstrata.base.jsonl import read_jsonl
from fedstrata.runs.run_folder import EVENTS, WEIGHTS
from fedstrata.sites.certificates import faults
from fedstrata.sites.configuration import ERROR, raised
from fedstrata.sites.manifest import sign
from fedstrata.sites.nvflare_workarounds import is_temporary, open_session, quiet_call, silence_client
from fedstrata.sites.progress import FEDSTRATA, headline
from fedstrata.sites.provision import JOB
from fedstrata.sites.settings import USER
from fedstrata.sites.simulator import require_nvflare

RESULT = "fedstrata"
COMPLETED, ABORTED = "FINISHED:COMPLETED", "FINISHED:ABORTED"
"""What NVFlare calls a job that does not come again; any other that is finished does."""
POLL = 2.0
TELL = 10.0
"""Seconds between two lines about rounds."""
QUIET = 10.0
"""Seconds for which a site that did not answer an administrator is not asked again."""
REJOIN = 20.0
"""Seconds for which all sites are waited for before a job that broke off is brought again."""
ENDS = 180.0
"""Seconds for which a job that says nothing more after its last round may be ending: NVFlare waits for sites."""
MISSED = 5
"""Looks in a row at which a site that is connected does not work on the job before the job is brought again."""
AGAIN = 3
"""How often the job is brought again because of one site that does not take part then either, or because it breaks off
and gets no further."""

Tell = Callable[[str], None]


def submit(
    admin: Path, out: Path, *, sites: int = 0, wait: float = 60.0, lost: float = 600.0, tell: Tell = print
) -> Path:
    """Submit the administrator's job, wait for its end and fetch the run folder.

    The server goes on from its last checkpoint whenever the job comes again. So that is what is done after the server
    was down, and when a site is there that does not take part: one that joined late, or was started again.

    Args:
        admin: The administrator's folder, as ``provision`` wrote it.
        out: Where the run folder goes.
        sites: How many sites are waited for before the first submission.
        wait: Seconds; afterwards those that are there begin.
        lost: Seconds without the server after which we give up.
        tell: Is told in a line what happens.

    Raises:
        ExtraMissingError: NVFlare is not installed.
        SpecError: ``admin`` is no such folder, or ``out`` exists.
        FedstrataError: The server cannot be reached, or refuses the job, or the run ended early.
    """
    require_nvflare()
    silence_client()
    if not (admin / JOB / "meta.json").is_file():
        raise SpecError("ADMIN", "no administrator's folder: it has no job", str(admin))
    if out.exists():
        raise SpecError("--out", "exists already", str(out))
    refuse_expired(admin, tell)
    watch = Watch(admin, lost, tell)
    try:
        watch.wait_for_sites(sites, wait)
        while not (watch.finished() and watch.fetch(out)):
            time.sleep(POLL)
        return out
    finally:
        watch.close()


def refuse_expired(admin: Path, tell: Tell) -> None:
    """Say it where an administrator's certificate ends soon; with one that ended no server could be asked.

    Raises:
        FedstrataError: It ended, or is not of this federation.
    """
    has_one = (admin / "startup" / "client.crt").exists()
    for ends, text in faults(admin) if has_one else ():
        if ends:
            raise FedstrataError(f"{admin}: {text}")
        tell(text)


class Watch:
    """An administrator's connection that survives the server's absence."""

    def __init__(self, admin: Path, lost: float, tell: Tell) -> None:
        self.admin, self.lost, self.tell = admin, lost, tell
        self._session: Any = None
        self._job: str | None = None
        self._status = ""
        self._missed: Counter[str] = Counter()
        self._again: Counter[str] = Counter()
        self._worked: Counter[str] = Counter()
        self._since: float | None = None
        self._over, self._heard = False, -math.inf
        self._quiet: dict[str, float] = {}
        self._said = self._broke_off = ""
        self.away = ""
        """Why the server did not answer when it was asked last; empty where it did."""
        self._round, self._furthest, self._last_line = 0, 0, -math.inf
        self._given_up: set[str | None] = set()
        self._sites: dict[str, str] = {}

    def wait_for_sites(self, count: int, wait: float) -> None:
        """Wait until so many are connected; 0 for all that the job names."""
        named = set(self._named())
        end, before = time.monotonic() + wait, ""
        while time.monotonic() < end:
            there = self._do(lambda session: session.get_connected_client_list())
            if there is not None:
                names = {site.name for site in there}
                if names and (named <= names or 0 < count <= len(names)):
                    return
                if (why := f"not connected yet: {', '.join(sorted(named - names))}") != before:
                    self.tell(why)
                before = why
            time.sleep(POLL)

    def _named(self) -> list[str]:
        meta = json.loads((self.admin / JOB / "meta.json").read_text(encoding="utf-8"))
        return [site for site in meta["deploy_map"]["app"] if site not in ("server", "@ALL")]

    def finished(self) -> bool:
        """Look once; bring the job where it is not at work."""
        if self._job is None:
            if self._given_up:  # sites come back one after another when their server does
                self.wait_for_sites(0, REJOIN)
            if brought := self._do(self._bring):
                self._job, how = brought
                self.tell(how)
            return False
        status = self._do(lambda session: session.get_job_status(self._job))
        if status is None:
            return False
        if status != self._status:
            self.tell(f"the job is {status}")
            self._status = status
        if status == COMPLETED:
            return True
        if status.startswith("FINISHED"):
            if status != ABORTED and self._over:
                # At its end NVFlare missed a site, which need not be there to fetch what came of it.
                whole = self._whole()
                if whole or self.away:
                    return whole
            # Abandoned is what a server calls the jobs that it finds when it starts again.
            if status == ABORTED or (status != "FINISHED:ABANDONED" and self._again["server"] >= AGAIN):
                raise FedstrataError(f"the job ended as {status}; see the server's log.txt")
            self._bring_again("server", f"the job ended as {status}")
        elif status == "RUNNING":
            states = self._tell_progress()
            if states is not None:
                self._look_for_idle_sites(states)
        return False

    def progress(self) -> dict[str, Any] | None:
        """What the server says of the job at work; None where it says nothing yet."""
        jobs = [] if self._job is None else [self._job]
        if not jobs:
            listed = self._do(lambda session: session.list_jobs()) or []
            jobs = [str(job["job_id"]) for job in listed if job["status"] == "RUNNING"]
        for job in jobs:
            stats = self._do(partial(_stats, job=job)) or {}
            table = (stats.get("server") or {}).get(FEDSTRATA)
            if isinstance(table, dict):
                return table
        return None

    def ended(self) -> tuple[str, str]:
        """The number of the job that was brought last, and what became of it.

        Without a number where it has not ended, or broke off and comes again. Both are empty where there was none.
        """
        listed = self._do(lambda session: session.list_jobs()) or []
        name = self._name()
        same = [job for job in listed if job["job_name"] == name]
        last = max(same, key=lambda job: str(job.get("submit_time") or ""), default=None)
        job, how = (str(last["job_id"]), str(last["status"])) if last else ("", "")
        if how in (COMPLETED, ABORTED):
            return job, how
        if how.startswith("FINISHED") and job != self._broke_off:
            self._broke_off = job
            self.tell(f"the job broke off as {how}; 'fedstrata submit' brings it again")
        return "", how

    def _name(self) -> str:
        return str(json.loads((self.admin / JOB / "meta.json").read_text(encoding="utf-8"))["name"])

    def _tell_progress(self) -> dict[str, str] | None:
        """Rounds as they come, and sites whose part has changed; the state of each, where that is known.

        None where the run is over: its job ends as soon as NVFlare has given up waiting for a site that is away.
        """
        table = self.progress()
        now = time.monotonic()
        if table is None:  # a server that was started again does not know the job, and calls it RUNNING for ever
            return None if self._over and now - self._heard < ENDS else {}
        self._heard, self._over = now, bool(table.get("over")) or table["round"] == table["rounds"]
        if table.get("over"):
            return None
        for site, (state, why) in table["sites"].items():
            if self._sites.get(site, "in") != state:
                self.tell(f"site {site}: {state}{', ' if why else ''}{why}")
            self._sites[site] = state
        if table["round"] > self._furthest:
            self._furthest = table["round"]
            self._again.pop("server", None)  # it got further than ever: what breaks off later is another matter
        if table["round"] != self._round and (now - self._last_line > TELL or table["round"] == table["rounds"]):
            self._round, self._last_line = table["round"], now
            self.tell(headline(table))
        return {site: state for site, (state, _) in table["sites"].items()}

    def _bring(self, session: Any) -> tuple[str, str]:
        """Submit the job, unless this very job was submitted before and is still at work.

        So it is when the server went away after it had taken the job, and before it had said so.
        """
        name = self._name()
        for job in session.list_jobs():
            number, status = str(job["job_id"]), str(job["status"])
            if job["job_name"] == name and number not in self._given_up and not status.startswith("FINISHED"):
                return number, f"{number} is at work already"
        number = str(session.submit_job(str((self.admin / JOB).absolute())))
        return number, f"submitted as {number}"

    def _look_for_idle_sites(self, states: Mapping[str, str]) -> None:
        """Bring the job again for a site that is there and does not work on it.

        Args:
            states: How each site takes part, as the job's server says; nothing where it says nothing yet.
        """
        # Who takes part need not be asked. One that is stopped does not answer: asked together with the others it
        # would keep theirs from us.
        away = [site for site, state in states.items() if state != "in"]
        if away:  # whom the server cannot reach it complains of, in a line each time
            there = {site.name for site in self._do(lambda session: session.get_connected_client_list()) or []}
            away = [site for site in away if site in there and self._quiet.get(site, -math.inf) < time.monotonic()]
        asked: list[list[str] | None] = [[site] for site in away] if states else [None]
        listed: list[Any] = []
        for sites in asked:
            entries = self._do(partial(_jobs_of, sites=sites)) or []
            listed += entries
            if sites and not entries:
                self._quiet[sites[0]] = time.monotonic() + QUIET
        working = {entry.get("client_name") for entry in listed if entry.get("job_id") == self._job}
        working |= {site for site, state in states.items() if state == "in"}
        idle = {entry.get("client_name") for entry in listed if entry.get("status") == "no_jobs"}
        for name in (idle & set(self._named() or idle)) - working:
            self._missed[name] += 1
            if self._missed[name] >= MISSED and self._again[name] < AGAIN:
                self._do(lambda session: session.abort_job(self._job))
                self._bring_again(name, f"site {name} is there and takes no part")
                return
        for name in working:
            self._missed.pop(name, None)
            self._worked[name] += 1
            if self._worked[name] >= MISSED:
                self._again.pop(name, None)  # it took part: what comes later is another matter

    def _bring_again(self, cause: str, why: str) -> None:
        self.tell(f"{why}: the job comes again and goes on from the last checkpoint")
        self._again[cause] += 1
        self._given_up.add(self._job)
        self._missed.clear()
        self._worked.clear()
        self._job, self._status, self._over = None, "", False

    def _whole(self) -> bool:
        """Whether the job at hand left a whole result, whatever NVFlare calls its end."""
        with tempfile.TemporaryDirectory(prefix="fedstrata-submit-") as place:
            try:
                return self.fetch(Path(place) / "run") and (Path(place) / "run" / WEIGHTS).exists()
            except FedstrataError:
                return False

    def fetch(self, out: Path, job: str = "") -> bool:
        """Fetch the run folder of a job, by default of the one at hand; False while the server is away."""
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as place:
            places = self._do(lambda session: [session.download_job_result(job or self._job, place)])
            if places is None:
                return False
            runs = [path for path in Path(places[0] or place).rglob(RESULT) if path.is_dir()]
            if not runs:
                raise FedstrataError("the job's result holds no run")
            if (runs[0] / ERROR).exists():
                raise raised(runs[0] / ERROR)
            shutil.move(runs[0], out)
        if (out / WEIGHTS).exists():
            sign(out, self.admin)
        events = read_jsonl(out / EVENTS) if (out / EVENTS).exists() else []
        for reason in dict.fromkeys(str(event["reason"]) for event in events if event["kind"] == "absent"):
            self.tell(reason)
        return True

    def close(self) -> None:
        """End the session."""
        if self._session is not None:
            quiet_call(self._session.close)
            self._session = None

    def _do(self, work: Callable[[Any], Any]) -> Any:
        """What ``work`` gives; None while the server is away, or has not got that far."""
        try:
            if self._session is None:
                self._session = quiet_call(partial(open_session, USER, self.admin))
            outcome = quiet_call(partial(work, self._session))
            self._since, self._said, self.away = None, "", ""
        except Exception as error:
            known = self._session is not None
            self._forget()
            if not is_temporary(error, known):
                raise FedstrataError(f"the server refuses: {type(error).__name__}: {error}") from error
            self.away = " ".join(f"{type(error).__name__}: {error}".split())
            self._since = self._since or time.monotonic()
            if time.monotonic() - self._since > self.lost:
                raise FedstrataError(f"the server cannot be reached: {self.away}") from error
            if (why := f"waiting for the server ({self.away})") != self._said:
                self.tell(why)
            self._said = why
            time.sleep(POLL)
            return None
        return outcome

    def _forget(self) -> None:
        """End the session, whatever state it is in."""
        try:
            self.close()
        except Exception:
            self._session = None


def _stats(session: Any, *, job: str) -> dict[str, Any]:
    """What the job's server says of itself; nothing while it begins or ends."""
    from nvflare.fuel.flare_api.api_spec import JobNotFound, JobNotRunning

    try:
        stats: dict[str, Any] = session.show_stats(job, "server")
    except (JobNotFound, JobNotRunning):
        return {}
    return stats


def _jobs_of(session: Any, *, sites: list[str] | None) -> list[dict[str, Any]]:
    """What sites, or all of them, are at work on; nothing of one that does not answer."""
    from nvflare.fuel.flare_api.api_spec import InvalidTarget, NoConnection, NoReply

    try:
        entries: list[dict[str, Any]] = session.get_client_job_status(sites) or []
    except (InvalidTarget, NoConnection, NoReply):
        if sites is None:
            raise
        return []  # it is away, or stopped, which says nothing of the server
    return entries
