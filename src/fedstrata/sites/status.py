"""How far a run is, wherever one looks: at the administrator's, the server's or a site's folder, or at a run folder."""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any, Protocol

from fedstrata.base.errors import DataError, FedstrataError, SpecError
from fedstrata.base.jsonl import jsonable, read_jsonl
from fedstrata.runs.run_folder import METRICS, SPEC, WEIGHTS
from fedstrata.sites.configuration import ERROR, raised
from fedstrata.sites.nvflare_workarounds import silence_client
from fedstrata.sites.progress import STATUS, Progress, shown
from fedstrata.sites.provision import JOB
from fedstrata.sites.simulator import require_nvflare
from fedstrata.sites.submit import COMPLETED, POLL, Report, Watch, refuse_expired

NOTHING = "no run is at work"


class Source(Protocol):
    """Where one looks."""

    def table(self) -> dict[str, Any] | None:
        """How far the run is, or a site's own part of it; None where there is none.

        Where the server that is asked does not answer, the table has only ``away``: why. Where a job was brought and
        its run says nothing yet, it has only ``waiting``: how the job stands.
        """

    def result(self) -> Path | None:
        """The run folder, once the run is over."""

    def close(self) -> None:
        """Look no more."""


def source_of(folder: Path, report: Report = print) -> Source:
    """What a folder tells.

    Args:
        folder: The administrator's, who asks the server; that of the server or of a site, which write their part down;
            or a run folder.
        report: Is called with a line about each event.

    Raises:
        SpecError: It is no such folder.
        ExtraMissingError: NVFlare is not installed, which an administrator needs.
    """
    if (folder / JOB / "meta.json").is_file():
        require_nvflare()
        silence_client()
        return _Asked(folder, report)
    if (folder / "startup").is_dir():
        return _Written(folder)
    if (folder / SPEC).is_file() and (folder / METRICS).is_file():
        return _Folder(folder)
    raise SpecError("FOLDER", "no party's folder: it has no startup; and no run folder", str(folder))


def status(folder: Path, *, watch: bool = False, as_json: bool = False) -> None:
    """Say how far the run is, or a party's own part of it.

    Args:
        folder: See ``source_of``.
        watch: Whether to go on until the run is over; in a terminal in one place, elsewhere in lines.
        as_json: As a table for programs.

    Raises:
        SpecError: It is no such folder.
        DataError: What the run wrote down is damaged.
        FedstrataError: The server refuses, or cannot be reached, which one that watches waits for.
    """
    from rich.console import Console
    from rich.live import Live

    console = Console()
    source = source_of(folder, lambda text: print(text, file=sys.stderr))
    try:
        if not watch or as_json or not console.is_terminal:
            while True:
                table = source.table()
                if not watch and table and "away" in table:
                    raise FedstrataError(lines(table)[0])
                text = json.dumps(jsonable(table), allow_nan=False) if as_json else "\n".join(lines(table))
                print(text, flush=True)
                if not watch or (table or {}).get("over"):
                    return
                time.sleep(POLL)
        with Live(console=console, auto_refresh=False) as live:
            while True:
                table = source.table()
                live.update(picture(table), refresh=True)
                if (table or {}).get("over"):
                    return
                time.sleep(POLL)
    finally:
        source.close()


def lines(table: dict[str, Any] | None) -> list[str]:
    """What is shown of a table."""
    if table and "away" in table:
        return [f"the server cannot be reached: {table['away']}"]
    if table and "waiting" in table:
        return [f"a run waits: {table['waiting']}"]
    return shown(table) if table else [NOTHING]


def picture(table: dict[str, Any] | None) -> Any:
    """The same for a terminal, as wide as that is: a site that does not take part stands out."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if not table or "sites" not in table:
        return Text("\n".join(lines(table)))
    rows = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    colours = {"in": "green", "late": "yellow"}
    for site, (state, why) in table["sites"].items():
        rows.add_row(Text(f"  {site}"), Text(state, style=colours.get(state, "red")), Text(why))
    head = Text("\n".join(shown(table)[0].split("; ")))
    return Group(head, rows)


def _rounds(path: Path) -> int:
    """Read the number of rounds of a run. The rest of a spec may name code, which looking must not import."""
    try:
        rounds = tomllib.loads(path.read_text(encoding="utf-8"))["training"]["rounds"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: training.rounds cannot be read ({type(error).__name__}: {error}).") from None
    if type(rounds) is not int:
        raise DataError(f"{path}: training.rounds = {rounds!r}: is not a whole number.")
    return rounds


def of_run(folder: Path) -> dict[str, Any]:
    """How far the run of a run folder is.

    Raises:
        DataError: Its files are damaged.
    """
    progress = Progress(_rounds(folder / SPEC), [], lambda site: ("", ""), read_jsonl(folder / METRICS))
    if (folder / WEIGHTS).exists():
        progress.end()
    elif (folder / ERROR).exists():
        progress.end(str(raised(folder / ERROR)))
    return progress.table() | {"seconds": None}


class _Folder:
    """A run folder, of a run here or of one that was fetched."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def table(self) -> dict[str, Any]:
        return of_run(self._folder)

    def result(self) -> Path | None:
        return self._folder if self.table()["over"] else None

    def close(self) -> None:
        pass


class _Written:
    """The folder of the server or of a site: what its processes wrote there."""

    def __init__(self, kit: Path) -> None:
        self._kit = kit

    def table(self) -> dict[str, Any] | None:
        path = self._kit / STATUS
        if not path.exists():
            return None
        try:
            table: dict[str, Any] = json.loads(path.read_bytes())
        except ValueError:
            table = {}
        if not isinstance(table, dict) or "at" not in table:
            raise DataError(f"{path}: damaged, it does not say how far the run is; what runs there writes it anew")
        return table

    def result(self) -> Path | None:
        table = self.table() or {}
        return self._kit / STATUS.parent / Path(table["run"]).name if table.get("over") and table.get("run") else None

    def close(self) -> None:
        pass


class _Asked:
    """The administrator's folder: the server is asked, and when the run is over its folder is fetched."""

    def __init__(self, kit: Path, report: Report) -> None:
        refuse_expired(kit, report)
        self._watch = Watch(kit, math.inf, report)
        self._place = tempfile.TemporaryDirectory(prefix="fedstrata-status-")
        self._last: dict[str, Any] = {}
        self._job = ""
        self._over: dict[str, Any] = {}
        self._fetched: Path | None = None

    def table(self) -> dict[str, Any] | None:
        table = self._watch.progress()
        if table is None and self._watch.away:  # of a server that was started again the next session may come about
            table = self._watch.progress()
        if table is not None:
            self._last, self._job = table, ""
            return table
        waits = ""
        if not self._watch.away:
            job, how = self._watch.ended()
            if job and job != self._job:
                self._end(job, how)
            elif not self._watch.away:
                self._job, waits = job, "" if job else how
        if self._job:  # what a run came to stays so when its server is shut down
            return self._over
        if self._watch.away:
            return {"away": self._watch.away}
        if waits == "RUNNING" and self._last and self._last["round"] == self._last["rounds"]:
            return self._last  # NVFlare may yet wait for a site that went away
        broke_off = waits.startswith("FINISHED")
        return {"waiting": f"its job {'broke off as' if broke_off else 'is'} {waits}"} if waits else None

    def _end(self, job: str, how: str) -> None:
        """What a job came to, which is fetched once; nothing while the server is away."""
        sites, folder = self._last.get("sites", {}), Path(self._place.name) / job
        self._job, self._fetched = "", None
        if how == COMPLETED:
            try:
                if not self._watch.fetch(folder, job):
                    return
                self._job, self._over, self._fetched = job, of_run(folder) | {"sites": sites}, folder
                self._last = {}
                return
            except (FedstrataError, DataError) as error:
                how = str(error)
        nothing = {"round": 0, "rounds": 0, "sites": {}, "bytes_up": 0, "bytes_down": 0}
        self._job, self._over = job, nothing | self._last | {"over": how, "seconds_left": None}
        self._last = {}

    def result(self) -> Path | None:
        return self._fetched

    def close(self) -> None:
        self._watch.close()
        self._place.cleanup()
