"""A real site in another process, to which a hostile server can send any bytes at any time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asked

from fedstrata.sites.ledger import PLACE, check


class Line:
    """The process of a site, and the pipes to it."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).parents[2] / "hostile" / "site_process.py")]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def order(self, table: dict[str, Any], data: bytes = b"") -> bytes:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(table).encode() + b"\n" + data)
        self.process.stdin.flush()
        size = int.from_bytes(self.process.stdout.read(8), "little")
        return self.process.stdout.read(size)

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        assert self.process.wait(30) == 0
        self.process.stdout.close()


class Target(asked.Site):
    """A site as a hostile server sees it.

    Args:
        line: The connection to the site's process.
        folder: The folder of the site.
        table: The spec of the job.
        policy: The settings in which the site's policy differs from the default.
        opened: Whether the site runs without a guard, for comparison.
    """

    def __init__(
        self, line: Line, folder: Path, table: dict[str, Any] | None, policy: dict[str, Any], opened: bool
    ) -> None:
        self.line, self.limits, self.opened = line, policy, opened
        super().__init__(folder, table)

    def start(self) -> None:
        self.line.order({"folder": str(self.folder), "policy": self.limits, "opened": self.opened})
        self.site_server = self

    def call(self, body: Any, *acks: Any, caller: str = asked.SERVER) -> Any:
        data = asked.records.encode(asked.Envelope(list(acks), body) if caller == asked.SERVER else body)
        return asked.records.decode(self.raw(data, caller))

    def raw(self, data: bytes, caller: str = asked.SERVER) -> bytes:
        """Send any bytes to the site, and return its answer."""
        return self.line.order({"to": str(self.folder), "caller": caller, "size": len(data)}, data)

    @property
    def refused(self) -> list[str]:
        """The rules in the refusals of the site's ledger, which must be undamaged."""
        found = check(self.folder / PLACE)
        assert found.problems == []
        return [entry["refused"] for entry in found.entries if "refused" in entry]


Targets = Callable[..., Target]
