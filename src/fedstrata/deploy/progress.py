"""How far a run over real sites is: what its server and each site say of it, and how that is shown."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstrata.jsonl import write_json

STATUS = Path("fedstrata") / "status.json"
"""In a party's folder: how far its own part is."""

FEDSTRATA = "fedstrata"
"""Our part of what NVFlare's ``show_stats`` answers."""

STEP = 2.0
"""Seconds between two looks that are written down."""


class Progress:
    """What the server of a run says.

    Args:
        rounds: How many there will be.
        sites: Who is to take part.
        standing: The state of each site, and why.
    """

    def __init__(self, rounds: int, sites: Iterable[str], standing: Callable[[str], tuple[str, str]]) -> None:
        self._rounds, self._sites, self._standing = rounds, sorted(set(sites)), standing
        self._begun, self._first = time.time(), 0
        self._last: Mapping[str, Any] = {}
        self._bytes = {"bytes_up": 0, "bytes_down": 0}

    def __call__(self, record: Mapping[str, Any]) -> None:
        """A round is over; a callback of a run."""
        self._first = self._first or int(record["round"])
        self._last = dict(record)
        for key in self._bytes:
            self._bytes[key] += int(record.get(key) or 0)

    def table(self) -> dict[str, Any]:
        """As JSON holds it."""
        round = int(self._last.get("round", 0))
        here = round - self._first + 1 if round else 0
        seconds = time.time() - self._begun
        shown = {key: self._last.get(key) for key in ("accuracy", "loss", "train_loss") if key in self._last}
        counts = {key: self._last.get(f"clients_{key}") for key in ("returned", "dropped", "late", "failed")}
        return {
            "round": round,
            "rounds": self._rounds,
            **{key: value for key, value in shown.items() if value is not None},
            **{key: value for key, value in counts.items() if value is not None},
            **self._bytes,
            "seconds": seconds,
            "seconds_left": seconds / here * (self._rounds - round) if here else None,
            "sites": {site: list(self._standing(site)) for site in self._sites},
        }


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
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, self.table | {"at": time.time()})


def headline(table: Mapping[str, Any]) -> str:
    """A run in a line: clients by what became of them in the last round, bytes so far, and the time that is left.

    >>> headline({"round": 3, "rounds": 10, "accuracy": 0.8125, "loss": 0.5, "returned": 2, "failed": 1,
    ...           "bytes_up": 2_500_000, "bytes_down": 800, "seconds_left": 95.0,
    ...           "sites": {"a": ["in", ""], "b": ["gone", ""]}})
    'round 3 of 10, accuracy 0.812, loss 0.5; 2 returned, 1 failed; 1 of 2 sites in; 2.5 MB up, 0.8 kB down; 1 min 35 s'
    """
    parts = [f"round {table['round']} of {table['rounds']}"]
    parts += [f"{key} {table[key]:.3g}" for key in ("accuracy", "loss", "train_loss") if table.get(key) is not None]
    counts = [f"{table[key]} {key}" for key in ("returned", "dropped", "late", "failed") if table.get(key)]
    sites = list(table["sites"].values())
    lines = [", ".join(parts)]
    if counts:
        lines.append(", ".join(counts))
    lines.append(f"{sum(state == 'in' for state, _ in sites)} of {len(sites)} sites in")
    lines.append(f"{_amount(table['bytes_up'])} up, {_amount(table['bytes_down'])} down")
    if table.get("seconds_left") is not None:
        lines.append(f"{_duration(table['seconds_left'])}")
    return "; ".join(lines)


def shown(table: Mapping[str, Any]) -> list[str]:
    """A run as lines: how far it is, and a line a site.

    Args:
        table: What its server says.
    """
    names = table["sites"]
    width = max(map(len, names), default=0)
    rows = [f"  {name:{width}}  {state:<10}  {why}".rstrip() for name, (state, why) in names.items()]
    return [headline(table), *rows]


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


def own_status(kit: Path) -> Sequence[str] | None:
    """What a party's folder says of its own part; None where nothing has run there."""
    path = kit / STATUS
    if not path.exists():
        return None
    table = json.loads(path.read_text(encoding="utf-8"))
    return shown(table) if "sites" in table else shown_site(table, time.time())


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
