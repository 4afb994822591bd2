"""The clients that can still be asked for samples of each label in an epoch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstrata.base.arrays import Ints
from fedstrata.federation.federation import Federation
from fedstrata.stratify.messages import ALL
from fedstrata.stratify.schedule import Holders


class Roster:
    """The state of an epoch: which holders of each placeholder are present, and which have unused samples of it.

    A *placeholder* stands for a label, and its *holders* are the clients with samples of that label. A *row* is a pair
    of a placeholder and one of its holders. There are R rows, in the order of the arrays in ``holders``. The *place* of
    a placeholder is its index in ``holders.placeholders``.

    Args:
        federation: The federation; it tells which clients are available, and records events.
        holders: The clients that hold each placeholder.
        weighted: Whether clients are drawn in proportion to their number of samples, instead of uniformly.
        window: The part of each label's samples that has arrived; see ``Reserve``.
    """

    def __init__(
        self, federation: Federation, holders: Holders, *, weighted: bool = False, window: tuple[float, float] = ALL
    ) -> None:
        self.federation, self.holders, self.weighted, self.window = federation, holders, weighted, window
        self.generator = federation.rng("client-sampling")
        self.places: Ints = np.repeat(np.arange(len(holders.placeholders)), np.diff(holders.offsets))
        """The place of each row's placeholder, shape (R,)."""
        # Absences that were announced are known now. Other absences show only when the client is asked.
        self.present = np.isin(holders.clients, federation.candidates())
        """True for rows whose client is there and has samples of the placeholder, used or not, shape (R,)."""
        self.available = self.present.copy()
        """True for rows whose client is there and has unused samples of the placeholder, shape (R,)."""
        self.answered: set[int] = set()
        """The clients that answered a request of this epoch."""
        self.refills: dict[int, set[int]] = {}
        """A mapping from client to the places of the placeholders whose pools it must refill at its next request."""
        self._by_client = np.argsort(holders.clients, kind="stable")
        self._begins = np.searchsorted(holders.clients[self._by_client], np.arange(federation.config.clients + 1))

    def rows_of(self, place: int) -> slice:
        """Return the rows of the placeholder at ``place``."""
        return slice(self.holders.offsets[place], self.holders.offsets[place + 1])

    def empty_rows(self, client: int, missing: Ints, exhausted: Tensor) -> Ints:
        """Return the rows of a client whose pools are empty according to its reply.

        Args:
            client: The client.
            missing: The places of the placeholders for which the client had no sample.
            exhausted: The placeholders (not places) whose pools the client reports as empty.
        """
        rows: Ints = self._by_client[self._begins[client] : self._begins[client + 1]]
        places = self.places[rows]
        numbers = self.holders.placeholders[places]
        empty: Ints = rows[np.isin(places, missing) | np.isin(numbers, exhausted.numpy())]
        return empty

    def remove(self, clients: Iterable[int]) -> None:
        """Remove clients that failed or are absent, so that they are not chosen again in this epoch."""
        for client in clients:
            rows = self._by_client[self._begins[client] : self._begins[client + 1]]
            self.available[rows] = self.present[rows] = False

    def refill(self, place: int, positions: int) -> bool:
        """Let each holder of a placeholder that is present refill its pool when it gets its next request.

        Args:
            place: The placeholder's place.
            positions: The number of positions that need a sample of it; an event reports it if no holder is present.

        Returns:
            True if a holder is present.
        """
        rows = self.rows_of(place)
        clients = self.holders.clients[rows][self.present[rows]].tolist()
        if not clients:
            reason = f"{positions} positions of placeholder {place}: no holder is there"
            self.federation.note("label skipped", reason=reason)
            return False
        self.available[rows] = self.present[rows]
        for client in clients:
            self.refills.setdefault(client, set()).add(place)
        return True

    def request(self, client: int, places: Ints, refill: Iterable[int]) -> dict[str, Any]:
        """Return the fields of a request that ``Reserve`` and ``Steps`` have in common, as a mapping from their names.

        Args:
            client: The client to ask.
            places: The place of the placeholder that is wanted at each position.
            refill: The places of the placeholders whose pools are to be refilled.
        """
        numbers = self.holders.placeholders
        return {
            "round": self.federation.round,
            "labels": torch.from_numpy(numbers[places]),
            "refill": torch.from_numpy(numbers[np.array(sorted(refill), dtype=np.int64)]),
            "fresh": client not in self.answered,
            "window": self.window,
        }
