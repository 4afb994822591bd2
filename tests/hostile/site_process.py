"""A real site in its own process: a ``SiteServer`` with a ledger on disk, which reads bytes from a pipe.

``open`` removes the guard, the policy and the catalogue, which keep a hostile server out. Each attack also runs against
such an open site, to show that it would succeed there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fedstrata.sites import site_server as servers
from fedstrata.sites.guard import Guard
from fedstrata.sites.ledger import PLACE, Ledger
from fedstrata.sites.policy import Policy
from fedstrata.sites.settings import SiteSettings

GUARDED = servers.Guard


class Absent(Guard):
    """A guard that accepts every request."""

    def check(self, *about: Any, **more: Any) -> None:
        return None

    def hop(self, *about: Any, **more: Any) -> None:
        return None


def make(folder: str, policy: dict[str, Any], opened: bool) -> servers.SiteServer:
    return servers.SiteServer(
        "a",
        Path(folder),
        lambda target, data: b"",
        SiteSettings(patience=20.0, simulated=opened),
        policy=None if opened else Policy(**{"jobs": "within-policy", **policy}),
        ledger=Ledger(Path(folder) / PLACE),
    )


def main() -> None:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    made: dict[str, tuple[servers.SiteServer, type[Guard]]] = {}
    while line := source.readline():
        order = json.loads(line)
        if "folder" in order:
            made[order["folder"]], answer = (make(**order), Absent if order["opened"] else GUARDED), b""
        else:
            site, servers.Guard = made[order["to"]]
            answer = site.call(order["caller"], source.read(order["size"]))
        sink.write(len(answer).to_bytes(8, "little") + answer)
        sink.flush()


if __name__ == "__main__":
    main()
