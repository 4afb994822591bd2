"""Read and change the list of sites that may connect.

The list is a file in the server's folder. The server reads this file at each connection.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel

from fedstrata.base.errors import DataError, FedstrataError, SpecError, not_among
from fedstrata.base.jsonl import write_json

LOG = logging.getLogger(__name__)

MEMBERS = Path("local") / "members.json"


def members(kit: Path) -> list[str]:
    """Return the names of the sites that may connect to the server whose folder is ``kit``.

    Raises:
        SpecError: The folder does not contain a list of sites.
        DataError: The list cannot be read.
    """
    return _read(kit).sites


class _Lists(BaseModel, strict=True):
    """The content of the file ``MEMBERS``: the sites that may connect, and all sites that were ever on this list."""

    sites: list[str]
    federation: list[str]


def _read(kit: Path) -> _Lists:
    """Read the file in a server's folder; see ``members`` for the errors."""
    path = kit / MEMBERS
    if not path.exists():
        raise SpecError(
            "SERVER",
            f"is not the folder of a server, because {MEMBERS} is missing. Give the server's folder, which 'fedstrata "
            "deploy' made.",
            str(kit),
        )
    try:
        return _Lists.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        expected = 'Use {"sites": [NAME, …], "federation": [NAME, …]}.'
        raise DataError(f"{path}: cannot be read as the list of sites that may connect. {expected}") from None


class Members:
    """A running server's list of sites that may connect. The file is read at each use, because users may edit it.

    If the file cannot be read, the last valid list is used. If there was never a valid list, no site may connect.

    Args:
        kit: The server's folder.
    """

    def __init__(self, kit: Path) -> None:
        self._kit, self._warned = kit, False
        self._last: list[str] | None = None

    def names(self) -> list[str] | None:
        """Return the sites that may connect; None if the server never had a list, for example in a simulation."""
        if (self._kit / MEMBERS).exists():
            try:
                self._last, self._warned = members(self._kit), False
            except FedstrataError as error:
                self._last = self._last or []
                if not self._warned:
                    LOG.warning("%s The sites of the last valid list may connect: %s", error, ", ".join(self._last))
                self._warned = True
        return self._last

    def struck(self, name: str) -> bool:
        """Return True if a site may not connect, because the list exists and does not contain the site."""
        names = self.names()
        return names is not None and name not in names


def write_members(kit: Path, names: Iterable[str], others: Iterable[str] = ()) -> None:
    """In the server's folder, write the list of sites that may connect.

    Args:
        kit: The server's folder.
        names: The sites that may connect.
        others: The sites of the federation that are not on the list. ``revoke(…, undo=True)`` may add them later.
    """
    sites = set(names)
    write_json(kit / MEMBERS, {"sites": sorted(sites), "federation": sorted(sites.union(others))})
    (kit / MEMBERS).chmod(0o600)


def revoke(kit: Path, name: str, *, undo: bool = False) -> list[str]:
    """Remove a site from the list of sites that may connect (or put it back), and return the sites on the list.

    The server and the run continue. The server refuses new connections from the site at once, and ends an existing
    connection at NVFlare's next heartbeat. The server no longer sends requests to the site, and ignores a reply that
    arrives later. The site's certificate stays valid, but the certificate alone is not enough to connect.

    Args:
        kit: The server's folder.
        name: The name of the site.
        undo: Whether to put the site on the list again.

    Raises:
        SpecError: ``kit`` is not a server's folder. Without ``undo``: the site is not on the list. With ``undo``: the
            site was never on the list.
        DataError: The list cannot be read.
    """
    lists = _read(kit)
    names = lists.sites
    federation = sorted({*names, *lists.federation})
    if undo:
        if name not in federation:
            raise SpecError("SITE", not_among("is not a site of this federation", name, federation), name)
        names.append(name)
    elif name not in names:
        listed = names or ["no site"]
        problem = not_among("is not on the list of sites that may connect", name, listed, "The list contains")
        raise SpecError("SITE", problem, name)
    else:
        names.remove(name)
    write_members(kit, names, federation)
    return sorted(set(names))
