"""Who is there, and how fast: models of dropout and stragglers.

A client's fate in a round is a function of (seed, round, client) alone. One client more, or another set of invited
clients, changes nobody else's.
"""

from __future__ import annotations

import csv
import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    field_validator,
    model_validator,
)

from fedstrata.base.config import FromRegistry, Registry, Setting
from fedstrata.base.errors import SpecError
from fedstrata.base.rng import uniforms
from fedstrata.data.partitions import Assignment

Clients = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Population:
    """The clients of a federation, as far as whoever runs it knows them.

    Args:
        clients: N.
        classes: C.
        assignment: Whose the training samples are: known to a simulation, None where sites keep their own.
        y: The label of every training sample.
    """

    clients: int
    classes: int = 0
    assignment: Assignment | None = None
    y: NDArray[np.int64] | None = None

    @property
    def sizes(self) -> NDArray[np.int64] | None:
        """Training samples of each client, (N,); None where they are not known."""
        return None if self.assignment is None else self.assignment.sizes

    @cached_property
    def labels(self) -> NDArray[np.int64] | None:
        """Training samples of each class at each client, (N, C); None where they are not known."""
        if self.assignment is None or self.y is None:
            return None
        return self.assignment.counts(self.y, self.classes)


class Availability(Setting):
    """When clients answer.

    Args:
        announced: Whether the server knows who is online and invites only among them. By default it does not, and
            an invited client that is offline is simply absent.
        deadline: Simulated seconds after which a reply comes too late; none by default.
        seconds_per_sample: What one sample-gradient takes the median client, in simulated seconds.
        speed_spread: Standard deviation of the logarithm of the clients' speeds; 0 makes all alike. A client keeps
            its speed for the whole run.
        bandwidth_up: Megabits that a client sends in a simulated second; transfers take no time unless given.
        bandwidth_down: Megabits that it gets in one.
        latency: Simulated seconds that a message is on its way besides, in each direction.
    """

    announced: bool = False
    deadline: PositiveFloat | None = None
    seconds_per_sample: PositiveFloat = 0.001
    speed_spread: float = Field(default=0.0, ge=0, le=10)
    bandwidth_up: PositiveFloat | None = None
    bandwidth_down: PositiveFloat | None = None
    latency: NonNegativeFloat = 0.0

    @property
    def network(self) -> bool:
        """Whether transfers take time."""
        return self.bandwidth_up is not None or self.bandwidth_down is not None or self.latency > 0

    @property
    def simulates_time(self) -> bool:
        """Whether anything depends on how long clients take."""
        return self.deadline is not None or self.speed_spread > 0 or self.network

    def transfer(self, size: int, bandwidth: float | None) -> float:
        """Simulated seconds in which a message of so many bytes arrives, over so many megabits a second.

        >>> Always(bandwidth_down=10, latency=0.5).transfer(1_250_000, 10)
        1.5
        """
        return self.latency + (0.0 if bandwidth is None else size * 8e-6 / bandwidth)

    def check(self, population: Population) -> None:
        """Raise ``SpecError`` where these settings do not fit the federation.

        Called once before the first round, of a copy that is this run's own: what ``online`` needs to know of the
        clients may be kept in a ``pydantic.PrivateAttr``.

        Args:
            population: The clients, as far as they are known.
        """

    @abstractmethod
    def online(self, clients: Clients, round: int, seed: int) -> NDArray[np.bool_]:
        """Whether each of ``clients`` is there in a round (counted from 1)."""

    def seconds(self, clients: Clients, work: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
        """Simulated seconds that each client takes for ``work`` sample-gradients."""
        median: NDArray[np.float64] = work * self.seconds_per_sample
        if self.speed_spread == 0:
            return median
        normal = NormalDist()
        quantiles = np.clip(uniforms(seed, "speed", 0, clients), 1e-12, 1 - 1e-12)
        slowness = [math.exp(self.speed_spread * normal.inv_cdf(float(u))) for u in quantiles]
        slow: NDArray[np.float64] = median * np.array(slowness)
        return slow


class Always(Availability):
    """Everybody answers, always."""

    def online(self, clients: Clients, round: int, seed: int) -> NDArray[np.bool_]:
        """All of them."""
        return np.ones(len(clients), dtype=bool)


class Bernoulli(Availability):
    """Each client answers with probability ``p``, anew every round (ReBaFL §5.2).

    Args:
        p: Probability of being there.
    """

    p: float = Field(default=0.5, gt=0, le=1)

    def online(self, clients: Clients, round: int, seed: int) -> NDArray[np.bool_]:
        """Independent draws.

        >>> bool(Bernoulli(p=1.0).online(np.arange(5), 1, seed=0).all())
        True
        """
        return uniforms(seed, "online", round, clients) < self.p


class Persistent(Availability):
    """Each client's state is drawn every ``period`` rounds and kept in between (ReBaFL §5.5.3).

    Args:
        p: Probability of being there in a period.
        period: s, in rounds.
    """

    p: float = Field(default=0.5, gt=0, le=1)
    period: PositiveInt = 20

    def online(self, clients: Clients, round: int, seed: int) -> NDArray[np.bool_]:
        """Draws of the period that the round lies in."""
        return uniforms(seed, "online", (round - 1) // self.period, clients) < self.p


class AvailabilityGroup(Setting):
    """A run of consecutive clients with their own probability.

    Args:
        clients: How many.
        p: Probability of being there in a round.
    """

    clients: PositiveInt
    p: float = Field(gt=0, le=1)


class Grouped(Availability):
    """Groups of clients with their own ``p`` each, in the order of the client numbers (ReBaFL, clustered setting).

    Args:
        groups: The groups, such as ``[{clients = 4, p = 0.5}, {clients = 16, p = 0.2}]``; their sizes add up to the
            number of clients.
    """

    groups: list[AvailabilityGroup] = Field(min_length=1)

    def check(self, population: Population) -> None:
        """The groups must cover the clients exactly."""
        total = sum(group.clients for group in self.groups)
        if total != population.clients:
            raise SpecError("groups", f"their sizes add up to {total}; the partition has {population.clients} clients")

    def online(self, clients: Clients, round: int, seed: int) -> NDArray[np.bool_]:
        """Independent draws with the probability of each client's group."""
        ends = np.cumsum([group.clients for group in self.groups])
        p = np.array([group.p for group in self.groups])[np.searchsorted(ends, clients, side="right")]
        return uniforms(seed, "online", round, clients) < p


class Trace(Availability):
    """Who is there is read from a file.

    Args:
        file: A CSV file with the columns ``client,first,last``: the client is there in the rounds first … last
            (counted from 1). A client may have several lines; one without any is never there.
    """

    file: str

    _intervals: dict[int, list[tuple[int, int]]] = PrivateAttr(default_factory=dict)

    @field_validator("file")
    @classmethod
    def _exists(cls, file: str) -> str:
        try:
            there = Path(file).expanduser().is_file()
        except (OSError, RuntimeError):  # longer than a name can be, or in the home of nobody
            there = False
        if not there:
            raise ValueError("no such file; expected a CSV file with the columns client,first,last")
        return file

    @model_validator(mode="after")
    def _read(self) -> Trace:
        try:
            with Path(self.file).expanduser().open(newline="", encoding="utf-8") as lines:
                self._parse(csv.DictReader(lines))
        except (OSError, ValueError, csv.Error) as error:
            raise SpecError("file", f"cannot be read as a trace: {error}", self.file) from None
        return self

    def _parse(self, reader: csv.DictReader[str]) -> None:
        if not {"client", "first", "last"} <= set(reader.fieldnames or ()):
            raise ValueError(f"the columns are {reader.fieldnames}; expected client,first,last")
        for number, row in enumerate(reader, start=2):
            try:
                client, first, last = (int(row[key]) for key in ("client", "first", "last"))
            except (TypeError, ValueError):
                raise ValueError(f"line {number}: expected three whole numbers, got {list(row.values())}") from None
            if not 1 <= first <= last:
                raise ValueError(f"line {number}: expected 1 <= first <= last, got {first} and {last}")
            self._intervals.setdefault(client, []).append((first, last))

    def check(self, population: Population) -> None:
        """Every client of the file must exist."""
        unknown = [client for client in self._intervals if not 0 <= client < population.clients]
        if unknown:
            last = population.clients - 1
            raise SpecError("file", f"names client {unknown[0]}; there are clients 0 to {last}", self.file)

    def online(self, clients: Clients, round: int, seed: int) -> NDArray[np.bool_]:
        """Whether the round lies in one of the client's intervals."""
        there = [any(a <= round <= b for a, b in self._intervals.get(int(c), ())) for c in clients]
        return np.array(there, dtype=bool)


AVAILABILITIES: Registry[Availability] = Registry(
    "availability",
    Availability,  # type: ignore[type-abstract]
    {
        "always": "fedstrata.federation.availability:Always",
        "bernoulli": "fedstrata.federation.availability:Bernoulli",
        "persistent": "fedstrata.federation.availability:Persistent",
        "groups": "fedstrata.federation.availability:Grouped",
        "trace": "fedstrata.federation.availability:Trace",
    },
)

AnyAvailability = Annotated[Availability, FromRegistry(AVAILABILITIES, default="always")]
