"""Files of records: one JSON object a line, and how they survive a crash."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedstrata.errors import DataError


class MetricsLog:
    """A file of records, one JSON object a line, that survives being killed in the middle of one.

    Args:
        path: The file; made by the first ``append``.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._mended = False

    def append(self, *records: Mapping[str, Any]) -> None:
        """Add records, one line each, and hand them to the operating system.

        Raises:
            TypeError: A value is nothing that JSON can hold.
            DataError: The file that is there is damaged.
        """
        if not self._mended:  # a torn last line would swallow the first new one
            self.truncate_after(math.inf)
        text = "".join(json.dumps(jsonable(record), allow_nan=False) + "\n" for record in records)
        with self.path.open("ab") as file:
            file.write(text.encode())

    def sync(self) -> None:
        """Wait until what was appended is on the disk: a power cut cannot take it away any more."""
        if self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    def truncate_after(self, round: float) -> None:
        """Drop the records of later rounds, and a torn last line; the file is replaced in one step.

        Raises:
            DataError: A line before the last is damaged, or a record has no round.
        """
        if self.path.exists():
            kept = b"".join(line + b"\n" for line, record in _lines(self.path) if record["round"] <= round)
            if kept != self.path.read_bytes():
                replace_file(self.path, kept)
        self._mended = True


def read_jsonl(path: Path | str) -> list[dict[str, Any]]:
    """The records of a file that ``MetricsLog`` wrote; a torn last line is left out.

    Raises:
        DataError: Another line is no record of a round.
    """
    return [record for _, record in _lines(Path(path))]


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, parse_constant=lambda _: None)
        except ValueError:
            if number == len(lines):  # no newline follows: the writer was killed
                return
            raise DataError(f"{path}, line {number}: no JSON object") from None
        if not isinstance(record, dict) or type(record.get("round")) is not int:
            raise DataError(f"{path}, line {number}: no record of a round (an object with a whole number 'round')")
        yield line, record


def write_json(path: Path | str, value: object) -> None:
    """Write a value as indented JSON, in one step; NaN and infinity become null."""
    text = json.dumps(jsonable(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    replace_file(Path(path), text.encode())


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a crash, finds either the old or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


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
