"""Record, for each label, which clients the server can still ask for samples in an epoch."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstrata.base.arrays import Ints
from fedstrata.federation.federation import Federation
from fedstrata.stratify.messages import ALL
from fedstrata.stratify.schedule import Holders


class Roster:
    """The clients that can be asked in an epoch, and, for each label, the clients with unused samples.

    - A *placeholder* is a number that stands for a label. The *holders* of a placeholder are the clients that have
      samples of its label.

    - A placeholder's *place* is its index in ``holders.placeholders``.

    - A *row* is the index of a pair (placeholder, holder). There are R pairs, in the order of ``holders.clients``.

    - A client's *pool* of a placeholder contains the client's samples of this label that are not used yet in the epoch.
      A *refill* makes all samples of the label usable again.

    Args:
        federation: The federation, which knows the available clients and records events.
        holders: The clients with samples of each placeholder's label.
        weighted: True to draw clients in proportion to their numbers of samples; False for uniform draws.
        window: The range of samples that a client may use: two fractions (from, to) in [0, 1]. The client's samples of
            each label are sorted by their time of arrival.
    """

    def __init__(
        self, federation: Federation, holders: Holders, *, weighted: bool = False, window: tuple[float, float] = ALL
    ) -> None:
        self.federation, self.holders, self.weighted, self.window = federation, holders, weighted, window
        self.generator = federation.rng("client-sampling")
        self.rows = [slice(begin, end) for begin, end in pairwise(holders.offsets.tolist())]
        """For each placeholder, the rows (indices of pairs) of its holders; see ``holders.offsets``."""
        self.places: Ints = np.repeat(np.arange(len(holders.placeholders)), np.diff(holders.offsets))
        """For each pair (placeholder, holder): the index of the placeholder in ``holders.placeholders``, shape (R,)."""
        # ``candidates`` leaves out clients whose absence was announced. Other absences become known only when a client
        # is asked.
        self.present = np.isin(holders.clients, federation.candidates())
        """For each pair (placeholder, holder): whether the client is present and has samples of the label, used or not,
        shape (R,)."""
        self.available = self.present.copy()
        """For each pair (placeholder, holder): whether the client is present and has samples of the label that are not
        used yet, shape (R,)."""
        self.answered: set[int] = set()
        """The clients that replied to a request in this epoch."""
        self.refills: dict[int, set[int]] = {}
        """A mapping from each client to labels, given as indices into ``holders.placeholders``.

        From its next request on, the client may use all its samples of these labels again.
        """
        self._by_client = np.argsort(holders.clients, kind="stable")
        self._begins = np.searchsorted(holders.clients[self._by_client], np.arange(federation.config.clients + 1))

    def empty_rows(self, client: int, missing: Ints, exhausted: Tensor) -> Ints:
        """Return the rows (pairs of a label and ``client``) that have no unused samples according to a reply.

        Args:
            client: The client that replied.
            missing: The labels for which the client had no sample, as indices into ``holders.placeholders``.
            exhausted: The client replied that it has no unused samples of these labels (given as placeholders).
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
        """From the next request on, make all samples of a label usable again, for those holders that are present.

        Args:
            place: The index of the label's placeholder in ``holders.placeholders``.
            positions: The number of positions of the schedule that need a sample of the label. This number is recorded
                in an event if no holder is present.

        Returns:
            True if at least one client with samples of the label is present.
        """
        rows = self.rows[place]
        clients = self.holders.clients[rows][self.present[rows]].tolist()
        if not clients:
            reason = f"{positions} positions of placeholder {place}: no client with this label is present"
            self.federation.note("label skipped", reason=reason)
            return False
        self.available[rows] = self.present[rows]
        for client in clients:
            self.refills.setdefault(client, set()).add(place)
        return True

    def request(self, client: int, places: Ints, refill: Iterable[int]) -> dict[str, Any]:
        """Return the fields that ``Reserve`` and ``Steps`` requests have in common, as a mapping from names to values.

        Args:
            client: The client to ask.
            places: The label of each requested sample, as an index into ``holders.placeholders``.
            refill: The labels to refill: the client may use all its samples of these labels, even samples already used.
                The labels are indices into ``holders.placeholders``.
        """
        numbers = self.holders.placeholders
        return {
            "round": self.federation.round,
            "labels": torch.from_numpy(numbers[places]),
            "refill": torch.from_numpy(numbers[np.array(sorted(refill), dtype=np.int64)]),
            "fresh": client not in self.answered,
            "window": self.window,
        }
