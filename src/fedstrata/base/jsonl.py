"""Files of records: one JSON object a line, and how they survive a crash."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedstrata.base.errors import DataError

CHECKSUM = "checksum"
"""The key of a line's checksum, the last of each line: of the line without it and of the checksum before it."""

_SEAL = re.compile(rb'(?:, )?"checksum": "([0-9a-f]{64})"\}$')


class Log:
    """A file of records, one JSON object a line, to which records are only added.

    Each line carries a checksum that goes on from the line before: one that is changed, lost, repeated or moved shows.

    Args:
        path: The file; made by the first ``append``.
        mode: Who may read it; the umask takes from that.
    """

    def __init__(self, path: Path | str, mode: int = 0o666) -> None:
        self.path, self._mode = Path(path), mode
        self.last, self.size = "", 0
        """The last line's checksum, and the bytes of all lines, as far as this object knows."""

    @property
    def is_known(self) -> bool:
        """Whether the file has the size that this object knows: no other wrote into it, and no write broke off."""
        return self.size == (self.path.stat().st_size if self.path.exists() else 0)

    def append(self, *records: Mapping[str, Any]) -> None:
        """Add records, one line each, and hand them to the operating system.

        Raises:
            TypeError: A value is nothing that JSON can hold.
        """
        lines, last = list[str](), self.last
        for record in records:
            text = json.dumps(jsonable(record), allow_nan=False)
            last = _checksum(last, text.encode())
            lines.append(f'{text[:-1]}{", " if len(text) > 2 else ""}"{CHECKSUM}": "{last}"}}\n')
        data = "".join(lines).encode()
        with open(self.path, "ab", opener=lambda name, flags: os.open(name, flags, self._mode)) as file:
            file.write(data)
        self.last, self.size = last, self.size + len(data)

    def sync(self) -> None:
        """Wait until what was appended is on the disk: a power cut cannot take it away any more."""
        if self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())


def checksum_of(line: bytes, after: str | None = None) -> str | None:
    """Return a line's checksum; None where it has none, or none that goes on from ``after``."""
    found = _SEAL.search(line)
    if found is None or (after is not None and _checksum(after, line[: found.start()] + b"}") != found[1].decode()):
        return None
    return found[1].decode()


class MetricsLog(Log):
    """What a run writes round by round; it survives being killed in the middle of a line."""

    def append(self, *records: Mapping[str, Any]) -> None:
        """Add records, one line each; first a torn last line is dropped: it would swallow the first new one.

        Raises:
            DataError: The file that is there is damaged.
        """
        if not self.is_known:
            self.truncate_after(math.inf)
        super().append(*records)

    def holds(self, checksum: str) -> bool:
        """Whether a line has that checksum, so that it and all before it are what they were when it was the last."""
        return self.path.exists() and any(each == checksum for _, _, each in _lines(self.path))

    def truncate_after(self, round: float) -> None:
        """Drop the records of later rounds, and a torn last line; the file is replaced in one step.

        Raises:
            DataError: A line before the last is damaged, or a record has no round.
        """
        lines, last = [], ""
        if self.path.exists():
            for line, record, checksum in _lines(self.path):
                if record["round"] <= round:
                    lines.append(line + b"\n")
                    last = checksum
            if b"".join(lines) != self.path.read_bytes():
                replace_file(self.path, b"".join(lines))
        self.last, self.size = last, sum(map(len, lines))

    def salvage(self) -> str:
        """Keep what can be read of a damaged file, and the whole of it beside as ``NAME.damaged``.

        Returns:
            What was wrong; an empty text where nothing was.
        """
        readable: list[bytes] = []
        try:
            for line, _, _ in _lines(self.path):
                readable.append(line + b"\n")
        except DataError as error:
            replace_file(self.path.with_name(self.path.name + ".damaged"), self.path.read_bytes())
            replace_file(self.path, b"".join(readable))
            return str(error)
        return ""


def read_jsonl(path: Path | str) -> list[dict[str, Any]]:
    """The records of a file that ``MetricsLog`` wrote; a torn last line is left out.

    Raises:
        DataError: Another line is no record of a round, or is not what was written there.
    """
    return [record for _, record, _ in _lines(Path(path))]


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any], str]]:
    """The whole lines of a file, their records, and their checksums (empty where a line has none)."""
    last = ""
    data = path.read_bytes()
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, parse_constant=lambda _: None)
        except ValueError:
            # No newline follows where the writer was killed; zeros are what a power cut leaves, and no line of ours.
            if number == len(lines) and b"\0" not in line:
                return
            raise DataError(f"{path}, line {number}: no JSON object; what stands before can be read") from None
        if not isinstance(record, dict) or type(record.get("round")) is not int:
            raise DataError(f"{path}, line {number}: no record of a round (an object with a whole number 'round')")
        checksum = record.pop(CHECKSUM, None)
        if checksum is not None:
            if checksum_of(line, last) != checksum:
                problem = "its checksum says that it, or a line before it, is not what was written"
                raise DataError(f"{path}, line {number}: {problem}; what stands before can be read")
            last = checksum
        elif last:
            raise DataError(f"{path}, line {number}: it lacks the checksum that the lines before it have")
        yield line, record, last


def _checksum(before: str, text: bytes) -> str:
    return hashlib.sha256(before.encode() + text).hexdigest()


def write_json(path: Path | str, value: object) -> None:
    """Write a value as indented JSON, in one step; NaN and infinity become null."""
    text = json.dumps(jsonable(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    replace_file(Path(path), text.encode())


def replace_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file so that a reader, or a crash, finds either the old or the new one.

    Args:
        path: The file.
        data: All of it.
        mode: Who may read it, from the first byte on; the umask takes from that.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    remove_leftovers(path.parent)
    try:
        with open(beside, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@lru_cache(maxsize=256)
def remove_leftovers(folder: Path) -> None:
    """Remove files that processes which were killed had begun to write, the first time that this one comes by."""
    for left in folder.glob(".*.tmp"):
        pid = left.name.split(".")[-2]
        if pid.isdigit() and not _runs(int(pid)):
            left.unlink(missing_ok=True)


def _runs(pid: int) -> bool:
    """Whether there is a process of that number; True where that cannot be asked."""
    if os.name != "posix":
        return True  # there a signal of number 0 would end it
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def jsonable(value: Any) -> Any:
    """``value`` as JSON holds it: arrays and tensors as lists, NaN and infinity as None, keys as text.

    Raises:
        TypeError: It is nothing of that kind.

    >>> jsonable({1: np.float32(0.5), "b": (float("nan"), np.arange(2))})
    {'1': 0.5, 'b': [None, [0, 1]]}
    """
    if isinstance(value, (np.generic, np.ndarray, Tensor)):
        value = value.tolist()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return [jsonable(item) for item in sorted(value)]
    raise TypeError(f"cannot record {value!r}, a {type(value).__name__}")
