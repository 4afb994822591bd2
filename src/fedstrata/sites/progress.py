"""How far a run over real sites is: what its server and each site say of it, and how that is shown."""

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

LOG = logging.getLogger(__name__)

STATUS = Path("fedstrata") / "status.json"
"""In a party's folder: how far its own part is."""

FEDSTRATA = "fedstrata"
"""Our part of what NVFlare's ``show_stats`` answers."""

STEP = 2.0
"""Seconds between two looks that are written down."""

CURVES = {"accuracy": "accuracy", "loss": "loss", "train_loss": "train_loss", "clients_returned": "returned"}
"""What is shown over the rounds, and its name there."""

POINTS = 300
"""A curve has so many at most, or a few more: it is asked for every two seconds."""


class Curves:
    """What rounds came to, one after the other."""

    def __init__(self) -> None:
        self._rounds: list[tuple[int, Mapping[str, Any]]] = []

    def add(self, record: Mapping[str, Any]) -> None:
        """A round is over; after a crash it may be one that was over before."""
        while self._rounds and self._rounds[-1][0] >= record["round"]:
            self._rounds.pop()
        kept = {name: record[key] for key, name in CURVES.items() if record.get(key) is not None}
        self._rounds.append((int(record["round"]), kept))

    def table(self) -> dict[str, list[list[float]]]:
        """Rounds and values of each curve, thinned.

        >>> curves = Curves()
        >>> for round in (1, 2, 3, 2):
        ...     curves.add({"round": round, "loss": 1 / round})
        >>> curves.table()
        {'loss': [[1, 2], [1.0, 0.5]]}
        """
        thinned = {}
        rounds = list(self._rounds)  # another thread may add to it
        for name in CURVES.values():
            points = [(round, kept[name]) for round, kept in rounds if name in kept]
            if points:
                thin = points[:: math.ceil(len(points) / POINTS)]
                thin += points[-1:] if thin[-1] != points[-1] else []
                thinned[name] = [list(each) for each in zip(*thin, strict=True)]
        return thinned


class Progress:
    """What the server of a run says.

    Args:
        rounds: How many there will be.
        sites: Who is to take part.
        status: The state of each site, and why.
        before: Records of the rounds that were over when the run went on.
        path: Where it is written down; nowhere unless given.
        run: What its folder is called.
    """

    def __init__(
        self,
        rounds: int,
        sites: Iterable[str],
        status: Callable[[str], tuple[str, str]],
        before: Iterable[Mapping[str, Any]] = (),
        path: Path | None = None,
        run: str = "",
    ) -> None:
        self._rounds, self._sites, self._status = rounds, sorted(set(sites)), status
        self._begun, self._first = time.time(), 0
        self._last: Mapping[str, Any] = {}
        self._measured: dict[str, Any] = {}
        self._bytes = {"bytes_up": 0, "bytes_down": 0}
        self._curves = Curves()
        for record in before:
            self._add(record)
        self._path, self._writing = path, threading.Lock()
        self._over, self._run = "", run
        self._known: dict[str, list[str]] = {}

    def __call__(self, record: Mapping[str, Any]) -> None:
        """A round is over; a callback of a run."""
        self._first = self._first or int(record["round"])
        self._add(record)

    def _add(self, record: Mapping[str, Any]) -> None:
        self._last = dict(record)
        keys = ("accuracy", "loss", "train_loss")  # a round without an evaluation leaves what the last one said
        self._measured |= {key: record[key] for key in keys if record.get(key) is not None}
        self._curves.add(record)
        for key in self._bytes:
            self._bytes[key] += int(record.get(key) or 0)

    def table(self) -> dict[str, Any]:
        """As JSON holds it."""
        round = int(self._last.get("round", 0))
        here = round - self._first + 1 if self._first else 0
        seconds = time.time() - self._begun
        counts = {key: self._last.get(f"clients_{key}") for key in ("returned", "dropped", "late", "failed")}
        if not self._over:
            self._known = self._standings()
        return {
            "round": round,
            "rounds": self._rounds,
            **self._measured,
            **{key: value for key, value in counts.items() if value is not None},
            **self._bytes,
            "seconds": seconds,
            "seconds_left": seconds / here * (self._rounds - round) if here and not self._over else None,
            "sites": self._known,
            "curves": self._curves.table(),
            "run": self._run,
            "over": self._over,
        }

    def _standings(self) -> dict[str, list[str]]:
        return {site: list(self._status(site)) for site in self._sites}

    def end(self, how: str = "complete") -> None:
        """The run is over: nobody's status changes any more.

        Args:
            how: What became of it.
        """
        with suppress(Exception):  # whoever is asked for it may be gone already
            self._known = self._standings()
        self._over = how
        self.write()

    def write(self) -> None:
        """Write it down, where it has a place."""
        if self._path is not None:
            with self._writing:  # what is written last is the newest
                _write(self._path, self.table())

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write it down every two seconds in the block, whether or not a site is heard of."""
        ended = threading.Event()

        def work() -> None:
            while True:
                try:
                    self.write()
                except Exception as error:  # the disk is full, or the job is being ended: no reason to stop the run
                    LOG.debug("the status is not written: %s", error)
                if ended.wait(STEP):
                    return

        thread = threading.Thread(target=work, name="status", daemon=True)
        if self._path is not None:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            if thread.ident is not None:
                thread.join()


class SiteProgress:
    """What a site says of its own part; written to its folder, where its administrator looks.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._written = path, 0.0
        self.table: dict[str, Any] = {"questions": 0, "bytes_in": 0, "bytes_out": 0, "refused": "", "working": False}

    def question(self, size: int) -> None:
        """A question came, of so many bytes."""
        self.table |= {"bytes_in": self.table["bytes_in"] + size, "working": True, "asked": time.time()}
        self.table["questions"] += 1

    def answer(self, size: int, refused: str = "") -> None:
        """It was answered with so many bytes, or refused."""
        self.table |= {"bytes_out": self.table["bytes_out"] + size, "working": False}
        self.table["refused"] = refused or self.table["refused"]

    def write(self) -> None:
        """Write it down, unless that was just done."""
        if time.monotonic() - self._written >= STEP:
            self._written = time.monotonic()
            _write(self._path, self.table)


def _write(path: Path, table: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {**table, "at": time.time()})


def headline(table: Mapping[str, Any]) -> str:
    """A run in a line: clients by what became of them in the last round, bytes so far, and the time that is left.

    >>> headline({"round": 3, "rounds": 10, "accuracy": 0.8125, "loss": 0.5, "returned": 2, "failed": 1,
    ...           "bytes_up": 2_500_000, "bytes_down": 800, "seconds_left": 35.0,
    ...           "sites": {"a": ["in", ""], "b": ["gone", ""]}})
    'round 3 of 10, accuracy 0.812, loss 0.5; 2 returned, 1 failed; 1 of 2 sites in; 2.5 MB up, 0.8 kB down; 35 s left'
    """
    parts = [f"round {table['round']} of {table['rounds']}"]
    parts += [f"{key} {table[key]:.3g}" for key in ("accuracy", "loss", "train_loss") if table.get(key) is not None]
    counts = [f"{table[key]} {key}" for key in ("returned", "dropped", "late", "failed") if table.get(key)]
    sites = list(table["sites"].values())
    lines = [", ".join(parts)]
    if counts:
        lines.append(", ".join(counts))
    if sites:
        lines.append(f"{sum(state == 'in' for state, _ in sites)} of {len(sites)} sites in")
    lines.append(f"{_amount(table['bytes_up'])} up, {_amount(table['bytes_down'])} down")
    if table.get("seconds_left") is not None:
        lines.append(f"{_duration(table['seconds_left'])} left")
    return "; ".join(lines)


def shown(table: Mapping[str, Any], now: float | None = None) -> list[str]:
    """A run, or a site's own part, as lines: how far it is, and a line a site.

    Args:
        table: What its server, or the site, says.
        now: When, of what was written down.
    """
    if "sites" not in table:
        return shown_site(table, time.time() if now is None else now)
    names = table["sites"]
    width = max(map(len, names), default=0)
    rows = [f"  {name:{width}}  {state:<10}  {why}".rstrip() for name, (state, why) in names.items()]
    age = ((time.time() if now is None else now) - table["at"]) if "at" in table else 0.0
    first = f"the run is over: {table['over']}; " if table.get("over") else ""
    if not first and age >= 5 * STEP:
        first = f"last heard of {_duration(age)} ago; "
    return [first + headline(table), *rows]


def shown_site(table: Mapping[str, Any], now: float) -> list[str]:
    """A site's own part as lines."""
    age = now - table["at"]
    alive = "works" if table["working"] else "waits for the next question"
    state = alive if age < 5 * STEP else f"last heard of {_duration(age)} ago"
    lines = [
        f"this site {state}; {table['questions']} questions; "
        f"{_amount(table['bytes_in'])} in, {_amount(table['bytes_out'])} out"
    ]
    if table["refused"]:
        lines.append(f"  refused: {table['refused']}")
    return lines


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
