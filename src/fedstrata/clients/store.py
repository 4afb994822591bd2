"""Where the clients' states are kept between the rounds in which they take part."""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path

from fedstrata.base import records
from fedstrata.base.records import Tree
from fedstrata.federation.messages import ClientId

DEFAULT_MEMORY = 1 << 30


class StateStore:
    """The states of those clients that have one; what was not used for longest goes to disk when memory is full.

    Args:
        memory: Bytes of states held in memory.
        folder: Where the rest goes; a temporary folder, made when first needed, unless given.
    """

    def __init__(self, memory: int = DEFAULT_MEMORY, folder: Path | None = None) -> None:
        self.memory, self._folder = memory, folder
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._held: OrderedDict[ClientId, Mapping[str, Tree]] = OrderedDict()
        self._sizes: dict[ClientId, int] = {}
        self._spilled: set[ClientId] = set()
        self._used = 0
        self.changed: set[ClientId] = set()
        """Clients whose state changed since somebody last emptied this set."""

    def __iter__(self) -> Iterator[ClientId]:
        return iter(sorted(self._held.keys() | self._spilled))

    def __len__(self) -> int:
        return len(self._held) + len(self._spilled)

    def get(self, client: ClientId) -> Mapping[str, Tree]:
        """A client's state; empty where it has none."""
        if client in self._spilled:
            state: Mapping[str, Tree] = records.decode(self._path(client).read_bytes(), limit=None)
            self._hold(client, state)
            self._spilled.discard(client)
            return state
        if client in self._held:
            self._held.move_to_end(client)
        return self._held.get(client, {})

    def put(self, client: ClientId, state: Mapping[str, Tree]) -> None:
        """Keep a client's new state."""
        if not state and client not in self._held and client not in self._spilled:
            return
        self._spilled.discard(client)
        self.changed.add(client)
        self._hold(client, state)

    def _hold(self, client: ClientId, state: Mapping[str, Tree]) -> None:
        # The size of tensors and arrays is what fills memory; measuring the rest would cost more than it holds.
        size = _weight(state)
        self._used += size - self._sizes.pop(client, 0)
        self._sizes[client] = size
        self._held[client] = state
        self._held.move_to_end(client)
        while self._used > self.memory and len(self._held) > 1:
            oldest, spilled = self._held.popitem(last=False)
            self._path(oldest).write_bytes(records.encode(dict(spilled)))
            self._spilled.add(oldest)
            self._used -= self._sizes.pop(oldest)

    def _path(self, client: ClientId) -> Path:
        if self._folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="fedstrata-states-")
            self._folder = Path(self._temporary.name)
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / f"{client}.state"

    def close(self) -> None:
        """Remove what was spilled."""
        if self._temporary is not None:
            self._temporary.cleanup()


def _weight(tree: Tree) -> int:
    return 256 + sum(getattr(leaf, "nbytes", 16) for leaf in records.leaves_of(tree))
