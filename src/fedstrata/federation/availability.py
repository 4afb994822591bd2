"""Availability models: simulate which clients drop out of a round, and how fast clients are.

Whether a client is online depends only on the settings, the seed, the round and the client. With ``SizeCorrelated``,
the sizes of the other clients matter, too. A resumed run therefore needs no stored state of these models.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import NormalDist
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from fedstrata.base.config import FromRegistry, Registry, Setting, under
from fedstrata.base.errors import SpecError
from fedstrata.base.rng import rng, uniforms
from fedstrata.data.partitions.base import Assignment

Clients = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Population:
    """The clients of a federation, and their training samples if the server knows them.

    Args:
        clients: Number of clients, N.
        classes: Number C of strata, such as classes.
        assignment: The training samples of each client; None in a deployment, because the server does not know the
            sites' samples.
        y: The label of every training sample; None in a deployment.
        seed: The seed of random numbers that stay the same in all rounds.
    """

    clients: int
    classes: int = 0
    assignment: Assignment | None = None
    y: NDArray[np.int64] | None = None
    seed: int = 0

    @property
    def sizes(self) -> NDArray[np.int64] | None:
        """Number of training samples of each client, shape (N,); None if unknown."""
        return None if self.assignment is None else self.assignment.sizes

    @cached_property
    def labels(self) -> NDArray[np.int64] | None:
        """Number of training samples of each class at each client, shape (N, C); None if unknown."""
        if self.assignment is None or self.y is None:
            return None
        return self.assignment.counts(self.y, self.classes)


class Availability(Setting):
    """A model that simulates which clients are online, and how long clients need to answer.

    Args:
        announced: Whether the server knows which clients are online, and invites only online clients.
        deadline: Simulated seconds that the server waits for replies. Default: unlimited.
        seconds_per_sample: Simulated seconds that a client of median speed needs for the gradient of one sample.
        speed_spread: Standard deviation of the logarithms of the clients' speeds.
        bandwidth_up: Upload bandwidth per client, in megabits per simulated second. Default: unlimited.
        bandwidth_down: Download bandwidth per client, in megabits per simulated second. Default: unlimited.
        latency: Latency per message, in simulated seconds.
    """

    always_online: ClassVar[bool] = False
    """Whether all clients are always online, so that ``online`` is never called."""

    announced: bool = False
    deadline: PositiveFloat | None = None
    seconds_per_sample: PositiveFloat = 0.001
    speed_spread: float = Field(default=0.0, ge=0, le=10)
    bandwidth_up: PositiveFloat | None = None
    bandwidth_down: PositiveFloat | None = None
    latency: NonNegativeFloat = 0.0

    @property
    def network(self) -> bool:
        """Whether the transfer of a message takes simulated time."""
        return self.bandwidth_up is not None or self.bandwidth_down is not None or self.latency > 0

    @property
    def simulates_time(self) -> bool:
        """Whether time is simulated: the settings contain a deadline, different client speeds or a network."""
        return self.deadline is not None or self.speed_spread > 0 or self.network

    def transfer(self, size: int, bandwidth: float | None) -> float:
        """Return how many simulated seconds it takes to transfer a message.

        Args:
            size: Size of the message in bytes.
            bandwidth: Bandwidth in megabits per second; None if unlimited.

        >>> Always(bandwidth_down=10, latency=0.5).transfer(1_250_000, 10)
        1.5
        """
        return self.latency + (0.0 if bandwidth is None else size * 8e-6 / bandwidth)

    def check(self, population: Population) -> None:
        """Raise ``SpecError`` if these settings do not fit the federation.

        This method is called once before the first round, and may store values for the method ``online`` in a
        ``pydantic.PrivateAttr``.

        Args:
            population: The clients.
        """

    @abstractmethod
    def online(self, clients: Clients, round: int, seed: int) -> NDArray[np.bool_]:
        """Return, for each client, whether the client is online in a round.

        Args:
            clients: The clients, shape (n,).
            round: The round, counted from 1.
            seed: The experiment's seed.
        """

    def seconds(self, clients: Clients, work: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
        """Return the simulated seconds that each client needs for its work, shape (n,).

        Args:
            clients: The clients, shape (n,).
            work: Number of per-sample gradients that each client computes, shape (n,).
            seed: The experiment's seed.
        """
        median: NDArray[np.float64] = work * self.seconds_per_sample
        if self.speed_spread == 0:
            return median
        normal = NormalDist()
        quantiles = np.clip(uniforms(seed, "speed", 0, clients), 1e-12, 1 - 1e-12)
        slowness = [math.exp(self.speed_spread * normal.inv_cdf(float(u))) for u in quantiles]
        slow: NDArray[np.float64] = median * np.array(slowness)
        return slow


class Always(Availability):
    """All clients are always online."""

    always_online = True

    def online(self, clients: Clients, round: int, seed: int) -> NDArray[np.bool_]:
        """Return True for every client."""
        return np.ones(len(clients), dtype=bool)


class Bernoulli(Availability):
    """Each client is online with probability ``p``, independently in each round.

    Args:
        p: Probability that a client is online in a round.
    """

    p: float = Field(default=0.5, gt=0, le=1)

    def online(self, clients: Clients, round: int, seed: int) -> NDArray[np.bool_]:
        """Choose at random whether each client is online in the round.

        >>> bool(Bernoulli(p=1.0).online(np.arange(5), 1, seed=0).all())
        True
        """
        return uniforms(seed, "online", round, clients) < self.p


class Persistent(Availability):
    """Each client stays online or offline for several rounds (ReBaFL §5.5.3).

    Args:
        p: Probability that a client is online during a period.
        period: Length of a period, in rounds.
    """

    p: float = Field(default=0.5, gt=0, le=1)
    period: PositiveInt = 20

    def online(self, clients: Clients, round: int, seed: int) -> NDArray[np.bool_]:
        """Return, for each client, whether the client is online in the period that contains the round."""
        return uniforms(seed, "online", (round - 1) // self.period, clients) < self.p


class AvailabilityGroup(Setting):
    """A group of clients with consecutive ids and the same probability of being online.

    Args:
        clients: Number of clients in the group.
        p: Probability that a client of the group is online in a round.
    """

    clients: PositiveInt
    p: float = Field(gt=0, le=1)


class Grouped(Availability):
    """Each group of clients has its own probability of being online (ReBaFL).

    Args:
        groups: Groups in the order of client ids, such as ``[{clients = 4, p = 0.5}, {clients = 16, p = 0.2}]``.
    """

    groups: list[AvailabilityGroup] = Field(min_length=1)

    def check(self, population: Population) -> None:
        """Raise ``SpecError`` if the sizes of the groups do not add up to the number of clients."""
        total = sum(group.clients for group in self.groups)
        if total != population.clients:
            raise SpecError(
                "groups",
                f"the groups have {total} clients in total, but partition.clients is {population.clients}. "
                "Make both numbers equal.",
            )

    def online(self, clients: Clients, round: int, seed: int) -> NDArray[np.bool_]:
        """Choose at random whether each client is online, with the probability ``p`` of the client's group."""
        ends = np.cumsum([group.clients for group in self.groups])
        p = np.array([group.p for group in self.groups])[np.searchsorted(ends, clients, side="right")]
        return uniforms(seed, "online", round, clients) < p


class Combined(Availability):
    """A combination of models: a client is online in a round if it is online in every model.

    The models are independent: a client's probability of being online is the product of the models' probabilities. The
    first model sets the common settings, such as ``deadline``.

    Args:
        models: The combined models.
    """

    models: tuple[Availability, ...]

    @model_validator(mode="after")
    def _share(self) -> Combined:
        """Use the first model's common settings. Raise ``SpecError`` if another model sets a different value."""
        common = {key: getattr(self.models[0], key) for key in Availability.model_fields}
        for place, model in enumerate(self.models):
            for key, value in common.items():
                if (other := getattr(model, key)) not in (value, Availability.model_fields[key].default):
                    problem = "has an effect only in the first table. Set the key there, or remove the key."
                    raise SpecError(f"{place}.{key}", problem, other)
        self.__dict__.update(common)
        return self

    def to_spec(self) -> Any:
        """Return a list with one dict of settings for each model."""
        return [model.to_spec() for model in self.models]

    def check(self, population: Population) -> None:
        """Check each model with its own random seed, and raise ``SpecError`` if a model does not fit the federation."""
        # ``model.check`` stores values in a model. Copy the models, so that the user's spec does not change.
        self.__dict__["models"] = tuple(model.model_copy() for model in self.models)
        for place, model in enumerate(self.models):
            under(str(place), partial(model.check, replace(population, seed=_seed_of(place, population.seed))))

    def online(self, clients: Clients, round: int, seed: int) -> NDArray[np.bool_]:
        """Return, for each client, whether the client is online in all models."""
        online = np.ones(len(clients), dtype=bool)
        for place, model in enumerate(self.models):
            online &= model.online(clients, round, _seed_of(place, seed))
        return online

    def seconds(self, clients: Clients, work: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
        """Return the simulated seconds that each client needs with the first model's settings, shape (n,)."""
        return self.models[0].seconds(clients, work, seed)


def _seed_of(place: int, seed: int) -> int:
    """Return the seed of a model in ``Combined``.

    The first model keeps the seed, so it behaves as if it were the only model.
    """
    return int(rng(seed, "availability", place).integers(2**63)) if place else seed


class Availabilities(Registry[Availability]):
    """The registry of availability models. The registry makes one ``Combined`` model from a list of models."""

    def parse(self, value: object) -> Availability:
        """Build an availability model from a name, a dict with a ``name``, or a list of names and dicts."""
        parse = super().parse
        if not isinstance(value, (list, tuple)):
            return parse(value)
        models = tuple(under(str(place), partial(parse, each)) for place, each in enumerate(value))
        if not models:
            raise SpecError("", "is an empty list. Give at least one availability model.", value)
        return models[0] if len(models) == 1 else Combined(models=models)


AVAILABILITIES = Availabilities(
    "availability",
    Availability,  # type: ignore[type-abstract]
    {
        "always": "fedstrata.federation.availability:Always",
        "bernoulli": "fedstrata.federation.availability:Bernoulli",
        "persistent": "fedstrata.federation.availability:Persistent",
        "groups": "fedstrata.federation.availability:Grouped",
        "markov": "fedstrata.federation.availability_patterns:Markov",
        "cyclic": "fedstrata.federation.availability_patterns:Cyclic",
        "diurnal": "fedstrata.federation.availability_patterns:Diurnal",
        "label-correlated": "fedstrata.federation.availability_correlated:LabelCorrelated",
        "size-correlated": "fedstrata.federation.availability_correlated:SizeCorrelated",
        "trace": "fedstrata.federation.availability_trace:Trace",
    },
)

AnyAvailability = Annotated[Availability, FromRegistry(AVAILABILITIES, default="always")]
