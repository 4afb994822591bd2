"""Compute the clients' ε with ``privacy.clients``, and limit the number of rounds per client."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from typing_extensions import override

from fedstrata.base.arrays import Ints
from fedstrata.base.errors import ExtraMissingError
from fedstrata.base.records import Tree
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.exchanges import RoundLog
from fedstrata.federation.federation import Listener
from fedstrata.federation.messages import Fit
from fedstrata.federation.secure.noisy import NoisyForm
from fedstrata.federation.settings import ClientDP
from fedstrata.runs.accountant import ORDERS, Accountant, RunAccountant
from fedstrata.runs.dp_record import SEEDED
from fedstrata.sampling.poisson import Poisson
from fedstrata.spec.experiment import Experiment

MEMORY = "privacy.clients"
"""The key under which ``Simulation.memory`` stores each client's number of rounds."""
LEAST_NOISE = 0.1
"""The minimum noise for which the accountant takes client sampling into account.

With less noise, sampling hardly affects ε.
"""


def sampling_rate(spec: Experiment, config: FederationConfig) -> float | None:
    """Return the probability that a client takes part in a round; None if client sampling does not lower ε.

    Sampling lowers ε only if clients are drawn independently in every round and other parties do not see which
    clients take part. If the number of rounds per client is limited, the draws are not independent.
    """
    privacy, sampler, dp = spec.privacy, getattr(spec.method, "client_sampler", None), spec.privacy.clients
    if dp is None or dp.participations is not None or dp.noise < LEAST_NOISE:
        return None
    if type(sampler) is not Poisson or privacy.sums != "plain" or not spec.availability.always_online:
        return None
    return sampler.cohort(config) / config.clients


class ClientAccountant(RunAccountant):
    """Computes the ε of a client from the number of rounds in which the client could take part.

    Without sampling, k rounds with noise z are equivalent to one Gaussian mechanism with noise z / √k. The ε of this
    mechanism is exact (Balle and Wang 2018, Theorem 8). With Poisson sampling, an upper bound on ε is computed from
    the distribution of the privacy loss (Koskela et al. 2020).

    Args:
        dp: The settings of differential privacy.
        clients: Number of clients, N.
        rate: The probability that a client takes part in a round; None if client sampling does not lower ε.

    Raises:
        ExtraMissingError: The extra ``dp`` is not installed.
    """

    def __init__(self, dp: ClientDP, clients: int, rate: float | None) -> None:
        try:
            import dp_accounting
        except ImportError:
            raise ExtraMissingError("privacy.clients", "dp") from None
        self._library: Any = dp_accounting
        self.dp, self.rate, self._clients = dp, rate, clients
        self.epsilon = cache(self._epsilon)
        """The function ``_epsilon`` with a cache, which computes each value only once."""

    def _epsilon(self, rounds: int) -> float:
        """Return the ε of a client that could take part in ``rounds`` rounds."""
        if not rounds:
            return 0.0
        noise, delta, library = self.dp.noise, self.dp.delta, self._library
        if self.rate is None:
            with np.errstate(divide="ignore"):  # with little noise, the search for ε takes the logarithm of zero
                return float(library.get_epsilon_gaussian(noise / math.sqrt(rounds), delta))
        # The privacy loss of a round is about rate / noise. The interval is a tenth of this loss, because a much
        # smaller interval takes longer and hardly lowers ε.
        interval = max(1e-4, 0.1 * self.rate / noise)
        accountant = library.pld.PLDAccountant(value_discretization_interval=interval)
        accountant.compose(library.PoissonSampledDpEvent(self.rate, library.GaussianDpEvent(noise)), rounds)
        return float(accountant.get_epsilon(delta))

    @override
    def listening(self, listener: Listener | None) -> Listener | None:
        return listener

    @override
    def spend(self, memory: dict[str, Tree], log: RoundLog) -> dict[str, Any]:
        """Count a round for each client that could take part; see ``RunAccountant``.

        Invited clients that did not reply are included, because replies must not affect later invitations.
        With Poisson sampling, the round is counted for all clients, because the server could have drawn any client.
        """
        rounds = self._rounds(memory).copy()
        rounds[slice(None) if self.rate is not None else sorted(log.invited)] += 1
        memory[MEMORY] = rounds
        return {"epsilon": self.epsilon(int(rounds.max())), "privacy": self._statement()}

    def _statement(self) -> dict[str, Any]:
        """Return the note on the meaning of ε, which a round's record contains."""
        sampled = self.rate is not None
        return {
            "unit": "client",
            "neighbours": "one client never answers",
            "delta": self.dp.delta,
            "sampling": f"Poisson with rate {self.rate:g}" if sampled else "not counted",
            "accountant": "privacy loss distributions" if sampled else "Gaussian",
            "against": "parties that see the models, but not the server",
            "noise": SEEDED,
        }

    @override
    def excluded(self, memory: Mapping[str, Tree]) -> Ints:
        """Return the clients that have already taken part in the maximum number of rounds."""
        most = self.dp.participations
        return np.empty(0, dtype=np.int64) if most is None else np.flatnonzero(self._rounds(memory) >= most)

    @override
    def ending(self, memory: Mapping[str, Tree]) -> str:
        rounds, budget = self._rounds(memory), self.dp.budget
        remaining = np.delete(rounds, self.excluded(memory))
        if not len(remaining):
            return (
                f"privacy: every client took part in privacy.clients.participations = {self.dp.participations} rounds"
            )
        if budget is not None and self.epsilon(int(max(rounds.max(), remaining.max() + 1))) > budget:
            return f"privacy budget: in another round, a client could spend more than ε = {budget:g}"
        return ""

    def _rounds(self, memory: Mapping[str, Tree]) -> Ints:
        """Return, for each client, the number of past rounds in which the client could take part, shape (N,)."""
        rounds: Ints | None = memory.get(MEMORY)
        return np.zeros(self._clients, dtype=np.int64) if rounds is None else rounds


class SharesAccountant(ClientAccountant):
    """Computes the ε of a client if clients add Skellam noise to their updates before the updates are summed.

    The server and other clients know which clients take part, so client sampling does not lower ε.

    Args:
        dp: The settings of differential privacy.
        clients: Number of clients, N.
        form: The object that encodes clients' updates, and determines the noise and the maximum norms of updates.

    Raises:
        ExtraMissingError: The extra ``dp`` is not installed.
    """

    def __init__(self, dp: ClientDP, clients: int, form: NoisyForm) -> None:
        super().__init__(dp, clients, None)
        self._form = form
        self.secret = False
        """Whether the sites' operating systems generate the noise. Otherwise, the noise depends on the spec's seed."""

    @override
    def _epsilon(self, rounds: int) -> float:
        form = self._form
        spent = [rounds * skellam_divergence(order, form.variance, *form.sensitivity) for order in ORDERS]
        return float(self._library.rdp.compute_epsilon(ORDERS, spent, self.dp.delta)[0]) if rounds else 0.0

    @override
    def _statement(self) -> dict[str, Any]:
        colluding = self.dp.colluding
        others = f"up to {colluding} clients, even if they collude" if colluding else "users of the models"
        return super()._statement() | {
            "neighbours": "one client sends zeros with noise instead of its updates",
            "accountant": "Rényi divergences of the Skellam mechanism",
            "against": f"the server as well, and {others}",
            **({"noise": "the operating system of each site"} if self.secret else {}),
        }

    @override
    def ending(self, memory: Mapping[str, Tree]) -> str:
        left, least = self._clients - len(self.excluded(memory)), self._form.least
        if 0 < left < least:
            most = self.dp.participations
            return f"privacy: {left} clients took part in fewer than {most} rounds, but a sum needs {least} clients"
        return super().ending(memory)


def skellam_divergence(order: int, variance: float, most1: float, most2: float) -> float:
    """Return a bound on the Rényi divergence of a sum with Skellam noise (Agarwal et al. 2021, Corollary 4.1).

    Args:
        order: The order α, an integer above 1.
        variance: The variance μ of the noise in each element.
        most1: Δ₁, the maximum change of the sum in the L1 norm.
        most2: Δ₂, the maximum change of the sum in the L2 norm.
    """
    gaussian = order * most2**2 / (2 * variance)
    return gaussian + min(
        ((2 * order - 1) * most2**2 + 6 * most1) / (4 * variance**2),
        3 * most1 / (2 * variance),
    )


def client_accountant_of(spec: Experiment, config: FederationConfig) -> ClientAccountant:
    """Return the accountant that computes ε in a run with ``privacy.clients``."""
    dp = spec.privacy.clients
    assert dp is not None
    if dp.noise_from == "server":
        return ClientAccountant(dp, config.clients, sampling_rate(spec, config))
    form = spec.method.forms(config)[Fit]
    assert isinstance(form, NoisyForm)
    return SharesAccountant(dp, config.clients, form)


def accountant_of(spec: Experiment, config: FederationConfig, *, secret: bool) -> RunAccountant | None:
    """Return the accountant that computes a run's ε; None without differential privacy.

    In a deployment with ``privacy.dp`` and secure sums, the result is also None, because ε depends on the sites'
    numbers of samples, which replies do not contain. Each site then computes its own ε.

    Args:
        spec: The experiment.
        config: The settings that server and clients share.
        secret: Whether the sites' operating systems generate the clients' noise.
    """
    if spec.privacy.dp is not None:
        if config.sizes is None and spec.privacy.sums == "secure":
            return None
        sizes = np.zeros(config.clients, dtype=np.int64) if config.sizes is None else config.sizes
        return Accountant(spec.privacy.dp, spec.training, sizes, known=config.sizes is not None)
    if spec.privacy.clients is None:
        return None
    accountant = client_accountant_of(spec, config)
    if isinstance(accountant, SharesAccountant):
        accountant.secret = secret
    return accountant
