"""Simulated time: who has an answer ready before the deadline."""

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
    """The simulated time of one exchange after another.

    Args:
        availability: How fast clients work, send and receive.
        seed: The experiment's.
    """

    def __init__(self, availability: Availability, seed: int) -> None:
        self._availability, self._seed = availability, seed
        self._seconds: dict[ClientId, float] = {}
        """Seconds since the exchange began, by client; empty while no exchange is timed."""

    def start(self, work: Mapping[ClientId, float], sizes: Mapping[ClientId, int], log: RoundLog) -> list[ClientId]:
        """Return the clients that have the request and have done its work before the deadline.

        Args:
            work: Sample-gradients of each client.
            sizes: Bytes of each client's request.
            log: Records who is late.
        """
        availability, clients = self._availability, list(work)
        asked = np.array(clients, dtype=np.int64)
        seconds = availability.seconds(asked, np.array(list(work.values()), dtype=np.float64), self._seed)
        if availability.network:
            down = availability.bandwidth_down
            seconds = seconds + [availability.transfer(sizes[client], down) for client in clients]
        late = seconds > (math.inf if availability.deadline is None else availability.deadline)
        # A client that is too late is not simulated: its work would be thrown away, and its state stays as it was.
        log.miss_deadline(asked[late].tolist())
        self._seconds = dict(zip(clients, seconds.tolist(), strict=True))
        if not availability.network or late.all():
            self.pass_time(log)
        in_time: list[ClientId] = asked[~late].tolist()
        return in_time

    def arrive(self, sizes: Mapping[ClientId, int], log: RoundLog) -> list[ClientId]:
        """Let answers of so many bytes travel; return the clients whose answers come too late."""
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
        """Add the seconds until the last client of the exchange is done, or until the deadline."""
        if self._seconds:
            last, deadline = max(self._seconds.values()), self._availability.deadline
            log.simulated_seconds += last if deadline is None else min(last, deadline)
            self._seconds = {}
