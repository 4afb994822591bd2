"""Simulated time: which clients answer before the deadline, and how many seconds a round takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from fedstrata.federation.availability import Availability
from fedstrata.federation.messages import ClientId

if TYPE_CHECKING:
    from fedstrata.federation.exchanges import RoundLog


class Clock:
    """A clock that simulates how long each exchange of requests and replies takes.

    Args:
        availability: The availability model, which simulates how fast clients compute, send and receive.
        seed: The experiment's seed.
    """

    def __init__(self, availability: Availability, seed: int) -> None:
        self._availability, self._seed = availability, seed
        self._seconds: dict[ClientId, float] = {}
        """The simulated seconds that each client has used in the current exchange; empty between exchanges."""

    def start(self, work: Mapping[ClientId, float], sizes: Mapping[ClientId, int], log: RoundLog) -> list[ClientId]:
        """Begin an exchange, and return the clients that receive the request and finish their work before the deadline.

        Args:
            work: Number of per-sample gradients that each client computes.
            sizes: Size of each client's request in bytes.
            log: The round's log, which records the late clients.
        """
        availability, clients = self._availability, list(work)
        asked = np.array(clients, dtype=np.int64)
        seconds = availability.seconds(asked, np.array(list(work.values()), dtype=np.float64), self._seed)
        if availability.network:
            down = availability.bandwidth_down
            seconds = seconds + [availability.transfer(sizes[client], down) for client in clients]
        late = seconds > (math.inf if availability.deadline is None else availability.deadline)
        log.miss_deadline(asked[late].tolist())
        self._seconds = dict(zip(clients, seconds.tolist(), strict=True))
        if not availability.network or late.all():
            self.pass_time(log)
        # Leave out late clients, because their answers would be discarded. They do not train, and keep their states.
        in_time: list[ClientId] = asked[~late].tolist()
        return in_time

    def arrive(self, sizes: Mapping[ClientId, int], log: RoundLog) -> list[ClientId]:
        """Add the time that clients need to send replies, and return the clients whose replies arrive too late.

        Args:
            sizes: Size of each client's reply in bytes.
            log: The round's log, which records the late clients.
        """
        availability = self._availability
        if not self._seconds or not availability.network:
            return []
        for client, size in sizes.items():
            self._seconds[client] += availability.transfer(size, availability.bandwidth_up)
        deadline = math.inf if availability.deadline is None else availability.deadline
        late = [client for client in sizes if self._seconds[client] > deadline]
        log.miss_deadline(late)
        self.pass_time(log)
        return late

    def pass_time(self, log: RoundLog) -> None:
        """End the exchange: add the time of the slowest client (at most the deadline) to the round's log."""
        if self._seconds:
            last, deadline = max(self._seconds.values()), self._availability.deadline
            log.simulated_seconds += last if deadline is None else min(last, deadline)
            self._seconds = {}
