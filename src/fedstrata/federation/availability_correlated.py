"""Availability that depends on a client's labels or on its number of samples."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, PrivateAttr

from fedstrata.base.errors import SpecError
from fedstrata.base.rng import rng, uniforms
from fedstrata.federation.availability import Availability, Clients, Population
from fedstrata.federation.availability_patterns import Floats, in_cycles, in_spells


class Correlated(Availability):
    """Base class of models in which a client's samples determine the probability that the client is online.

    Args:
        mean: Mean probability that a client is online, before clipping to [``least``, 1].
        least: Minimum probability that a client is online.
        pattern: The pattern by which clients go online and offline: at random in each round (``independent``), or
            according to the model ``markov`` or ``cyclic``.
        offline_rounds: Mean number of rounds that a client stays offline, with ``pattern = "markov"``.
        period: Length of a period in rounds, with ``pattern = "cyclic"``.
    """

    mean: float = Field(default=0.1, gt=0, le=1)
    least: float = Field(default=0.02, ge=0, le=1)
    pattern: Literal["independent", "markov", "cyclic"] = "independent"
    offline_rounds: float = Field(default=20.0, ge=1)
    period: PositiveInt = 100

    _p: Floats = PrivateAttr()

    def check(self, population: Population) -> None:
        """Compute each client's probability of being online."""
        self._p = np.clip(self.mean * self.relative(population), self.least, 1)

    @abstractmethod
    def relative(self, population: Population) -> Floats:
        """Return each client's probability of being online, divided by the mean probability, shape (N,).

        Args:
            population: The clients.

        Raises:
            SpecError: The clients' samples are not known, or have no labels.
        """

    def online(self, clients: Clients, round: int, seed: int) -> NDArray[np.bool_]:
        """Return, for each client, whether the client is online, according to its probability and the pattern."""
        p = self._p[clients]
        if self.pattern == "markov":
            return in_spells(p, self.offline_rounds, clients, round, seed)
        if self.pattern == "cyclic":
            return in_cycles(p, self.period, clients, round, seed)
        return uniforms(seed, "online", round, clients) < p


class LabelCorrelated(Correlated):
    """Clients with certain labels are online more often than other clients (FedAU).

    Each of the C labels c gets a random weight w_c, and the weights add up to 1. Let q_c be the fraction of a client's
    samples that are in class c. The client is online with probability ``mean`` · C · Σ_c q_c w_c. If labels are
    balanced, the average probability over the clients is ``mean``.

    Args:
        concentration: Concentration of the Dirichlet distribution from which the labels' weights are drawn. Clients
            whose labels have large weights are online more often.
    """

    concentration: float = Field(default=0.1, ge=1e-9, le=1e9)

    def relative(self, population: Population) -> Floats:
        """Return C · Σ_c q_c w_c for each client, shape (N,). For the symbols, see ``LabelCorrelated``."""
        counts = population.labels
        if counts is None:
            problem = "needs the labels of all clients' samples, which sites do not reveal. Use another model."
            raise SpecError("name", problem, self.name)
        classes = counts.shape[1]
        weights = rng(population.seed, "label weights").dirichlet(np.full(classes, self.concentration))
        shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        relative: Floats = classes * shares @ weights
        return relative


class SizeCorrelated(Correlated):
    """A client's probability of being online depends on its number of samples.

    For a client with n samples, the probability is proportional to n^e, where e is ``exponent``.

    Args:
        exponent: Exponent e. A client with n samples is online with a probability proportional to n^e.
    """

    exponent: float = Field(default=1.0, ge=-10, le=10)

    def relative(self, population: Population) -> Floats:
        """Return n^e for each client with n samples, divided by the mean of n^e over clients."""
        if population.sizes is None:
            problem = "needs every client's number of samples, which sites do not reveal. Use another model."
            raise SpecError("name", problem, self.name)
        powers = np.maximum(population.sizes, 1).astype(np.float64) ** self.exponent
        relative: Floats = powers / powers.mean()
        return relative
