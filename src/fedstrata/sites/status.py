"""Read the progress of a run from a run folder, or from the folder of the administrator, the server or a site."""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedstrata.base.errors import DataError, FedstrataError, SpecError
from fedstrata.base.jsonl import jsonable
from fedstrata.base.printable import print_lines, printable
from fedstrata.evaluation.history import History
from fedstrata.runs.run_folder import METRICS, SPEC, WEIGHTS
from fedstrata.sites.configuration import ERROR, raised
from fedstrata.sites.progress import STATUS, Progress, about_run, shown
from fedstrata.sites.provision import JOB
from fedstrata.sites.simulator import require_nvflare
from fedstrata.sites.submit import COMPLETED, POLL, Report, Watch, refuse_expired

NOTHING = "no run is in progress"


@dataclass
class Source:
    """A source of the progress of a run.

    Args:
        table: A function that returns the progress of the run, or of a site's work in the run, as a dict. If there is
            no run, the function returns None. If the server does not reply, the dict has only the key ``away`` with the
            reason. If a submitted job has not reported yet, the dict has only the key ``waiting`` with the job's
            status.
        result: A function that returns the run folder if the run is over, and otherwise None.
        close: A function that closes the connections.
    """

    table: Callable[[], dict[str, Any] | None]
    result: Callable[[], Path | None]
    close: Callable[[], None] = lambda: None


def source_of(folder: Path, report: Report = print_lines) -> Source:
    """Return a source that reads the progress of a run from a folder.

    Args:
        folder: The administrator's folder, the folder of the server or of a site, or a run folder. For the
            administrator's folder, the source requests the progress from the server. For the folder of the server, of
            a site or of a run, the source reads the progress from files in this folder.
        report: A function that is called with a line about each event.

    Raises:
        SpecError: ``folder`` is not one of these folders.
        ExtraMissingError: ``folder`` is the administrator's folder, and NVFlare is not installed.
    """
    if (folder / JOB / "meta.json").is_file():
        require_nvflare()
        administrator = _Administrator(folder, report)
        return Source(administrator.table, lambda: administrator.fetched, administrator.close)
    if (folder / "startup").is_dir():
        return Source(partial(_of_kit, folder), partial(_result_of_kit, folder))
    if (folder / SPEC).is_file() and (folder / METRICS).is_file():
        return Source(partial(of_run, folder), lambda: folder if of_run(folder)["over"] else None)
    if runs := sorted(path.parent for path in folder.glob(f"*/seed-*/{METRICS}")):
        count = f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
        problem = f"is the folder of a comparison with {count}. Give the folder of one run, for example {runs[0]}."
        raise SpecError("DIR", problem, str(folder))
    raise SpecError(
        "DIR",
        "is neither the folder of a party (with startup/) nor a run folder. Give one of these folders.",
        str(folder),
    )


def status(folder: Path, *, watch: bool = False, as_json: bool = False) -> None:
    """Print the progress of a run, or of one site's work in a run.

    Args:
        folder: The folder of the administrator, the server or a site, or a run folder; see ``source_of``.
        watch: Whether to print the progress every two seconds until the run is over. In a terminal, each output
            replaces the previous output.
        as_json: Whether to print the progress as JSON.

    Raises:
        SpecError: ``folder`` is not one of these folders.
        DataError: A file of the run is damaged.
        FedstrataError: The server refuses the request, or cannot be reached. With ``watch``, this function keeps asking
            an unreachable server, and does not raise an error.
    """
    from rich.console import Console
    from rich.live import Live

    console = Console()
    live = Live(console=console, auto_refresh=False) if watch and not as_json and console.is_terminal else None
    with closing(source_of(folder, partial(print_lines, file=sys.stderr))) as source, live or nullcontext():
        while True:
            table = source.table()
            if not watch and table and "away" in table:
                raise FedstrataError(lines(table)[0])
            if live is not None:
                live.update(picture(table), refresh=True)
            else:
                print_lines(*([json.dumps(jsonable(table), allow_nan=False)] if as_json else lines(table)))
            if not watch or (table or {}).get("over"):
                return
            time.sleep(POLL)


def lines(table: dict[str, Any] | None) -> list[str]:
    """Return the progress (a dict from ``Source``) as lines of text."""
    if table and "away" in table:
        return [f"the server cannot be reached: {table['away']}"]
    if table and "waiting" in table:
        return [f"a run waits: {table['waiting']}"]
    return shown(table) if table else [NOTHING]


def picture(table: dict[str, Any] | None) -> Any:
    """Return the progress for display with ``rich``, with a colour for the state of each site."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if not table or "sites" not in table:
        return Text("\n".join(map(printable, lines(table))))
    rows = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    colours = {"in": "green", "late": "yellow"}
    for site, (state, why) in table["sites"].items():
        state_text = Text(printable(state), style=colours.get(state, "red"))
        rows.add_row(Text(printable(f"  {site}")), state_text, Text(printable(why)))
    head = Text("\n".join(map(printable, shown(table)[0].split("; "))))
    return Group(head, rows)


def _rounds(path: Path) -> int:
    """Read a run's number of rounds from its spec.

    The function does not read other settings, because other settings can name Python code, which would be loaded.
    """
    try:
        rounds = tomllib.loads(path.read_text(encoding="utf-8"))["training"]["rounds"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: training.rounds cannot be read ({type(error).__name__}: {error}). Restore the file."
        ) from None
    if type(rounds) is not int:
        raise DataError(f"{path}: training.rounds = {rounds!r}: is not an integer. Restore the file.")
    return rounds


def of_run(folder: Path) -> dict[str, Any]:
    """Return the progress of a run, computed from the files of its run folder.

    Raises:
        DataError: A file is damaged.
    """
    rounds, history = _rounds(folder / SPEC), History.load(folder)
    about, seconds = about_run(history, folder, (folder / SPEC).read_text(encoding="utf-8")), history.total("seconds")
    progress = Progress(rounds, [], lambda site: ("", ""), history, about=about)
    if (folder / WEIGHTS).exists():
        progress.end()
    elif (folder / ERROR).exists():
        progress.end(str(raised(folder / ERROR)))
    return progress.table() | {"seconds": seconds}


def _of_kit(kit: Path) -> dict[str, Any] | None:
    """Return the progress that the processes of the server or of a site wrote to its folder."""
    path = kit / STATUS
    if not path.exists():
        return None
    try:
        table: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError:
        table = {}
    if not isinstance(table, dict) or "at" not in table:
        raise DataError(f"{path}: the file is damaged. Wait until the job writes it again.")
    return table | {"disk_free": shutil.disk_usage(path.parent).free}


def _result_of_kit(kit: Path) -> Path | None:
    table = _of_kit(kit) or {}
    return kit / STATUS.parent / Path(table["run"]).name if table.get("over") and table.get("run") else None


class _Administrator:
    """The source for an administrator's folder.

    This source asks the server for the progress, and fetches the run folder after the run.
    """

    def __init__(self, kit: Path, report: Report) -> None:
        refuse_expired(kit, report)
        self._watch = Watch(kit, math.inf, report)
        self._place = tempfile.TemporaryDirectory(prefix="fedstrata-status-")
        self._last: dict[str, Any] = {}
        self._job = ""
        """The id of the last job if this job has ended and no other job is running; otherwise empty."""
        self._over: dict[str, Any] = {}
        self.fetched: Path | None = None
        """The copy of the run folder, once the run is complete."""

    def table(self) -> dict[str, Any] | None:
        """Return the progress; see ``Source``."""
        table = self._watch.progress()
        # If the server was restarted, the first request fails because its session is gone. The second request opens a
        # new session.
        if table is None and self._watch.away:
            table = self._watch.progress()
        if table is not None:
            self._last, self._job = table, ""
            return table
        status = ""
        if not self._watch.away:
            job, job_status = self._watch.ended()
            if job and job != self._job:
                self._end(job, job_status)
            elif not self._watch.away:
                self._job, status = job, "" if job else job_status
        if self._job:
            # The job has ended. Show its stored outcome, even if the server was shut down afterwards.
            return self._over
        if self._watch.away:
            return {"away": self._watch.away}
        if status == "RUNNING" and self._last and self._last["round"] == self._last["rounds"]:
            # The last progress is shown, because NVFlare may wait for a missing site after the last round.
            return self._last
        broke_off = status.startswith("FINISHED")
        return {"waiting": f"its job {'ended with the status' if broke_off else 'is'} {status}"} if status else None

    def _end(self, job: str, status: str) -> None:
        """Fetch the result of a job that has ended, and store the outcome. Do nothing if the server is unreachable."""
        sites, folder = self._last.get("sites", {}), Path(self._place.name) / job
        over: dict[str, Any] = {}
        self._job, self.fetched = "", None
        if status == COMPLETED:
            try:
                if not self._watch.fetch(folder, job):
                    return
                over, self.fetched = of_run(folder) | {"sites": sites}, folder
            except (FedstrataError, DataError) as error:
                status = str(error)
        nothing = {"round": 0, "rounds": 0, "sites": {}, "bytes_up": 0, "bytes_down": 0}
        self._job, self._over = job, over or nothing | self._last | {"over": status, "seconds_left": None}
        self._last = {}

    def close(self) -> None:
        """End the session, and delete the fetched run folder."""
        self._watch.close()
        self._place.cleanup()
