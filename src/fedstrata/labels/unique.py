"""The unique list under encryption, at the server: which clients share a label (Stratify §IV-A).

``PackedList`` compares all of a client's labels with the whole list at once and scrambles the differences
(``fedstrata.labels.grid``). ``PrintedList`` does it as the paper prints it, one ciphertext a difference. The server
holds public keys only: it learns what clients answer, which is where zeros are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from fedstrata.errors import ReplyRefusedError
from fedstrata.federation.messages import ClientId, Request
from fedstrata.federation.seam import Check, Federation
from fedstrata.labels.ckks import COMPARING, Cipher
from fedstrata.labels.grid import Grid, shuffled
from fedstrata.labels.messages import (
    Compare,
    CompareOne,
    CompareOneReply,
    CompareReply,
    Enlist,
    Enlisted,
    PublicKeys,
    SealedLabels,
    SealedPairs,
    SealLabels,
    SealPairs,
)
from fedstrata.labels.serving import Public, ask_one
from fedstrata.records import record

Ints = NDArray[np.int64]
S = TypeVar("S", SealedLabels, SealedPairs)

TOGETHER = 8
"""So many clients' ciphertexts are held at a time."""


@record
class PackedRegister:
    """A packed list, for clients that join later.

    Args:
        keys: Public keys.
        pages: The encrypted list.
        places: Page times width plus column of every placeholder, shape (P,).
    """

    keys: PublicKeys
    pages: dict[int, bytes]
    places: Ints


@record
class PrintedRegister:
    """A printed list, for clients that join later.

    Args:
        keys: Public keys.
        entries: E(l) of every placeholder.
    """

    keys: PublicKeys
    entries: tuple[bytes, ...]


class UniqueList(Generic[S]):
    """Placeholders in the order in which their labels were discovered.

    Args:
        federation: To ask clients, and for the number of classes, at which the list is complete.
        public: The clients' public keys.
    """

    def __init__(self, federation: Federation, public: Public) -> None:
        self.federation, self.public = federation, public
        self.classes = federation.job.classes

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def sealed(self, clients: Sequence[ClientId]) -> dict[ClientId, S]:
        """Encrypted labels."""

    @abstractmethod
    def match(self, clients: dict[ClientId, S]) -> dict[ClientId, Ints]:
        """The placeholder of each of the clients' labels; −1 for those that are not on the list."""

    @abstractmethod
    def enlist(self, client: ClientId, sealed: S, labels: Ints) -> bool:
        """Add a client's labels to the list; whether it worked."""

    def discover(self, clients: Sequence[ClientId]) -> tuple[dict[ClientId, Ints], Sequence[ClientId]]:
        """Client after client until the list is complete.

        Returns:
            The placeholders of those that answered, and the clients that there was no need to ask.
        """
        held: dict[ClientId, Ints] = {}
        for position, client in enumerate(clients):
            if len(self) >= self.classes:
                return held, clients[position:]
            sealed = self.sealed([client])
            found = self.match(sealed).get(client)
            if found is None:
                continue
            new = np.flatnonzero(found < 0)
            if not self._fits(client, found, self.classes - len(self)):
                continue
            number = len(self)
            if len(new) and not self.enlist(client, sealed[client], new):
                continue
            found[new] = np.arange(number, number + len(new))
            held[client] = found
        return held, ()

    def locate(self, clients: Sequence[ClientId]) -> dict[ClientId, Ints]:
        """The placeholders of clients whose labels must all be on the list."""
        held: dict[ClientId, Ints] = {}
        for begin in range(0, len(clients), TOGETHER):
            found = self.match(self.sealed(clients[begin : begin + TOGETHER]))
            held |= {client: places for client, places in found.items() if self._fits(client, places, 0)}
        return held

    def _fits(self, client: ClientId, found: Ints, room: int) -> bool:
        known = found[found >= 0]
        new = len(found) - len(known)
        defect = ""
        if new > room:
            defect = f"{new} labels that are not on the list, which has room for {room} of {self.classes}"
        elif len(np.unique(known)) != len(known):
            defect = "two labels that are the same entry of the list"
        if defect:
            self.refuse(client, defect)
        return not defect

    def refuse(self, client: ClientId, defect: str) -> None:
        """Leave out a client, with an event."""
        self.federation.tally.failed.add(client)
        self.federation.note("refused", [client], f"client {client} in round {self.federation.round}: {defect}")

    def ask(self, requests: Mapping[ClientId, Request], check: Check) -> dict[ClientId, Any]:
        """One exchange; a single client that raises an exception is a client that does not answer."""
        if len(requests) == 1:
            ((client, request),) = requests.items()
            reply = ask_one(self.federation, client, request, check)
            return {} if reply is None else {client: reply}
        return self.federation.ask(requests, check=check)


class PackedList(UniqueList[SealedLabels]):
    """Mode ``ckks``: one subtraction compares many labels, and what a client decrypts is zero or noise."""

    def __init__(self, federation: Federation, public: Public, register: PackedRegister | None = None) -> None:
        super().__init__(federation, public)
        self.grid = Grid(self.classes)
        self.sealer = public.comparing
        stored = register.pages if register else {}
        self.pages: dict[int, Cipher] = {page: self._load(data) for page, data in stored.items()}
        self.places = register.places.tolist() if register else []
        # Entries stand in random columns: that a match is in the first column must not tell who brought the label.
        taken = set(self.places)
        self._free = [place for place in shuffled(self.classes).tolist() if place not in taken]

    def __len__(self) -> int:
        return len(self.places)

    def register(self) -> PackedRegister:
        """As a record."""
        pages = {page: cipher.serialize() for page, cipher in self.pages.items()}
        return PackedRegister(self.public.keys, pages, np.array(self.places, dtype=np.int64))

    def sealed(self, clients: Sequence[ClientId]) -> dict[ClientId, SealedLabels]:
        """See ``UniqueList``."""

        def check(reply: SealedLabels) -> None:
            self.public.check_key(reply.key)
            if not 1 <= len(reply.sheets) <= self.grid.sheets(self.classes):
                raise ReplyRefusedError(f"{len(reply.sheets)} sheets for {self.classes} classes")
            for sheet in reply.sheets:
                self._load(sheet)

        return self.ask(dict.fromkeys(clients, SealLabels(self.classes)), check)

    def match(self, clients: dict[ClientId, SealedLabels]) -> dict[ClientId, Ints]:
        """See ``UniqueList``."""
        requests, order = {}, {}
        for client, sealed in clients.items():
            order[client] = [
                (sheet, page)
                for sheet in range(len(sealed.sheets))
                for page in np.array(sorted(self.pages), dtype=np.int64)[shuffled(len(self.pages))].tolist()
            ]
            sheets = [self._load(data) for data in sealed.sheets]
            differences = tuple(self._scramble(sheets[sheet], self.pages[page]) for sheet, page in order[client])
            which = torch.tensor([sheet for sheet, _ in order[client]], dtype=torch.int64)
            requests[client] = Compare(self.classes, which, differences)
        held = {}
        for client, reply in self.ask(requests, self._check_places).items():
            found = self._resolve(reply.places.numpy(), order[client])
            if found is None or self.grid.sheets(len(found)) != len(clients[client].sheets):
                self.refuse(client, "a match where the list has no entry, or another number of labels than it sent")
            else:
                held[client] = found
        return held

    def enlist(self, client: ClientId, sealed: SealedLabels, labels: Ints) -> bool:
        """See ``UniqueList``."""
        places = self._free[: len(labels)]
        pages = {place // self.grid.width for place in places}

        def check(reply: Enlisted) -> None:
            self.public.check_key(reply.key)
            if reply.pages.keys() != pages:
                raise ReplyRefusedError(f"pages {sorted(reply.pages)}, expected {sorted(pages)}")
            for data in reply.pages.values():
                self._load(data)

        request = Enlist(self.classes, torch.from_numpy(labels), torch.tensor(places, dtype=torch.int64))
        reply = ask_one(self.federation, client, request, check)
        if reply is None:
            return False
        for page, data in reply.pages.items():
            entry = self._load(data)
            self.pages[page] = self.pages[page] + entry if page in self.pages else entry
        self.places += places
        del self._free[: len(labels)]
        return True

    def _load(self, data: bytes) -> Cipher:
        return self.sealer.load(data, length=COMPARING.slots)

    def _scramble(self, sheet: Cipher, page: Cipher) -> bytes:
        factors, mask = self.grid.blind()
        product = (sheet - page) * factors.tolist() + self.sealer.seal(mask, product=True)
        data: bytes = product.serialize()
        return data

    def _check_places(self, reply: CompareReply) -> None:
        places = reply.places
        if places.dtype != torch.int64 or places.ndim != 1 or len(places) > self.classes:
            raise ReplyRefusedError(f"places {places.dtype} {tuple(places.shape)}, expected at most {self.classes}")

    def _resolve(self, places: Ints, order: list[tuple[int, int]]) -> Ints | None:
        """Placeholders, from what the client answered about ciphertexts in shuffled order."""
        placeholder_at = {place: placeholder for placeholder, place in enumerate(self.places)}
        found = np.full(len(places), -1, dtype=np.int64)
        for label, place in enumerate(places.tolist()):
            if place == -1:
                continue
            number, column = divmod(place, self.grid.width)
            if not 0 <= number < len(order):
                return None
            sheet, page = order[number]
            placeholder = placeholder_at.get(page * self.grid.width + column)
            if placeholder is None or sheet != label // self.grid.rows:
                return None
            found[label] = placeholder
        return found


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

        def check(reply: SealedPairs) -> None:
            self.public.check_key(reply.key)
            if len(reply.labels) != len(reply.counts) or len(reply.labels) > self.classes:
                raise ReplyRefusedError(f"{len(reply.labels)} labels and {len(reply.counts)} counts")
            for label, count in zip(reply.labels, reply.counts, strict=True):
                self._load(label)
                self.public.counting.load(count, length=1)

        replies = self.ask(dict.fromkeys(clients, SealPairs()), check)
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
                reply = ask_one(self.federation, client, request, self._check_entry)
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

    def _check_entry(self, reply: CompareOneReply) -> None:
        if not -1 <= reply.entry < len(self.entries):
            raise ReplyRefusedError(f"entry {reply.entry} of a list of {len(self.entries)}")
