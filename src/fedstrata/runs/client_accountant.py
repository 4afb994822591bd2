"""Compute the ε of clients with ``privacy.clients``, and limit the rounds to which each client is invited."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np

from fedstrata.base.arrays import Ints
from fedstrata.base.errors import ExtraMissingError
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.settings import ClientDP
from fedstrata.runs.accountant import ORDERS
from fedstrata.sampling.poisson import Poisson
from fedstrata.spec.experiment import Experiment


def sampling_rate(spec: Experiment, config: FederationConfig) -> float | None:
    """Return the probability that a client is in a round, if the random choice of clients lowers ε; otherwise None.

    The choice lowers ε only if each client is drawn independently in every round, and others do not see which clients
    take part. A limit of participations makes draws depend on earlier draws.
    """
    privacy, method = spec.privacy, spec.method
    sampler = getattr(method, "client_sampler", None)
    limited = privacy.clients is not None and privacy.clients.participations is not None
    if type(sampler) is not Poisson or limited or privacy.sums != "plain" or not spec.availability.always_online:
        return None
    return sampler.cohort(config) / config.clients


class ClientAccountant:
    """Computes the ε of a client from the number of rounds in which it could take part.

    Without sampling, k rounds with the noise z are one Gaussian mechanism with the noise z / √k, whose ε is exact
    (Balle and Wang 2018, Theorem 8). With Poisson sampling, the accountant adds up Rényi divergences of whole orders.
    ``dp-accounting`` computes both.

    Args:
        dp: The settings of differential privacy.
        rate: The probability that a client is in a round; None if the choice of clients does not lower ε.

    Raises:
        ExtraMissingError: The extra ``dp`` is not installed.
    """

    def __init__(self, dp: ClientDP, rate: float | None) -> None:
        try:
            import dp_accounting
        except ImportError:
            raise ExtraMissingError("privacy.clients", "dp") from None
        self._library: Any = dp_accounting
        self.dp, self.rate = dp, rate

    def epsilon(self, rounds: int) -> float:
        """Return the ε of a client that could take part in a number of rounds."""
        if not rounds:
            return 0.0
        if self.rate is None:
            return float(self._library.get_epsilon_gaussian(self.dp.noise / math.sqrt(rounds), self.dp.delta))
        epsilon, _ = self._library.rdp.compute_epsilon(ORDERS, rounds * self._divergences, self.dp.delta)
        return float(epsilon)

    @cached_property
    def _divergences(self) -> Any:
        """The Rényi divergences of one round, for each of ``ORDERS``."""
        accountant = self._library.rdp.RdpAccountant(ORDERS)
        gaussian = self._library.GaussianDpEvent(self.dp.noise)
        accountant.compose(self._library.PoissonSampledDpEvent(self.rate, gaussian))
        return np.array(accountant.rdp)

    def count(self, rounds: Ints, invited: set[int]) -> Ints:
        """Return each client's number of rounds after another round.

        An invited client counts even if it did not answer. Otherwise, its answers would decide which other clients are
        invited later. With Poisson sampling, every client counts, because every client could be drawn.

        Args:
            rounds: Each client's number of rounds so far, shape (N,).
            invited: The invited clients of the round.
        """
        counted = rounds.copy()
        counted[slice(None) if self.rate is not None else sorted(invited)] += 1
        return counted

    def excluded(self, rounds: Ints) -> Ints:
        """Return the clients that took part in the largest allowed number of rounds."""
        most = self.dp.participations
        return np.flatnonzero(rounds >= most) if most is not None else np.empty(0, dtype=np.int64)

    def ending(self, rounds: Ints) -> str:
        """Return the reason why the run must end before its next round; empty if it can continue.

        Args:
            rounds: Each client's number of rounds so far, shape (N,).
        """
        remaining = np.delete(rounds, self.excluded(rounds))
        if not len(remaining):
            return (
                f"privacy: every client took part in privacy.clients.participations = {self.dp.participations} rounds"
            )
        budget = self.dp.budget
        if budget is not None and self.epsilon(max(rounds.max(), remaining.max() + 1)) > budget:
            return f"privacy budget: in another round, a client could spend more than ε = {budget:g}"
        return ""

    def record(self, rounds: Ints) -> dict[str, Any]:
        """Return the largest ε of all clients, and the statement to which this ε belongs.

        Args:
            rounds: Each client's number of rounds so far, shape (N,).
        """
        sampled = self.rate is not None
        return {
            "epsilon": self.epsilon(int(rounds.max(initial=0))),
            "privacy": {
                "unit": "client",
                "neighbours": "one client never answers",
                "delta": self.dp.delta,
                "sampling": f"Poisson with rate {self.rate:g}" if sampled else "not counted",
                "accountant": "Rényi" if sampled else "Gaussian",
                "against": "parties that see the models, but not the server",
                "noise": "seeded: no privacy",
            },
        }
