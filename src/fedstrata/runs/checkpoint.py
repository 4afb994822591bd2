"""Save and load checkpoints. Saved checkpoints stay usable even if the process is killed. Damaged files are detected.

The folder ``checkpoint/round-R/`` contains the server's state and a manifest, which lists the checkpoint's files and
their checksums. Each client's state is a separate file in ``checkpoint/clients/``, and is written only if it changed.
Each file is written under a temporary name, synced to the disk and then renamed. Only the two newest checkpoints are
kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedstrata.base import records
from fedstrata.base.errors import CheckpointError, WireError
from fedstrata.base.jsonl import replace_file
from fedstrata.base.records import Tree, record
from fedstrata.clients.client import StateStore

KEEP = 2
STATE, MANIFEST, CLIENTS = "state.bin", "manifest.json", "clients"
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, WireError)
"""The exceptions that may occur when a damaged checkpoint is read."""


@record("Stored")
class Stored:
    """The part of the server's state that a checkpoint stores.

    Args:
        state: The method's state.
        own: The state of the loop over rounds; see ``fedstrata.runs.loop_state``.
    """

    state: Tree
    own: Tree


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read from a run folder.

    Args:
        round: The round after which the checkpoint was saved.
        state: The method's state.
        clients: A mapping from each client to the file with the client's state. Clients without a state are left out.
        remote: Whether the sites (the clients' own machines) store the clients' states. Otherwise, the checkpoint
            contains the states.
        identity: The run's identity; None if the checkpoint has no identity.
        logs: A mapping from the name of each log, such as ``metrics.jsonl``, to the checksum of the log's last line at
            the time of the checkpoint.
        loop_state: The state of the loop over rounds; None if the checkpoint has no such state.
    """

    round: int
    state: Tree
    clients: dict[int, Path]
    remote: bool = False
    identity: dict[str, Any] | None = None
    logs: Mapping[str, str] = field(default_factory=dict)
    loop_state: Tree = None

    def only(self, clients: Collection[int]) -> Checkpoint:
        """Return a copy of the checkpoint that contains only the states of ``clients``."""
        return replace(self, clients={client: path for client, path in self.clients.items() if client in clients})

    def restore(self, store: StateStore) -> None:
        """Load the clients' states from the checkpoint into a store."""
        for client, path in self.clients.items():
            store.put(client, records.decode(path.read_bytes(), limit=None))
        store.changed.clear()


def save(
    folder: Path,
    round: int,
    state: Tree,
    store: StateStore,
    *,
    remote: bool = False,
    identity: Mapping[str, Any] | None = None,
    logs: Mapping[str, str] | None = None,
    loop_state: Tree = None,
) -> None:
    """Write a checkpoint after a round.

    Args:
        folder: The folder ``checkpoint/`` of the run.
        round: The last finished round.
        state: The method's state.
        store: The clients' states. A state is written only if it changed since the last checkpoint.
        remote: Whether the sites (the clients' own machines) store the clients' states. In this case, ``store`` is
            empty.
        identity: The run's identity; see ``fedstrata.runs.identity``.
        logs: A mapping from the name of each log to the checksum of its last line.
        loop_state: The state of the loop over rounds.
    """
    clients = folder / CLIENTS
    clients.mkdir(parents=True, exist_ok=True)
    # Remove checkpoints of this round and of later rounds. They are damaged, because otherwise the run would have
    # resumed from them.
    for stale in _complete(folder):
        if stale.name >= _name(round):
            shutil.rmtree(stale)
    complete = _complete(folder)
    previous = _manifest(complete[0]) if complete else {"clients": {}}
    held = {str(client) for client in store.clients}
    listed: dict[str, list[str]] = {client: file for client, file in previous["clients"].items() if client in held}
    for client in sorted(store.changed):
        name = f"{client}-{round}.bin"
        listed[str(client)] = [name, _write(clients / name, records.encode(dict(store.get(client))))]
    _sync(clients)
    part = folder / f"{_name(round)}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    digest = _write(part / STATE, records.encode(state if loop_state is None else Stored(state, loop_state)))
    manifest = {"round": round, "state": digest, "clients": listed, "remote": remote}
    manifest |= {"identity": identity, "logs": dict(logs or {})}
    text = json.dumps(manifest, separators=(",", ":"))
    _write(part / MANIFEST, json.dumps({"manifest": text, "sha256": _digest(text.encode())}).encode())
    _sync(part)
    part.rename(folder / _name(round))
    _sync(folder)
    store.changed.clear()
    _prune(folder)


def load(folder: Path, last: int | None = None) -> Checkpoint | None:
    """Read the newest undamaged checkpoint. Return None if the folder has no checkpoint.

    Args:
        folder: The folder that ``save`` wrote to.
        last: The checkpoint must be of this round or of an earlier round; None for any round.

    Raises:
        CheckpointError: All checkpoints are damaged.
    """
    problems = []
    for path in _complete(folder):
        if last is not None and path.name > _name(last):
            continue
        try:
            return _read(path)
        except DAMAGED as error:
            problems.append(f"{path.name}: {error}")
    if problems:
        raise CheckpointError(
            f"all checkpoints in {folder} are damaged ({'; '.join(problems)}). Start another run in a new folder."
        )
    return None


def _read(path: Path) -> Checkpoint:
    manifest = _manifest(path)
    if _name(manifest["round"]) != path.name:
        # The folder was renamed. ``save`` finds the newest checkpoint by the names of folders, and copies its list of
        # the clients' states. With a renamed folder, these states could belong to another round.
        raise ValueError(
            f"the folder contains the checkpoint of round {manifest['round']}, but has the name of another round"
        )
    data = (path / STATE).read_bytes()
    if _digest(data) != manifest["state"]:
        raise ValueError(f"the file {STATE} is damaged (its checksum is wrong)")
    files: dict[int, Path] = {}
    for client, (name, digest) in manifest["clients"].items():
        files[int(client)] = path.parent / CLIENTS / name
        if _digest(files[int(client)].read_bytes()) != digest:
            raise ValueError(f"the state of client {client} is damaged (its checksum is wrong)")
    state, remote = records.decode(data, limit=None), bool(manifest.get("remote", False))
    stored = state if isinstance(state, Stored) else Stored(state, None)
    identity, logs = manifest.get("identity"), manifest.get("logs", {})
    return Checkpoint(int(manifest["round"]), stored.state, files, remote, identity, logs, stored.own)


def _manifest(path: Path) -> dict[str, Any]:
    outer = json.loads((path / MANIFEST).read_bytes())
    if _digest(outer["manifest"].encode()) != outer["sha256"]:
        raise ValueError(f"the file {MANIFEST} is damaged (its checksum is wrong)")
    manifest: dict[str, Any] = json.loads(outer["manifest"])
    return manifest


def _name(round: int) -> str:
    return f"round-{round:08d}"


def _complete(folder: Path) -> list[Path]:
    """Return the folders of all complete checkpoints, newest first."""
    return sorted((path for path in folder.glob("round-*") if path.suffix != ".part"), reverse=True)


def _prune(folder: Path) -> None:
    complete = _complete(folder)
    for old in complete[KEEP:]:
        shutil.rmtree(old)
    wanted: set[str] = set()
    for kept in complete[:KEEP]:
        try:
            wanted |= {name for name, _ in _manifest(kept)["clients"].values()}
        except DAMAGED:
            return  # A damaged manifest does not show which files its checkpoint needs, so do not delete files.
    for path in (folder / CLIENTS).iterdir():
        if path.name not in wanted:
            path.unlink()


def _write(path: Path, data: bytes) -> str:
    replace_file(path, data)
    return _digest(data)


def _sync(folder: Path) -> None:
    """Sync a folder to the disk, so that renamed files keep their new names after a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
