"""The server's list of who may connect: a file in its folder, read at each connection."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from fedstrata.errors import SpecError
from fedstrata.jsonl import write_json

MEMBERS = Path("local") / "members.json"


def members(kit: Path) -> list[str]:
    """Who may connect to the server of this folder.

    Raises:
        SpecError: It has no list.
    """
    path = kit / MEMBERS
    if not path.exists():
        raise SpecError("SERVER", f"no server's folder: it has no {MEMBERS}", str(kit))
    return [str(name) for name in json.loads(path.read_text(encoding="utf-8"))["sites"]]


def struck(kit: Path, name: str) -> bool:
    """Whether the server of this folder has a list, and somebody is not on it; read anew each time."""
    return (kit / MEMBERS).exists() and name not in members(kit)


def write_members(kit: Path, names: Iterable[str]) -> None:
    """Write the list."""
    write_json(kit / MEMBERS, {"sites": sorted(set(names))})
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
        SpecError: It is no server's folder, or the site is not on its list.
    """
    names = members(kit)
    if undo:
        names.append(name)
    elif name not in names:
        raise SpecError("SITE", f"not on the list; on it are {', '.join(names) or 'none'}", name)
    else:
        names.remove(name)
    write_members(kit, names)
    return members(kit)
