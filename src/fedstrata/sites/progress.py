"""Write and show the progress of a run across sites. The server and each site write their progress to a JSON file."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedstrata.base.jsonl import write_json
from fedstrata.evaluation.history import History, column_of, numbers
from fedstrata.evaluation.summary import reached
from fedstrata.reporting.runs import Run
from fedstrata.reporting.setting import setting_line

LOG = logging.getLogger(__name__)

STATUS = Path("fedstrata") / "status.json"
"""The file to which the server or a site writes the progress of a run, in the party's own folder."""

FEDSTRATA = "fedstrata"
"""The key of fedstrata's progress in the reply to NVFlare's command ``show_stats``."""

STEP = 2.0
"""The number of seconds between two writes of the progress."""

DISK_FULL = 1e6
"""The number of free bytes below which a disk is considered full."""

CURVES = {"accuracy": "accuracy", "loss": "loss", "train_loss": "train_loss", "clients_returned": "returned"}
"""A mapping from fields of a round's record to the names of the curves that show these fields."""

POINTS = 300
"""The approximate maximum number of points of a curve. The number is limited because all curves are sent every two
seconds."""

MEASURED = ("accuracy", "loss", "train_loss")
COUNTED = ("returned", "dropped", "late", "failed")
"""The fields of a round's record that are shown: metrics (``MEASURED``) and counts of clients (``COUNTED``)."""


def curves_of(records: Iterable[Mapping[str, Any]], primary: str = "accuracy") -> dict[str, list[list[float]]]:
    """Return the curves of a run's metrics. A curve consists of a list of rounds and a list of values.

    A curve has at most ``POINTS`` + 1 points. The curve of the ``primary`` metric comes first.

    If a run repeats a round after a crash, the new record replaces the old records of this round and of later rounds.

    >>> curves_of([{"round": round, "loss": 1 / round} for round in (1, 2, 3, 2)])
    {'loss': [[1, 2], [1.0, 0.5]]}
    """
    rounds: list[Mapping[str, Any]] = []
    for record in records:
        while rounds and rounds[-1]["round"] >= record["round"]:
            rounds.pop()
        rounds.append(record)
    thinned, columns = {}, [(record["round"], numbers(record)) for record in rounds]
    for key, name in {column_of(primary): primary, **CURVES}.items():
        points = [(round, values[key]) for round, values in columns if key in values]
        if points:
            thin = points[:: math.ceil(len(points) / POINTS)]
            thin += points[-1:] if thin[-1] != points[-1] else []
            thinned[name] = [list(each) for each in zip(*thin, strict=True)]
    return thinned


def about_run(history: History, folder: Path, spec: str) -> dict[str, str]:
    """Return a short description of a run: the name of the run folder, the title, and the main settings.

    Args:
        history: The history of the run. Only its method and its seed are used.
        folder: The run folder.
        spec: The text of the spec.
    """
    run = Run(history.method, history, folder, [], spec)
    setting = " · ".join(map("".join, setting_line({run.label: [run]})))
    title = " on ".join(filter(None, (history.method, run.data)))
    return {"run": folder.resolve().name, "title": title, "setting": setting}


class Progress:
    """The progress of a run, which the server collects and reports.

    Args:
        rounds: The number of rounds of the run.
        sites: The names of the sites that should take part.
        status: A function that returns the state of a site, and the reason for this state.
        history: The history of the run, which is empty for a new run.
        path: An optional file, to which the progress is written.
        about: The description of the run, as ``about_run`` returns it.
    """

    def __init__(
        self,
        rounds: int,
        sites: Iterable[str],
        status: Callable[[str], tuple[str, str]],
        history: History | None = None,
        path: Path | None = None,
        about: Mapping[str, str] | None = None,
    ) -> None:
        self._rounds, self._sites, self._status = rounds, sorted(set(sites)), status
        self._begun = time.time()
        self._history = History() if history is None else history
        self._before = len(self._history)
        self._path, self._writing = path, threading.Lock()
        self._over, self._about = "", dict(about or {})
        self._states: dict[str, list[str]] = {}

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Add the record of a round. The training loop calls this object as a callback."""
        self._history.append(_kept(record))

    def table(self) -> dict[str, Any]:
        """Return the progress as a dict that JSON can represent."""
        # The records are copied, because another thread may add records.
        history, records = self._history, list(self._history)
        here, last = records[self._before :], records[-1] if records else {"round": 0}
        seconds, left = time.time() - self._begun, None
        if here and not self._over:
            left = seconds / (last["round"] - here[0]["round"] + 1) * (self._rounds - last["round"])
        if not self._over:
            self._update_states()
        # The last value of each metric is used, because not every round has an evaluation.
        measured = {key: record[key] for record in records for key in MEASURED if record.get(key) is not None}
        counts = {key: last[f"clients_{key}"] for key in COUNTED if f"clients_{key}" in last}
        column = column_of(history.primary)
        return {
            "round": last["round"],
            "rounds": self._rounds,
            **measured,
            **counts,
            "primary": history.primary,
            "value": history.final(column),
            "best": history.best(column),
            "best_round": history.best_round,
            "reached": reached(history),
            **{key: int(history.total(key)) for key in ("bytes_up", "bytes_down")},
            "seconds": seconds,
            "seconds_left": left,
            "sites": self._states,
            "curves": curves_of(records, history.primary),
            **self._about,
            "over": self._over,
        }

    def _update_states(self) -> None:
        self._states = {site: list(self._status(site)) for site in self._sites}

    def end(self, outcome: str = "complete") -> None:
        """Record the end of the run, and write the progress. The states of the sites do not change afterwards."""
        with suppress(Exception):  # errors are ignored, because the transport may already be closed
            self._update_states()
        self._over = outcome
        self.write()

    def write(self) -> None:
        """Write the progress to the file, if a file was given."""
        if self._path is not None:
            # Without the lock, a thread could replace another thread's newer table by its own older table.
            with self._writing:
                _write(self._path, self.table())

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write the progress every two seconds during the ``with`` block."""
        if self._path is None:
            yield
            return
        ended = threading.Event()

        def work() -> None:
            while True:
                try:
                    self.write()
                except Exception as error:
                    # Log the error, but do not raise it: a full disk, for example, must not stop the run.
                    LOG.debug("the status is not written: %s", error)
                if ended.wait(STEP):
                    return

        thread = threading.Thread(target=work, name="status", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


class SiteProgress:
    """The progress of one site's work in a run, which is written to the site's folder.

    Args:
        path: The file to which the progress is written.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._written = path, 0.0
        self.table: dict[str, Any] = {"questions": 0, "bytes_in": 0, "bytes_out": 0, "refused": "", "working": False}

    def question(self, size: int) -> None:
        """Count a request of ``size`` bytes that arrived from the server."""
        self.table |= {"bytes_in": self.table["bytes_in"] + size, "working": True, "asked": time.time()}
        self.table["questions"] += 1

    def answer(self, size: int, refused: str = "") -> None:
        """Count a reply of ``size`` bytes to the server. If the site refused the request, record the reason."""
        self.table |= {"bytes_out": self.table["bytes_out"] + size, "working": False}
        self.table["refused"] = refused or self.table["refused"]

    def write(self) -> None:
        """Write the progress, at most every two seconds."""
        if time.monotonic() - self._written >= STEP:
            self._written = time.monotonic()
            _write(self._path, self.table)


def _kept(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a round's record that are needed to show the progress."""
    keys = ("round", "bytes_up", "bytes_down", "test", "validation", *MEASURED, *(f"clients_{key}" for key in COUNTED))
    return {key: record[key] for key in keys if record.get(key) is not None}


def _write(path: Path, table: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {**table, "at": time.time()})


def headline(table: Mapping[str, Any]) -> str:
    """Return one line about a run: round, metrics, clients of the last round, sites, bytes and remaining time.

    >>> headline({"round": 3, "rounds": 10, "accuracy": 0.8125, "loss": 0.5, "returned": 2, "failed": 1,
    ...           "bytes_up": 2_500_000, "bytes_down": 800, "seconds_left": 35.0,
    ...           "sites": {"a": ["in", ""], "b": ["gone", ""]}})
    'round 3 of 10, accuracy 0.812, loss 0.5; 2 returned, 1 failed; 1 of 2 sites in; 2.5 MB up, 0.8 kB down; 35 s left'
    """
    parts = [f"round {table['round']} of {table['rounds']}"]
    parts += [f"{key} {table[key]:.3g}" for key in MEASURED if table.get(key) is not None]
    counts = [f"{table[key]} {key}" for key in COUNTED if table.get(key)]
    sites = list(table["sites"].values())
    present = f"{sum(state == 'in' for state, _ in sites)} of {len(sites)} sites in" if sites else ""
    volume = f"{_amount(table['bytes_up'])} up, {_amount(table['bytes_down'])} down"
    left = f"{_duration(table['seconds_left'])} left" if table.get("seconds_left") is not None else ""
    return "; ".join(filter(None, (", ".join(parts), ", ".join(counts), present, volume, left)))


def shown(table: Mapping[str, Any], now: float | None = None) -> list[str]:
    """Return lines of text about one site's work in a run, or about a whole run, with one line for each site.

    Args:
        table: The progress that the server or the site wrote.
        now: The current time in seconds since 1970. By default, it is read from the clock.
    """
    now = time.time() if now is None else now
    age = now - table.get("at", now)
    quiet = f"last message {_duration(age)} ago" if age >= 5 * STEP else ""
    if "sites" not in table:
        return _site_lines(table, quiet)
    names = table["sites"]
    width = max(map(len, names), default=0)
    rows = [f"  {name:{width}}  {state:<10}  {why}".rstrip() for name, (state, why) in names.items()]
    first = f"the run is over: {table['over']}" if table.get("over") else quiet
    return ["; ".join([first] * bool(first) + [headline(table)]), *rows, *_disk_lines(table)]


def _site_lines(table: Mapping[str, Any], quiet: str) -> list[str]:
    state = quiet or ("works" if table["working"] else "waits for the next request")
    volume = f"{_amount(table['bytes_in'])} in, {_amount(table['bytes_out'])} out"
    lines = [f"this site {state}; {table['questions']} requests; {volume}"]
    if table["refused"]:
        lines.append(f"  refused: {table['refused']}")
    return lines + _disk_lines(table)


def _disk_lines(table: Mapping[str, Any]) -> list[str]:
    """Return a warning if the disk of the server or site is full, because the shown progress may then be outdated."""
    free = table.get("disk_free", math.inf)
    if free >= DISK_FULL:
        return []
    return [f"  the disk is full ({_amount(free)} left): new progress cannot be written. Free space on this disk."]


def _amount(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
