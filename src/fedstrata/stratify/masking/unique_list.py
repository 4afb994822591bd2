"""The unique list under encryption, at the server: which clients share a label (Stratify §IV-A).

Client after client until the list is complete, then everybody else against the complete list. The module
``ckks_packed`` beside this one says how labels are compared. The server holds public keys only: it learns what clients
answer, which is where zeros are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import ClientId, Request, Requests
from fedstrata.federation.reply_checks import Check
from fedstrata.stratify.masking.messages import SealedLabels
from fedstrata.stratify.masking.public_keys import Public, ask_one

Ints = NDArray[np.int64]

TOGETHER = 8
"""So many clients' ciphertexts are held at a time."""


class UniqueList(ABC):
    """Placeholders in the order in which their labels were discovered.

    Args:
        federation: To ask clients, and for the number of classes, at which the list is complete.
        public: The clients' public keys.
    """

    def __init__(self, federation: Federation, public: Public) -> None:
        self.federation, self.public = federation, public
        self.classes = federation.config.classes

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def sealed(self, clients: Sequence[ClientId]) -> dict[ClientId, SealedLabels]:
        """Encrypted labels."""

    @abstractmethod
    def match(self, clients: dict[ClientId, SealedLabels]) -> dict[ClientId, Ints]:
        """The placeholder of each of the clients' labels; −1 for those that are not on the list."""

    @abstractmethod
    def enlist(self, client: ClientId, sealed: SealedLabels, labels: Ints) -> bool:
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
        self.federation.log.failed.add(client)
        self.federation.note("refused", [client], f"client {client} in round {self.federation.round}: {defect}")

    def ask(
        self,
        clients: Collection[ClientId],
        request: Request | Mapping[ClientId, Request],
        *,
        check: Check | None = None,
    ) -> dict[ClientId, Any]:
        """One exchange; a single client that raises an exception is a client that does not answer."""
        if len(clients) == 1:
            ((client, own),) = Requests.of(clients, request).items()
            reply = ask_one(self.federation, client, own, check=check)
            return {} if reply is None else {client: reply}
        return self.federation.ask(clients, request, check=check)
