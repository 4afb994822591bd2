"""Write and read files that stay intact after a crash. Most files contain one record (a JSON object) per line."""

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

from fedstrata.base.errors import DataError

CHECKSUM = "checksum"
"""The name of the last key in each line. The value is a hash of the rest of the line and of the previous line's
checksum."""

REPAIR = "Restore the file, or remove this line and the lines after it."
"""The advice in errors about a damaged line. All lines before the damaged line are intact."""

_SEAL = re.compile(rb'(?:, )?"checksum": "([0-9a-f]{64})"\}$')


class Log:
    """An append-only file of records, one JSON object per line.

    The checksum of a line includes the checksum of the previous line. The log therefore detects lines that were
    changed, lost, repeated or moved.

    Args:
        path: The file. The first call of ``append`` creates the file.
        mode: The permissions of a new file. The process's umask may restrict these permissions.
    """

    def __init__(self, path: Path | str, mode: int = 0o666) -> None:
        self.path, self._mode = Path(path), mode
        self.last, self.size = "", 0
        """The last line's checksum and the file's size in bytes, from the time when this object last used the file."""

    @property
    def is_known(self) -> bool:
        """Whether the file still has ``size`` bytes. Otherwise, another program changed the file, or a write failed."""
        return self.size == (self.path.stat().st_size if self.path.exists() else 0)

    def append(self, *records: Mapping[str, Any]) -> None:
        """Append records, one per line. Until ``sync`` is called, a system crash can still lose the records.

        Raises:
            TypeError: A value cannot be converted to JSON.
        """
        lines, last = list[str](), self.last
        for record in records:
            text = json.dumps(jsonable(record), allow_nan=False)
            last = _checksum(last, text.encode())
            lines.append(f'{text[:-1]}{", " if len(text) > 2 else ""}"{CHECKSUM}": "{last}"}}\n')
        data = "".join(lines).encode()
        try:
            with open(self.path, "ab", opener=lambda name, flags: os.open(name, flags, self._mode)) as file:
                file.write(data)
        except OSError as error:
            error.filename = str(self.path)  # some errors, for example about a full disk, do not name the file
            raise
        self.last, self.size = last, self.size + len(data)

    def sync(self) -> None:
        """Wait until all records are on the disk, where they survive a power cut."""
        if self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())


def checksum_of(line: bytes, after: str | None = None) -> str | None:
    """Return the checksum of a line.

    Return None if the line has no checksum, or if the checksum is wrong. Wrong checksums are detected only if ``after``
    is the previous line's checksum.
    """
    match = _SEAL.search(line)
    if match is None or (after is not None and _checksum(after, line[: match.start()] + b"}") != match[1].decode()):
        return None
    return match[1].decode()


class MetricsLog(Log):
    """A log with one record for each round of a run.

    If the process is killed while it writes a line, the earlier lines stay intact.
    """

    def append(self, *records: Mapping[str, Any]) -> None:
        """Remove an incomplete last line, and then append records, one per line.

        Raises:
            DataError: The existing file is damaged.
        """
        if not self.is_known:
            self.truncate_after(math.inf)
        super().append(*records)

    def holds(self, checksum: str) -> bool:
        """Return True if a line has this checksum. This line and all previous lines are then unchanged."""
        return self.path.exists() and any(each == checksum for _, _, each in _lines(self.path))

    def truncate_after(self, round: float) -> None:
        """Remove an incomplete last line, and the records of all rounds after ``round``.

        The file is replaced atomically.

        Raises:
            DataError: A line before the last line is damaged, or a record has no round.
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
        """Keep the readable lines of a damaged file, and copy the whole file to ``NAME.damaged``.

        Returns:
            A description of the damage; an empty string if the file is not damaged.
        """
        readable: list[bytes] = []
        try:
            for line, _, _ in _lines(self.path):
                readable.append(line + b"\n")
        except DataError as error:
            replace_file(self.path.with_name(self.path.name + ".damaged"), self.path.read_bytes())
            replace_file(self.path, b"".join(readable))
            return str(error).removesuffix(f" {REPAIR}")
        return ""


def read_jsonl(path: Path | str) -> list[dict[str, Any]]:
    """Read the records of a file that ``MetricsLog`` wrote. An incomplete last line is ignored.

    Raises:
        DataError: A line before the last line is damaged, or a line is not the record of a round.
    """
    return [record for _, record, _ in _lines(Path(path))]


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any], str]]:
    """Yield the complete lines of a file, their records, and their checksums (empty if a line has none)."""
    last = ""
    data = path.read_bytes()
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, parse_constant=lambda _: None)
        except ValueError:
            # A process that is killed while it writes leaves an incomplete last line: ignore it. A power cut can leave
            # zero bytes: report them as damage.
            if number == len(lines) and b"\0" not in line:
                return
            raise DataError(f"{path}, line {number} is not a JSON object. {REPAIR}") from None
        if not isinstance(record, dict) or type(record.get("round")) is not int:
            problem = "the line is not a record of a round, because its key 'round' is not an integer"
            raise DataError(f"{path}, line {number}: {problem}. {REPAIR}")
        checksum = record.pop(CHECKSUM, None)
        if checksum is not None:
            if checksum_of(line, last) != checksum:
                problem = "the checksum is wrong, because this line was changed, or an earlier line was removed"
                raise DataError(f"{path}, line {number}: {problem}. {REPAIR}")
            last = checksum
        elif last:
            problem = "the line has no checksum, although the lines before it have checksums"
            raise DataError(f"{path}, line {number}: {problem}. {REPAIR}")
        yield line, record, last


def _checksum(before: str, text: bytes) -> str:
    return hashlib.sha256(before.encode() + text).hexdigest()


def write_json(path: Path | str, value: object) -> None:
    """Write a value as indented JSON, atomically. NaN and infinity are written as null."""
    text = json.dumps(jsonable(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    replace_file(Path(path), text.encode())


def replace_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replace a file atomically, so that readers see either the old or the new content, even after a crash.

    Args:
        path: The file.
        data: The new content.
        mode: The permissions of the file. The process's umask may restrict these permissions.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    remove_leftovers(path.parent)
    try:
        with open(beside, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        # Some errors, for example about a full disk, do not name the file.
        error.filename, error.filename2 = (
            str(path),
            None,
        )
        raise
    finally:
        beside.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Wait until the folder's list of files is on the disk, so that a power cut does not undo ``replace_file``."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@lru_cache(maxsize=256)
def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of killed processes from a folder. Later calls for the same folder do nothing."""
    for path in folder.glob(".*.tmp"):
        pid = path.name.split(".")[-2]
        if pid.isdigit() and not _is_running(int(pid)):
            path.unlink(missing_ok=True)


def _is_running(pid: int) -> bool:
    """Return False only if it is certain that no process has this id."""
    if os.name == "posix":  # on Windows, os.kill would send Ctrl-C to the process
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except (OSError, OverflowError):
            return True
    return True


def jsonable(value: Any) -> Any:
    """Convert a value to JSON types.

    Arrays and tensors become lists, NaN and infinity become None, and keys become strings.

    Raises:
        TypeError: The value has an unsupported type.

    >>> import numpy as np
    >>> jsonable({1: np.float32(0.5), "b": (float("nan"), np.arange(2))})
    {'1': 0.5, 'b': [None, [0, 1]]}
    """
    # Arrays and tensors have ``tolist``. A test with isinstance would have to import NumPy and PyTorch, which takes
    # seconds.
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return [jsonable(item) for item in sorted(value)]
    raise TypeError(f"{value!r} of type {type(value).__name__} cannot be converted to JSON")
