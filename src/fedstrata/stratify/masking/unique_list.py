"""The unique list under encryption, at the server: which clients share a label (Stratify §IV-A).

Clients are compared with the list one after another until it is complete, then all others with the complete list.
``ckks_packed`` implements the comparison. The server holds public keys only: it learns the clients' answers, which are
the places of zeros.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from fedstrata.base.arrays import Ints
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import ClientId, Request, Requests
from fedstrata.federation.reply_checks import Check
from fedstrata.stratify.masking.messages import SealedLabels
from fedstrata.stratify.masking.public_keys import Public, ask_one

TOGETHER = 8
"""The number of clients whose ciphertexts are held at a time."""


class UniqueList(ABC):
    """The placeholders in the order in which their labels were discovered.

    Args:
        federation: The federation, to ask clients, and for the number of classes, at which the list is complete.
        public: The clients' public keys.
    """

    def __init__(self, federation: Federation, public: Public) -> None:
        self.federation, self.public = federation, public
        self.classes = federation.config.classes

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def sealed(self, clients: Sequence[ClientId]) -> dict[ClientId, SealedLabels]:
        """Ask clients for their encrypted labels."""

    @abstractmethod
    def match(self, clients: dict[ClientId, SealedLabels]) -> dict[ClientId, Ints]:
        """Return the placeholder of each of the clients' labels; −1 for a label that is not on the list."""

    @abstractmethod
    def enlist(self, client: ClientId, sealed: SealedLabels, labels: Ints) -> bool:
        """Add a client's labels to the list; return whether it succeeded."""

    def discover(self, clients: Sequence[ClientId]) -> tuple[dict[ClientId, Ints], Sequence[ClientId]]:
        """Ask clients one after another until the list is complete.

        Returns:
            The placeholders of the clients that answered, and the clients that were not asked.
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
        """Return the placeholders of clients whose labels must all be on the list."""
        held: dict[ClientId, Ints] = {}
        for begin in range(0, len(clients), TOGETHER):
            matched = self.match(self.sealed(clients[begin : begin + TOGETHER]))
            held |= {client: labels for client, labels in matched.items() if self._fits(client, labels, 0)}
        return held

    def _fits(self, client: ClientId, placeholders: Ints, room: int) -> bool:
        """Return whether a client's answer is possible; refuse the client if not."""
        known = placeholders[placeholders >= 0]
        new = len(placeholders) - len(known)
        defect = ""
        if new > room:
            defect = f"{new} labels that are not on the list, which has room for {room} of {self.classes}"
        elif len(np.unique(known)) != len(known):
            defect = "two labels that are the same entry of the list"
        if defect:
            self.refuse(client, defect)
        return not defect

    def refuse(self, client: ClientId, defect: str) -> None:
        """Exclude a client, with an event."""
        self.federation.log.failed.add(client)
        self.federation.note("refused", [client], f"client {client} in round {self.federation.round}: {defect}")

    def ask(
        self,
        clients: Collection[ClientId],
        request: Request | Mapping[ClientId, Request],
        *,
        check: Check | None = None,
    ) -> dict[ClientId, Any]:
        """Ask clients; an exception of a single client counts as no answer."""
        if len(clients) == 1:
            ((client, single),) = Requests.of(clients, request).items()
            reply = ask_one(self.federation, client, single, check=check)
            return {} if reply is None else {client: reply}
        return self.federation.ask(clients, request, check=check)
