"""The clients that can be asked for samples of each label in an epoch."""

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
    """The holders of each placeholder, and those that have unused samples of it.

    A row is a pair of a placeholder and one of its holders, in the order of ``holders``; R rows in all.

    Args:
        federation: The federation, for its availability and its events.
        holders: Which clients hold which placeholder.
        weighted: Whether clients are drawn by their number of samples, not uniformly.
        window: The part of each label's samples that has arrived; see ``Reserve``.
    """

    def __init__(
        self, federation: Federation, holders: Holders, *, weighted: bool = False, window: tuple[float, float] = ALL
    ) -> None:
        self.federation, self.holders, self.weighted, self.window = federation, holders, weighted, window
        self.generator = federation.rng("client-sampling")
        self.places: Ints = np.repeat(np.arange(len(holders.placeholders)), np.diff(holders.offsets))
        """The place of the placeholder of each row, (R,)."""
        # Announced absences are known in advance; all others show only when the client is asked.
        self.present = np.isin(holders.clients, federation.candidates())
        """Rows whose client can serve the placeholder again after a refill, (R,)."""
        self.available = self.present.copy()
        """Rows whose client has unused samples of the placeholder, (R,)."""
        self.answered: set[int] = set()
        """Clients that answered a request of this epoch."""
        self.refills: dict[int, set[int]] = {}
        """By client, the placeholders whose pools it refills with its next request."""
        self._by_client = np.argsort(holders.clients, kind="stable")
        self._begins = np.searchsorted(holders.clients[self._by_client], np.arange(federation.config.clients + 1))

    def rows_of(self, place: int) -> slice:
        """Return the rows of a placeholder."""
        return slice(self.holders.offsets[place], self.holders.offsets[place + 1])

    def empty_rows(self, client: int, missing: Ints, exhausted: Tensor) -> Ints:
        """Return the rows of a client whose pools are empty according to its reply.

        Args:
            client: The client.
            missing: Places of the placeholders for which it had no sample.
            exhausted: Placeholders that it reports as exhausted.
        """
        rows: Ints = self._by_client[self._begins[client] : self._begins[client + 1]]
        places = self.places[rows]
        numbers = self.holders.placeholders[places]
        empty: Ints = rows[np.isin(places, missing) | np.isin(numbers, exhausted.numpy())]
        return empty

    def remove(self, clients: Iterable[int]) -> None:
        """Do not choose these clients again in this epoch: they failed or are absent."""
        for client in clients:
            rows = self._by_client[self._begins[client] : self._begins[client + 1]]
            self.available[rows] = self.present[rows] = False

    def refill(self, place: int, positions: int) -> bool:
        """Let every holder of a placeholder start its pool again.

        Args:
            place: The placeholder's place.
            positions: How many positions need it; for the event if it has no holder left.

        Returns:
            Whether there is a holder.
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
        """Return the fields that ``Reserve`` and ``Steps`` have in common.

        Args:
            client: The client to ask.
            places: The place of the placeholder wanted at each position.
            refill: Places of the placeholders to refill.
        """
        numbers = self.holders.placeholders
        return {
            "round": self.federation.round,
            "labels": torch.from_numpy(numbers[places]),
            "refill": torch.from_numpy(numbers[np.array(sorted(refill), dtype=np.int64)]),
            "fresh": client not in self.answered,
            "window": self.window,
        }
