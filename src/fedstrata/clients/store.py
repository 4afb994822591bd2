"""Store the states of clients between requests."""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from fedstrata.base import records
from fedstrata.base.records import Tree
from fedstrata.federation.messages import ClientId

DEFAULT_MEMORY = 1 << 30


class StateStore:
    """The states that clients keep between requests.

    If the states exceed ``memory``, the least recently used states move to the disk.

    Args:
        memory: Maximum total size of the states in memory, in bytes.
        folder: Folder for the states on the disk. Default: a temporary folder, which is created when it is first
            needed.
    """

    def __init__(self, memory: int = DEFAULT_MEMORY, folder: Path | None = None) -> None:
        self.memory, self._folder = memory, folder
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._held: OrderedDict[ClientId, Mapping[str, Tree]] = OrderedDict()
        self._sizes: dict[ClientId, int] = {}
        self._used = 0
        self.clients: set[ClientId] = set()
        """The clients with a stored state, in memory or on the disk."""
        self.changed: set[ClientId] = set()
        """The clients whose state has changed since this set was last cleared."""

    def get(self, client: ClientId) -> Mapping[str, Tree]:
        """Return a client's state, or an empty state if no state is stored."""
        if client not in self.clients:
            return {}
        if client not in self._held:
            self._hold(client, records.decode(self._path(client).read_bytes(), limit=None))
        self._held.move_to_end(client)
        return self._held[client]

    def put(self, client: ClientId, state: Mapping[str, Tree]) -> None:
        """Store a client's new state."""
        if state or client in self.clients:
            self.clients.add(client)
            self.changed.add(client)
            self._hold(client, state)

    def _hold(self, client: ClientId, state: Mapping[str, Tree]) -> None:
        # The size is approximate: it counts all bytes of tensors and arrays, and 16 bytes for every other value.
        size = 256
        for leaf in records.leaves_of(state):
            size += getattr(leaf, "nbytes", 16)
        self._used += size - self._sizes.pop(client, 0)
        self._sizes[client] = size
        self._held[client] = state
        self._held.move_to_end(client)
        while self._used > self.memory and len(self._held) > 1:
            oldest, spilled = self._held.popitem(last=False)
            self._path(oldest).write_bytes(records.encode(dict(spilled)))
            self._used -= self._sizes.pop(oldest)

    def _path(self, client: ClientId) -> Path:
        if self._folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="fedstrata-states-")
            self._folder = Path(self._temporary.name)
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / f"{client}.state"

    def close(self) -> None:
        """Remove the temporary folder. A folder that the caller chose is not removed."""
        if self._temporary is not None:
            self._temporary.cleanup()
