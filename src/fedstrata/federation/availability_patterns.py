"""Availability that changes over time: random online and offline periods, cycles, and the time of day."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, model_validator

from fedstrata.base.errors import SpecError
from fedstrata.base.rng import uniforms
from fedstrata.federation.availability import Availability, Clients

Floats = NDArray[np.float64]


class Markov(Availability):
    """Each client alternates between online and offline periods of random lengths.

    In each round, including the first, a client is online with probability ``online_rounds / (online_rounds +
    offline_rounds)``.

    Args:
        online_rounds: Mean number of rounds that a client stays online.
        offline_rounds: Mean number of rounds that a client stays offline.
    """

    online_rounds: float = Field(default=10.0, ge=1)
    offline_rounds: float = Field(default=10.0, ge=1)

    def online(self, clients: Clients, round: int, seed: int) -> NDArray[np.bool_]:
        """Return, for each client, whether the client's Markov chain is in the online state in the round."""
        p = self.online_rounds / (self.online_rounds + self.offline_rounds)
        return in_spells(np.full(len(clients), p), self.offline_rounds, clients, round, seed)


class Cyclic(Availability):
    """Each client is online for a fixed fraction of each period. Each client's periods start at a random round.

    Args:
        p: Online time of a client per period, as a fraction of the period (at least one round).
        period: Length of a period, in rounds.
    """

    p: float = Field(default=0.5, gt=0, le=1)
    period: PositiveInt = 100

    def online(self, clients: Clients, round: int, seed: int) -> NDArray[np.bool_]:
        """Return, for each client, whether the round is in the online part of the client's period."""
        return in_cycles(np.full(len(clients), self.p), self.period, clients, round, seed)


class Diurnal(Availability):
    """The probability that a client is online follows a sine wave over the day.

    Args:
        lowest: Lowest probability that a client is online.
        highest: Highest probability that a client is online.
        period: Length of a day, in rounds.
        spread: Range of the clients' random time zones, as a fraction of a day.
    """

    lowest: float = Field(default=0.1, ge=0, le=1)
    highest: float = Field(default=0.9, ge=0, le=1)
    period: float = Field(default=24.0, ge=1)
    spread: float = Field(default=1.0, ge=0, le=1)

    @model_validator(mode="after")
    def _is_ordered(self) -> Diurnal:
        if self.highest < self.lowest:
            problem = (
                f"is less than availability.lowest, which is {self.lowest:g}. Use a larger value, or a smaller "
                "availability.lowest."
            )
            raise SpecError("highest", problem, self.highest)
        return self

    def online(self, clients: Clients, round: int, seed: int) -> NDArray[np.bool_]:
        """Choose at random whether each client is online. The probability depends on the client's time of day."""
        day = (round - 1) / self.period + self.spread * uniforms(seed, "zone", 0, clients)
        p = self.lowest + (self.highest - self.lowest) * (1 + np.sin(2 * math.pi * day)) / 2
        return uniforms(seed, "online", round, clients) < p


def in_spells(p: Floats, offline_rounds: float, clients: Clients, round: int, seed: int) -> NDArray[np.bool_]:
    """Return, for each client, whether the client's Markov chain (stationary from round 1) is in the online state.

    In each round, an offline client goes online with probability 1 / ``offline_rounds`` (FedAU, arXiv:2306.03401), or
    with p / (1 − p) if this is smaller. The mean online period is therefore at least one round long. The function
    stores no state. Each call computes a client's states again. The computation begins with the latest round whose
    state did not depend on the state of the previous round.

    Args:
        p: The probability that each client is online in a round, shape (n,).
        offline_rounds: Mean number of rounds that a client stays offline.
        clients: The clients, shape (n,).
        round: The round, counted from 1.
        seed: The experiment's seed.
    """
    with np.errstate(divide="ignore", over="ignore"):
        odds = p / (1 - p)
        goes_online = np.minimum(1 / offline_rounds, odds)
        stays_online = 1 - np.minimum(1, 1 / (offline_rounds * odds))
    low, high = np.minimum(goes_online, stays_online), np.maximum(goes_online, stays_online)
    flips = goes_online > stays_online
    online, rest = np.zeros(len(clients), dtype=bool), np.arange(len(clients))
    for t in range(round, 0, -1):
        draws = uniforms(seed, "online", t, clients[rest])
        below, above = (low[rest], high[rest]) if t > 1 else (p[rest], p[rest])
        online[rest] ^= draws < below
        undecided = (draws >= below) & (draws < above)
        rest = rest[undecided]
        online[rest] ^= flips[rest]
        if not len(rest):
            break
    return online


def in_cycles(p: Floats, period: int, clients: Clients, round: int, seed: int) -> NDArray[np.bool_]:
    """Return, for each client, whether a round is in the online part of the client's period.

    Args:
        p: Each client's online time per period, as a fraction of the period, shape (n,).
        period: Length of a period, in rounds.
        clients: The clients, shape (n,).
        round: The round, counted from 1.
        seed: The experiment's seed.
    """
    start = np.floor(uniforms(seed, "offset", 0, clients) * period)
    return (round - 1 + start) % period < np.maximum(1, np.rint(p * period))
