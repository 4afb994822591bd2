"""The unique list of mode ``ckks``: all labels of a client in a few ciphertexts, and scrambled differences.

The layout of labels and the scrambling are described in ``fedstrata.stratify.masking.slot_layout``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from typing_extensions import override

from fedstrata.base.arrays import Ints
from fedstrata.base.records import record
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import ClientId
from fedstrata.stratify.masking.ckks import COMPARING, Cipher
from fedstrata.stratify.masking.messages import (
    Compare,
    Enlist,
    PublicKeys,
    SealedLabels,
    SealLabels,
)
from fedstrata.stratify.masking.public_keys import Public, ask_one
from fedstrata.stratify.masking.slot_layout import SlotLayout, shuffled
from fedstrata.stratify.masking.unique_list import UniqueList


@record("PackedRegister")
class PackedRegister:
    """A packed list, for clients that join later.

    Args:
        keys: The public keys.
        pages: The encrypted list.
        places: The place of every placeholder, page times width plus column, shape (P,).
    """

    keys: PublicKeys
    pages: dict[int, bytes]
    places: Ints


class PackedList(UniqueList):
    """The unique list of mode ``ckks``: one subtraction compares many labels, and clients decrypt zeros or noise."""

    def __init__(self, federation: Federation, public: Public, register: PackedRegister | None = None) -> None:
        super().__init__(federation, public)
        self.grid = SlotLayout(self.classes)
        self.sealer = public.comparing
        stored = register.pages if register else {}
        self.pages: dict[int, Cipher] = {page: self._load(data) for page, data in stored.items()}
        self.places = register.places.tolist() if register else []
        # Entries are in random columns, so that the column of a match does not tell which client added the label.
        taken = set(self.places)
        self._free = [place for place in shuffled(self.classes).tolist() if place not in taken]

    def __len__(self) -> int:
        return len(self.places)

    def register(self) -> PackedRegister:
        """Return the list as a record."""
        pages = {page: cipher.serialize() for page, cipher in self.pages.items()}
        return PackedRegister(self.public.keys, pages, np.array(self.places, dtype=np.int64))

    @override
    def sealed(self, clients: Sequence[ClientId]) -> dict[ClientId, SealedLabels]:
        return self.ask(clients, SealLabels(self.classes), check=self.public.check_labels)

    @override
    def match(self, clients: dict[ClientId, SealedLabels]) -> dict[ClientId, Ints]:
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
        for client, reply in self.ask(requests, requests).items():
            placeholders = self._resolve(reply.places.numpy(), order[client])
            if placeholders is None or self.grid.sheets(len(placeholders)) != len(clients[client].sheets):
                self.refuse(client, "a match where the list has no entry, or another number of labels than it sent")
            else:
                held[client] = placeholders
        return held

    @override
    def enlist(self, client: ClientId, sealed: SealedLabels, labels: Ints) -> bool:
        places = self._free[: len(labels)]
        request = Enlist(self.classes, torch.from_numpy(labels), torch.tensor(places, dtype=torch.int64))
        reply = ask_one(self.federation, client, request, check=self.public.check_labels)
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
        return product.serialize()

    def _resolve(self, places: Ints, order: list[tuple[int, int]]) -> Ints | None:
        """Return the placeholders for a client's answer about shuffled ciphertexts; None for an impossible answer."""
        placeholder_at = {place: placeholder for placeholder, place in enumerate(self.places)}
        placeholders = np.full(len(places), -1, dtype=np.int64)
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
            placeholders[label] = placeholder
        return placeholders
