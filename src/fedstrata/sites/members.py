"""The server's list of who may connect: a file in its folder, read at each connection."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedstrata.base.errors import DataError, FedstrataError, SpecError
from fedstrata.base.jsonl import write_json

LOG = logging.getLogger(__name__)

MEMBERS = Path("local") / "members.json"


def members(kit: Path) -> list[str]:
    """Who may connect to the server of this folder.

    Raises:
        SpecError: It has no list.
        DataError: The list cannot be read.
    """
    return _read(kit)["sites"]


def _read(kit: Path) -> dict[str, list[str]]:
    """The lists of a server's folder: who may connect (``sites``), and whom the federation has (``federation``)."""
    path = kit / MEMBERS
    if not path.exists():
        raise SpecError("SERVER", f"no server's folder: it has no {MEMBERS}", str(kit))
    try:
        table = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: no list of who may connect: {error}") from None
    lists: dict[str, Any] = dict.fromkeys(("sites", "federation"))
    lists |= {key: table[key] for key in lists if key in table} if isinstance(table, dict) else {}
    for names in lists.values():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise DataError(
                f'{path}: no list of who may connect: expected {{"sites": [NAME, …], "federation": [NAME, …]}}'
            )
    return lists


class Members:
    """A server's list while it runs, read anew each time: it may be edited by hand meanwhile.

    While it cannot be read, the last one that could holds; before there was one, nobody is on it.

    Args:
        kit: The server's folder.
    """

    def __init__(self, kit: Path) -> None:
        self._kit, self._said = kit, False
        self._last: list[str] | None = None

    def names(self) -> list[str] | None:
        """Who may connect; None where there never was a list."""
        if (self._kit / MEMBERS).exists():
            try:
                self._last, self._said = members(self._kit), False
            except FedstrataError as error:
                self._last = self._last or []
                if not self._said:
                    LOG.warning("%s; who was on the last that could be read may: %s", error, ", ".join(self._last))
                self._said = True
        return self._last

    def struck(self, name: str) -> bool:
        """Whether there is a list, and somebody is not on it."""
        names = self.names()
        return names is not None and name not in names


def write_members(kit: Path, names: Iterable[str], others: Iterable[str] = ()) -> None:
    """Write the list.

    Args:
        kit: The server's folder.
        names: Who may connect.
        others: Whom the federation has besides: they may be put on the list again.
    """
    sites = set(names)
    write_json(kit / MEMBERS, {"sites": sorted(sites), "federation": sorted(sites.union(others))})
    (kit / MEMBERS).chmod(0o600)


def revoke(kit: Path, name: str, *, undo: bool = False) -> list[str]:
    """Strike a site off the list, or put it on again; who is on it then.

    Neither the server nor the run need be started again. A new connection is refused at once, and one that is there
    within a heartbeat of NVFlare's; a run asks the site nothing more, and an answer that is under way counts no more.
    The site's certificate stays valid, for nothing.

    Args:
        kit: The server's folder.
        name: The site's.
        undo: Put it on the list.

    Raises:
        SpecError: It is no server's folder, or the site is not on its list; with ``undo``, it never was.
        DataError: The list cannot be read.
    """
    lists = _read(kit)
    names = lists["sites"]
    federation = sorted({*names, *lists["federation"]})
    if undo:
        if name not in federation:
            accepted = ", ".join(federation) or "none"
            raise SpecError("SITE", f"no site that was ever on the list; accepted: {accepted}", name)
        names.append(name)
    elif name not in names:
        raise SpecError("SITE", f"not on the list; on it are {', '.join(names) or 'none'}", name)
    else:
        names.remove(name)
    write_members(kit, names, federation)
    return sorted(set(names))
