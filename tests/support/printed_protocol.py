"""Stratify's protocol for masking labels as published (§IV-A), with one ciphertext per label.

In it, a client decrypts differences between its labels and others, and so learns other clients' labels. Therefore the
package has the mode ``ckks`` instead. Tests and ``benchmarks/masking.py`` compare the two. They add ``enrol_printed``
to ``enrolment._MODES``, and ``HANDLERS`` to the clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from fedstrata.base.arrays import Ints
from fedstrata.base.errors import FedstrataError, ReplyRefusedError
from fedstrata.base.records import record
from fedstrata.clients.client import Client
from fedstrata.clients.handling import handles
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import ClientId, Reply, Request
from fedstrata.stratify.masking import enrolment
from fedstrata.stratify.masking.ckks import Cipher, Opener
from fedstrata.stratify.masking.client import presented
from fedstrata.stratify.masking.counting import shares
from fedstrata.stratify.masking.enrolment import Held, Roll, Watch
from fedstrata.stratify.masking.key_store import ring_of
from fedstrata.stratify.masking.messages import OpenTotals, PublicKeys, Totals
from fedstrata.stratify.masking.public_keys import Public, ask_one, ask_until
from fedstrata.stratify.masking.unique_list import UniqueList

MODE = "ckks-paper"
"""The name of the mode."""

WHOLE = 0.1
"""The largest accepted distance of a decrypted number from a whole number."""


@record("test/SealedPairs")
class SealedPairs(Reply):
    """One ciphertext for each label, and one for each count."""

    key: str
    labels: tuple[bytes, ...]
    counts: tuple[bytes, ...]

    def require(self, public: Public, classes: int) -> None:
        """Refuse ciphertexts of other public keys, and more labels than there are classes."""
        public.check_key(self.key)
        if len(self.labels) > classes:
            raise ReplyRefusedError(f"{len(self.labels)} labels and {len(self.counts)} counts")
        for label, count in zip(self.labels, self.counts, strict=True):
            public.comparing.load(label, length=1)
            public.counting.load(count, length=1)


@record("test/SealPairs")
class SealPairs(Request):
    """A request for [E(l), E(n(l))], the encrypted label and count, for every label l."""

    reply_type: ClassVar[type[Reply]] = SealedPairs

    def check(self, reply: SealedPairs) -> None:
        """Refuse a reply without a count for each label."""
        if len(reply.labels) != len(reply.counts):
            raise ReplyRefusedError(f"{len(reply.labels)} labels and {len(reply.counts)} counts")


@record("test/CompareOneReply")
class CompareOneReply(Reply):
    """The index of the label in the list; −1 if the list does not contain it."""

    entry: int


@record("test/CompareOne")
class CompareOne(Request):
    """A request with the encrypted differences E(l − u) between a client's label l and every entry u of the list."""

    reply_type: ClassVar[type[Reply]] = CompareOneReply

    differences: tuple[bytes, ...]

    def check(self, reply: CompareOneReply) -> None:
        """Refuse an index outside the list."""
        if not -1 <= reply.entry < len(self.differences):
            raise ReplyRefusedError(f"entry {reply.entry} of a list of {len(self.differences)}")


@record("test/OpenPrintedTotals")
class OpenPrintedTotals(OpenTotals):
    """A request to decrypt the sums over clients, each of which is one ciphertext."""


@record("test/PrintedRegister")
class PrintedRegister:
    """The list of encrypted labels E(l), one per placeholder, for clients that join later."""

    keys: PublicKeys
    entries: tuple[bytes, ...]


class PrintedList(UniqueList):
    """The unique list, for which a client decrypts the differences between its labels and those of the list."""

    def __init__(self, federation: Federation, public: Public, register: PrintedRegister | None) -> None:
        super().__init__(federation, public)
        self.entries = [self._load(data) for data in register.entries] if register else []
        self.counts: dict[ClientId, tuple[bytes, ...]] = {}

    def __len__(self) -> int:
        return len(self.entries)

    def register(self) -> PrintedRegister:
        return PrintedRegister(self.public.keys, tuple(entry.serialize() for entry in self.entries))

    def sealed(self, clients: Sequence[ClientId]) -> dict[ClientId, Any]:
        replies = self.ask(clients, SealPairs(), check=lambda reply: reply.require(self.public, self.classes))
        self.counts |= {client: reply.counts for client, reply in replies.items()}
        return replies

    def match(self, clients: dict[ClientId, Any]) -> dict[ClientId, Ints]:
        held = {}
        for client, sealed in clients.items():
            places = []
            for data in sealed.labels:
                label = self._load(data)
                # A request contains only one label, because all differences of a client would take gigabytes.
                request = CompareOne(tuple((label - entry).serialize() for entry in self.entries))
                reply = ask_one(self.federation, client, request)
                if reply is None:
                    break
                places.append(reply.entry)
            else:
                held[client] = np.array(places, dtype=np.int64)
        return held

    def enlist(self, client: ClientId, sealed: Any, labels: Ints) -> bool:
        self.entries += [self._load(sealed.labels[label]) for label in labels.tolist()]
        return True

    def _load(self, data: bytes) -> Cipher:
        return self.public.comparing.load(data, length=1)


def enrol_printed(
    federation: Federation, clients: Sequence[ClientId], before: Roll | None, watch: Watch, weighted: bool
) -> Roll:
    """Enrol clients by the published protocol; a function for ``enrolment._MODES``."""
    public = enrolment._public(federation, clients, before, comparing=True)
    unique = PrintedList(federation, public, before.register if before else None)
    held = enrolment._match(unique, clients, watch)
    watch("counts")
    names = enrolment._names(before, len(unique))
    held = enrolment._assign(federation, held, names)
    totals = _totals(federation, _sums(public, held, unique.counts, names), held, names)
    counts = shares(federation, held, totals) if weighted else {}
    return Roll(MODE, names, held, counts, totals, unique.register())


def _sums(public: Public, held: Held, sealed: Mapping[ClientId, Sequence[bytes]], names: Ints) -> tuple[bytes, ...]:
    """Return the encrypted total E(N(p)) of each placeholder p; an encrypted zero if no client that holds p is left."""
    sums: dict[int, Cipher] = {}
    for client, placeholders in held.items():
        for name, data in zip(names[placeholders].tolist(), sealed[client], strict=True):
            count = public.counting.load(data, length=1)
            sums[name] = sums[name].add_(count) if name in sums else count
    return tuple((sums[p] if p in sums else public.counting.seal([0.0])).serialize() for p in range(len(names)))


def _totals(federation: Federation, pages: tuple[bytes, ...], held: Held, names: Ints) -> Ints:
    """Return the totals N(p), decrypted by the first client that answers."""
    holders = np.zeros(len(names), dtype=np.int64)
    holders[names] = np.bincount(np.concatenate(list(held.values())), minlength=len(names))
    request = OpenPrintedTotals(pages, len(names))
    _, reply = ask_until(federation, held, request, "decrypt the totals", check=lambda reply: reply.require(holders))
    return reply.totals.numpy()[names]


@handles(SealPairs)
def seal_pairs(client: Client, request: SealPairs) -> SealedPairs:
    """Encrypt each label and each count."""
    keys = ring_of(client.context).open()
    labels, counts = presented(client)
    sealed = tuple(keys.comparing.seal([label]).serialize() for label in labels.tolist())
    return SealedPairs(keys.name, sealed, tuple(keys.counting.seal([n]).serialize() for n in counts.tolist()))


@handles(CompareOne)
def compare_one(client: Client, request: CompareOne) -> CompareOneReply:
    """Return the index of the difference that is zero. The client sees all differences."""
    opener = ring_of(client.context).open().comparing
    zeros = [place for place, data in enumerate(request.differences) if _open_one(opener, data) == 0]
    if len(zeros) > 1:
        raise FedstrataError("the comparison is wrong, because a label is on the unique list twice")
    return CompareOneReply(zeros[0] if zeros else -1)


@handles(OpenPrintedTotals)
def open_printed_totals(client: Client, request: OpenPrintedTotals) -> Totals:
    """Decrypt the sums, one per ciphertext."""
    opener = ring_of(client.context).open().counting
    return Totals(torch.tensor([_open_one(opener, data) for data in request.pages], dtype=torch.int64))


def _open_one(opener: Opener, data: bytes) -> int:
    return int(opener.open_whole(opener.load(data, length=1), tolerance=WHOLE)[0])


HANDLERS = (seal_pairs, compare_one, open_printed_totals)
"""The handlers that clients need for this mode."""
