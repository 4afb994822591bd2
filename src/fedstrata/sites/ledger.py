"""A site's ledger: a file with an entry for each reply or refusal.

An entry records the kind of the request, the size of the reply and the number of samples. The ledger is a
``jsonl.Log``. Each line has a checksum that also depends on the previous line. A check therefore
detects lines that were changed, removed or moved. The *head* of a ledger consists of its number of entries and its last
checksum. The head is stored in a second file, and is sent to the server with every reply. The server writes the heads
to the run folder. With a head, a check also detects missing lines at the end of the ledger. The ledger never contains
values, labels or error messages.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock

from fedstrata.base.errors import DataError
from fedstrata.base.jsonl import CHECKSUM, Log, checksum_of
from fedstrata.base.locking import LOCK

LOG = logging.getLogger(__name__)

FILE, HEAD, HEADS = "ledger.jsonl", "ledger.head", "ledgers.jsonl"
"""The names of three files: the ledger of a site, the head of this ledger, and the heads of all ledgers. The file
``HEADS`` is in the server's run folder."""

PLACE = "fedstrata"
"""The folder of the ledger in a site's folder."""

RECOVERED = "recovered"
"""The ``kind`` of an entry that replaces an incomplete line after a crash."""

_HEAD = re.compile(r"(\d{1,15}):([0-9a-f]{64})")


@dataclass(frozen=True)
class Head:
    """The head of a ledger: its length and its last checksum.

    Args:
        entries: The number of entries.
        digest: The checksum of the last entry; empty if there are no entries.
    """

    entries: int = 0
    digest: str = ""

    def __str__(self) -> str:
        return f"{self.entries}:{self.digest}"

    @classmethod
    def parsed(cls, text: object) -> Head | None:
        """Convert a string back to a head. Return None if the string is not a head."""
        match = _HEAD.fullmatch(text) if isinstance(text, str) else None
        return cls(int(match[1]), match[2]) if match else None


@dataclass(frozen=True)
class Entry:
    """An entry of the ledger about one reply or refusal.

    Args:
        run: The hash of the spec.
        kind: The kind of the request.
        client: The id of the client; None for a reply of the site itself.
        phase: ``enrolment``, ``round`` or ``evaluation``; empty if the phase is not known.
        round: The round; None if the request does not belong to a round.
        samples: The number of samples from which the reply was computed.
        bytes: The size of the reply in bytes.
        epsilon: The privacy budget ε that the reply spent; None without local differential privacy.
        refused: The name of the limit that made the site refuse the request; empty if the site replied.
        failed: The class name of the error that was raised instead of a reply; empty if the site replied.
        to: The site that received the reply; empty for the server.
        exchange: For a secure sum, its index among the sums of its roster (group of sites); otherwise None.
        roster: The hash of the roster of a secure sum, in hexadecimal digits.
        members: The sites in a roster, or the sites that contributed to a secure sum.
        noise: The standard deviation of the noise that the site added to each number of its update, as a multiple of
            ``privacy.clients.clip``; None without such noise.
    """

    run: str
    kind: str
    client: int | None = None
    phase: str = ""
    round: int | None = None
    samples: int = 0
    bytes: int = 0
    epsilon: float | None = None
    refused: str = ""
    failed: str = ""
    to: str = ""
    exchange: int | None = None
    roster: str = ""
    members: Sequence[str] = ()
    noise: float | None = None

    def table(self) -> dict[str, Any]:
        """Return the fields that differ from their default values, as a dict."""
        return {key: value for key, value in vars(self).items() if value != getattr(type(self), key, ...)}


class Ledger:
    """The ledger of one site. Several processes may write to the ledger at the same time.

    Args:
        folder: The folder of the ledger.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self.head_path = folder / FILE, folder / HEAD
        self._mutex, self._log, self._head = threading.Lock(), Log(self.path, 0o600), Head()

    def append(self, entries: Iterable[Entry]) -> Head:
        """Write entries to the disk, and return the new head. Call this method before the replies leave the site.

        Raises:
            DataError: The last line of the file is not an entry.
            OSError: The entries cannot be written. In this case, the replies must not leave the site.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._mutex, FileLock(self.path.with_name(LOCK), poll_interval=0.001):
            if not self._log.is_known:
                self._restore()
            now = datetime.now(UTC).isoformat(timespec="seconds")
            self._write([{"at": now, **entry.table()} for entry in entries])
            return self._head

    def _restore(self) -> None:
        """Prepare to append after the last complete line; replace an incomplete line with an entry about the crash."""
        data = self.path.read_bytes() if self.path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        last = whole[whole.rfind(b"\n", 0, -1) + 1 : -1]
        digest = checksum_of(last) or ""
        if last and not digest:
            raise DataError(f"{self.path}: the last line is not an entry. Run 'fedstrata ledger --verify' for details.")
        self._head = Head(whole.count(b"\n"), digest)
        self._log.last, self._log.size = digest, len(whole)
        if torn := len(data) - len(whole):
            os.truncate(self.path, len(whole))
            LOG.warning("%s: the last line is incomplete after a crash. Its %d bytes were removed.", self.path, torn)
            self._write([{"kind": RECOVERED, "torn_bytes": torn}])

    def _write(self, tables: Sequence[Mapping[str, Any]]) -> None:
        if not tables:
            return
        before, last, size = self._head, self._log.last, self._log.size
        try:
            self._log.append(*({"n": n, **table} for n, table in enumerate(tables, before.entries + 1)))
            self._head = Head(before.entries + len(tables), self._log.last)
            self._log.sync()
            # If the process crashes before the head is replaced, the old head remains. The old head is still valid,
            # because it describes only the entries before the new ones. The next head will include the new entries.
            beside = self.head_path.with_name(f".{HEAD}.{os.getpid()}")
            beside.write_text(f"{self._head}\n", encoding="utf-8")
            beside.replace(self.head_path)
        except BaseException:
            # Remove the entries that were written before the error, because the caller will write all entries again.
            self._head, self._log.last, self._log.size = before, last, size
            with suppress(OSError):
                os.truncate(self.path, size)
            raise


@dataclass(frozen=True)
class Checked:
    """The result of a check that a ledger is complete and unchanged.

    Args:
        entries: The unchanged entries at the beginning of the ledger.
        problems: Descriptions of missing or changed entries.
        notes: Descriptions of lines that a crash left incomplete. These lines are not problems.
    """

    entries: list[dict[str, Any]]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check(folder: Path, reported: Iterable[Head] = ()) -> Checked:
    """Read a ledger, and compare the ledger with its head and with the heads that a server received.

    Args:
        folder: The folder of the ledger.
        reported: The heads that a server received.

    Raises:
        DataError: The ledger does not exist.
    """
    path = folder / FILE
    if not path.exists() and not (folder / HEAD).exists():
        raise DataError(f"{folder}: the ledger does not exist yet. The site creates it when the first request arrives.")
    data = path.read_bytes() if path.exists() else b""
    *lines, torn = data.split(b"\n")
    checked, digests = Checked([]), [""]
    for number, line in enumerate(lines, start=1):
        entry = json.loads(line) if checksum_of(line, digests[-1]) else {}
        if entry.get("n") != number:
            problem = "was changed, or lines directly before it were removed or moved. All earlier lines are intact."
            checked.problems.append(f"line {number} of {len(lines)} {problem}")
            break
        digests.append(entry.pop(CHECKSUM))
        checked.entries.append(entry)
        if entry.get("kind") == RECOVERED:
            checked.notes.append(
                f"entry {number}: the line after entry {number - 1} was incomplete, because the site crashed before it "
                "sent the reply"
            )
    if torn:
        problem = (
            f"the line after entry {len(lines)} is incomplete ({len(torn)} bytes), because the site crashed before it "
            "sent the reply"
        )
        checked.notes.append(f"{problem}. The next entry will record the crash.")
    whole = not checked.problems
    heads = [(HEAD, _read_head(folder, checked))] + [("the server's record", head) for head in reported]
    for source, head in ((source, head) for source, head in heads if head is not None):
        if head.entries < len(digests):
            if digests[head.entries] != head.digest:
                checked.problems.append(f"entry {head.entries} was rewritten, and differs from {source}")
            elif source == HEAD and whole and head.entries < len(lines):
                numbers = f"{source} has {head.entries} entries, but the ledger has {len(lines)}"
                checked.notes.append(f"{numbers}, because of a crash")
        elif whole:
            several = head.entries > len(lines) + 1
            missing = f"entries {len(lines) + 1} to {head.entries} are" if several else f"entry {head.entries} is"
            checked.problems.append(
                f"{missing} missing: {source} has {head.entries} entries, but the ledger has {len(lines)}"
            )
    return checked


def _read_head(folder: Path, checked: Checked) -> Head | None:
    try:
        text = (folder / HEAD).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        checked.problems.append(f"{HEAD} is missing. The site writes this file with every entry")
        return None
    head = Head.parsed(text)
    if head is None:
        checked.problems.append(f"{HEAD} is damaged")
    return head


def heads_of(path: Path, site: str) -> list[Head]:
    """Read the heads that a server received from a site.

    Args:
        path: The server's run folder, the administrator's copy of this folder, or the file of heads in such a folder.
        site: The name of the site.

    Raises:
        DataError: The file cannot be read, or does not contain a head of this site's ledger.
    """
    file = path / HEADS if path.is_dir() else path
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        heads = [Head.parsed(line["head"]) for line in lines if line["site"] == site]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file}: the server's record of ledgers cannot be read: {error}") from None
    if not heads:
        raise DataError(f"{file}: does not contain a record of the site {site}. Check --site.")
    return [head for head in heads if head is not None]


def totals(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each run and kind of request, return a site's total numbers of replies and bytes, and its total ε."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in entries:
        if "run" not in entry:
            continue
        empty = {"answers": 0, "refused": 0, "failed": 0, "fewest_samples": None, "bytes": 0, "epsilon": 0.0}
        empty["least_noise"] = None
        names = {"run": entry["run"], "question": entry["kind"]}
        row = rows.setdefault((entry["run"], entry["kind"]), names | empty)
        row["refused"] += "refused" in entry
        row["failed"] += "failed" in entry
        if "refused" in entry or "failed" in entry:
            continue
        samples, fewest = entry.get("samples", 0), row["fewest_samples"]
        row["answers"] += 1
        row["bytes"] += entry.get("bytes", 0)
        row["epsilon"] += entry.get("epsilon", 0.0)
        if samples:
            row["fewest_samples"] = samples if fewest is None else min(fewest, samples)
        if (noise := entry.get("noise")) is not None:
            row["least_noise"] = noise if row["least_noise"] is None else min(row["least_noise"], noise)
    return list(rows.values())
