"""The unique list: an encrypted list of all labels, with which the server finds equal labels (Stratify §IV-A).

The server compares the clients' labels with the list, one client after another, and adds new labels to the list. When
the list has all classes, the server compares the labels of all remaining clients at once. For a comparison, the server
subtracts ciphertexts and scrambles the differences. The client decrypts the differences, and reports which of them are
zero. A zero means that two labels are equal. All other differences look random
(``fedstrata.stratify.masking.slot_layout``). The server has only public keys, and cannot decrypt labels.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedstrata.base.arrays import Ints
from fedstrata.base.records import record
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import ClientId, Request, Requests
from fedstrata.federation.reply_checks import Check
from fedstrata.stratify.masking.ckks import COMPARING, Cipher
from fedstrata.stratify.masking.messages import Compare, Enlist, PublicKeys, SealedLabels, SealLabels
from fedstrata.stratify.masking.public_keys import Public, ask_one
from fedstrata.stratify.masking.slot_layout import SlotLayout, shuffled

TOGETHER = 8
"""The number of clients whose ciphertexts are in memory at the same time."""


@record("PackedRegister")
class PackedRegister:
    """The encrypted list of all labels, which the server stores for clients that join later (masking ``ckks``).

    The list is divided into *pages*. A page is one ciphertext with a fixed number of entries: the *width* of the page.

    Args:
        keys: The clients' public keys.
        pages: A mapping from the index of each page to its ciphertext.
        places: For each placeholder (a number that stands for a label), the index of its entry in the list, shape
            (P,). Entries are numbered consecutively over all pages.
    """

    keys: PublicKeys
    pages: dict[int, bytes]
    places: Ints


class UniqueList:
    """The encrypted list of all distinct labels. The server compares the clients' labels with this list.

    The *placeholder* of a label is a number that stands for the label. The first label on the list has the placeholder
    0, the second label has the placeholder 1, and so on.

    Args:
        federation: The federation, through which the server sends requests. The list is complete when it has as many
            labels as the federation has classes.
        public: The clients' public keys.
        register: The list of an earlier enrolment; None for a new list.
    """

    def __init__(self, federation: Federation, public: Public, register: PackedRegister | None = None) -> None:
        self.federation, self.public = federation, public
        self.classes = federation.config.strata
        self.grid = SlotLayout(self.classes)
        self.sealer = public.comparing
        stored = register.pages if register else {}
        self.pages: dict[int, Cipher] = {page: self._load(data) for page, data in stored.items()}
        self.places = register.places.tolist() if register else []
        # A new label gets a random free entry, so that clients cannot tell from the entry which client added the label.
        taken = set(self.places)
        self._free = [place for place in shuffled(self.classes).tolist() if place not in taken]

    def __len__(self) -> int:
        return len(self.places)

    def register(self) -> PackedRegister:
        """Return the list as a record, which the server needs when clients join later."""
        pages = {page: cipher.serialize() for page, cipher in self.pages.items()}
        return PackedRegister(self.public.keys, pages, np.array(self.places, dtype=np.int64))

    def sealed(self, clients: Sequence[ClientId]) -> dict[ClientId, SealedLabels]:
        """Ask clients for their encrypted labels, and return a mapping from each client to its reply."""
        return self.ask(clients, SealLabels(self.classes), check=self.public.check_labels)

    def match(self, clients: dict[ClientId, SealedLabels]) -> dict[ClientId, Ints]:
        """Compare the encrypted labels of clients with the list.

        Args:
            clients: A mapping from each client to its encrypted labels.

        Returns:
            A mapping from each client to the placeholders of its labels (the numbers that stand for the labels). The
            value −1 means that a label is not on the list. Clients without a reply, or with an impossible reply,
            are not in the mapping.
        """
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
                self.refuse(client, "the reply names an empty entry of the label list, or too many or too few labels")
            else:
                held[client] = placeholders
        return held

    def enlist(self, client: ClientId, sealed: SealedLabels, labels: Ints) -> bool:
        """Let a client add labels to the list.

        Args:
            client: The client.
            sealed: The client's encrypted labels.
            labels: The indices of the new labels among the client's labels.

        Returns:
            True if the client replied.
        """
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

    def discover(self, clients: Sequence[ClientId]) -> tuple[dict[ClientId, Ints], Sequence[ClientId]]:
        """Compare labels with the list, one client after another, and add new labels until the list is complete.

        Returns:
            Two values: the placeholders (the numbers that stand for labels) of each client that replied, and the
            clients that were not asked.
        """
        held: dict[ClientId, Ints] = {}
        for position, client in enumerate(clients):
            if len(self) >= self.classes:
                return held, clients[position:]
            sealed = self.sealed([client])
            placeholders = self.match(sealed).get(client)
            if placeholders is None or not self._fits(client, placeholders, self.classes - len(self)):
                continue
            new, number = np.flatnonzero(placeholders < 0), len(self)
            if len(new) and not self.enlist(client, sealed[client], new):
                continue
            placeholders[new] = np.arange(number, number + len(new))
            held[client] = placeholders
        return held, ()

    def locate(self, clients: Sequence[ClientId]) -> dict[ClientId, Ints]:
        """Return each client's placeholders. Refuse clients with labels that are not on the list.

        The list must be complete.
        """
        held: dict[ClientId, Ints] = {}
        for begin in range(0, len(clients), TOGETHER):
            matched = self.match(self.sealed(clients[begin : begin + TOGETHER]))
            held |= {client: labels for client, labels in matched.items() if self._fits(client, labels, 0)}
        return held

    def _fits(self, client: ClientId, placeholders: Ints, room: int) -> bool:
        """Return True if a client's reply is possible. Otherwise, count the client as failed and return False.

        Args:
            client: The client.
            placeholders: The number that stands for each of the client's labels; −1 for labels that are not on the
                list.
            room: The number of labels that can still be added to the list.
        """
        known = placeholders[placeholders >= 0]
        new = len(placeholders) - len(known)
        defect = ""
        if new > room:
            defect = f"{new} of the client's labels are not on the list of labels, which has room for only {room} more"
        elif len(np.unique(known)) != len(known):
            defect = "two of the client's labels match the same entry of the list"
        if defect:
            self.refuse(client, defect)
        return not defect

    def refuse(self, client: ClientId, defect: str) -> None:
        """Count a client as failed, and record an event with the reason ``defect``."""
        self.federation.log.failed.add(client)
        self.federation.note("refused", [client], f"client {client} in round {self.federation.round}: {defect}")

    def ask(
        self,
        clients: Collection[ClientId],
        request: Request | Mapping[ClientId, Request],
        *,
        check: Check | None = None,
    ) -> dict[ClientId, Any]:
        """Send requests to clients, and return all replies.

        If only one client is asked and raises an exception, the exception is treated as a missing reply.
        """
        if len(clients) == 1:
            ((client, single),) = Requests.of(clients, request).items()
            reply = ask_one(self.federation, client, single, check=check)
            return {} if reply is None else {client: reply}
        return self.federation.ask(clients, request, check=check)

    def _load(self, data: bytes) -> Cipher:
        return self.sealer.load(data, length=COMPARING.slots)

    def _scramble(self, sheet: Cipher, page: Cipher) -> bytes:
        factors, mask = self.grid.blind()
        product = (sheet - page) * factors.tolist() + self.sealer.seal(mask, product=True)
        return product.serialize()  # type: ignore[no-any-return]

    def _resolve(self, places: Ints, order: list[tuple[int, int]]) -> Ints | None:
        """From a client's reply to ``Compare``, find which entries of the list equal the client's labels.

        Args:
            places: For each label of the client, the position of a zero difference, or −1; see ``CompareReply``.
            order: For each ciphertext of the request, the indices of the two compared ciphertexts: the client's (sheet)
                and the list's (page).

        Returns:
            The placeholder of each label (the number that stands for the label), or −1 if the label is not on the list.
            None if the reply is impossible.
        """
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
