"""The unique list of mode ``ckks-paper``: one ciphertext a label, and plain differences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedstrata.base.records import record
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import ClientId
from fedstrata.stratify.masking.ckks import Cipher
from fedstrata.stratify.masking.messages import CompareOne, PublicKeys, SealedPairs, SealPairs
from fedstrata.stratify.masking.public_keys import Public, ask_one
from fedstrata.stratify.masking.unique_list import UniqueList

Ints = NDArray[np.int64]


@record("PrintedRegister")
class PrintedRegister:
    """A printed list, for clients that join later.

    Args:
        keys: Public keys.
        entries: E(l) of every placeholder.
    """

    keys: PublicKeys
    entries: tuple[bytes, ...]


class PrintedList(UniqueList[SealedPairs]):
    """Mode ``ckks-paper``: a client decrypts the plain differences between its labels and the list's."""

    def __init__(self, federation: Federation, public: Public, register: PrintedRegister | None = None) -> None:
        super().__init__(federation, public)
        self.entries = [self._load(data) for data in register.entries] if register else []
        self.counts: dict[ClientId, tuple[bytes, ...]] = {}

    def __len__(self) -> int:
        return len(self.entries)

    def register(self) -> PrintedRegister:
        """As a record."""
        return PrintedRegister(self.public.keys, tuple(entry.serialize() for entry in self.entries))

    def sealed(self, clients: Sequence[ClientId]) -> dict[ClientId, SealedPairs]:
        """See ``UniqueList``."""
        replies = self.ask(dict.fromkeys(clients, SealPairs(self.public, self.classes)))
        self.counts |= {client: reply.counts for client, reply in replies.items()}
        return replies

    def match(self, clients: dict[ClientId, SealedPairs]) -> dict[ClientId, Ints]:
        """See ``UniqueList``."""
        held = {}
        for client, sealed in clients.items():
            found = []
            for data in sealed.labels:
                label = self._load(data)
                # One label at a time: all differences of a client would take gigabytes.
                request = CompareOne(tuple((label - entry).serialize() for entry in self.entries))
                reply = ask_one(self.federation, client, request)
                if reply is None:
                    break
                found.append(reply.entry)
            else:
                held[client] = np.array(found, dtype=np.int64)
        return held

    def enlist(self, client: ClientId, sealed: SealedPairs, labels: Ints) -> bool:
        """See ``UniqueList``."""
        self.entries += [self._load(sealed.labels[label]) for label in labels.tolist()]
        return True

    def _load(self, data: bytes) -> Cipher:
        return self.public.comparing.load(data, length=1)
