"""With ``privacy.dp``, compute and limit each client's ε by Rényi differential privacy (Mironov et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from fedstrata.base.arrays import Ints
from fedstrata.base.errors import ExtraMissingError
from fedstrata.base.records import Tree
from fedstrata.federation.exchanges import RoundLog
from fedstrata.federation.federation import Listener
from fedstrata.federation.messages import ClientId
from fedstrata.federation.settings import DPSGD, Training

ROUNDS = "privacy.dp"
"""The key under which ``Simulation.memory`` stores each client's number of rounds with noise."""

SIZES = "privacy.dp sizes"
"""The key under which ``Simulation.memory`` stores the numbers of samples that sites reported."""

ORDERS = [*range(2, 65), 80, 96, 128, 192, 256, 512]
"""The orders of the Rényi divergences: only integers, because the sums for other orders may not converge."""


def dp_accounting() -> ModuleType:
    """Import ``dp_accounting``, the library that computes ε.

    Raises:
        ExtraMissingError: The extra ``dp`` is not installed.
    """
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError:
        raise ExtraMissingError("privacy.dp", "dp") from None
    library: ModuleType = dp_accounting
    return library


@cache
def divergences(noise: float, rate: float) -> NDArray[np.float64]:
    """Return the Rényi divergence of one step, for each order in ``ORDERS``.

    Args:
        noise: Standard deviation of the noise, as a multiple of the maximum norm of a per-sample gradient.
        rate: Probability that a sample is used in the step.
    """
    library = dp_accounting()
    accountant = library.rdp.RdpAccountant(ORDERS)
    accountant.compose(library.PoissonSampledDpEvent(rate, library.GaussianDpEvent(noise)))
    return np.asarray(accountant.rdp, dtype=np.float64)


class RunAccountant(Protocol):
    """An object that counts the rounds in which each client takes part, and computes the largest ε of all clients.

    The counts are stored in ``Simulation.memory``, which is part of every checkpoint.
    """

    def listening(self, listener: Listener | None) -> Listener | None:
        """Return a function that reads values from the clients' replies for the accountant.

        Args:
            listener: The run's own listener, which the returned function also calls.
        """

    def excluded(self, memory: Mapping[str, Tree]) -> Ints:
        """Return the clients that the server must no longer invite."""

    def spend(self, memory: dict[str, Tree], log: RoundLog) -> dict[str, Any]:
        """Count a round. Return the largest ε of all clients and, if necessary, a note on the meaning of ε."""

    def ending(self, memory: Mapping[str, Tree]) -> str:
        """Return the reason why the run must end before the next round; empty if the run can continue."""


class Accountant(RunAccountant):
    """Computes each client's ε from the number of rounds in which the client trained.

    The random choice of clients does not reduce ε, because the server knows which clients take part. Each step of a
    client is a Gaussian mechanism on a Poisson sample of the client's data. The accountant adds up the Rényi
    divergences of all steps.

    Args:
        dp: The settings of differential privacy, which contain the noise and δ.
        training: The settings of local training, which determine the number of steps in a round.
        sizes: Number of samples of each client, shape (N,). We assume that the numbers of samples are public.
        known: Whether the numbers of samples are known before the run. Otherwise, the clients' replies contain these
            numbers.

    Raises:
        ExtraMissingError: The extra ``dp`` is not installed.
    """

    def __init__(self, dp: DPSGD, training: Training, sizes: Ints, known: bool = True) -> None:
        self._library, self._dp, self._training = dp_accounting(), dp, training
        self.sizes, self._known = sizes, known

    @override
    def listening(self, listener: Listener | None) -> Listener | None:
        def listen(round: int, replies: Mapping[ClientId, Any]) -> None:
            for client, reply in replies.items():
                self.sizes[client] = min(reply.samples, np.iinfo(np.int64).max)  # a site may send a number above 2⁶³
            if listener is not None:
                listener(round, replies)

        return listener if self._known else listen

    @override
    def excluded(self, memory: Mapping[str, Tree]) -> Ints:
        return np.empty(0, dtype=np.int64)

    @override
    def spend(self, memory: dict[str, Tree], log: RoundLog) -> dict[str, Any]:
        rounds = self._rounds(memory).copy()
        rounds[list(log.invited - log.dropped)] += 1  # also late and failed clients, which may have trained
        memory[ROUNDS] = rounds
        if not self._known:
            self.sizes = memory[SIZES] = np.maximum(self.sizes, memory.get(SIZES, 0))
        return {"epsilon": self.largest(rounds)}

    @override
    def ending(self, memory: Mapping[str, Tree]) -> str:
        budget = self._dp.budget
        if budget is None or self.largest(self._rounds(memory) + 1) <= budget:
            return ""
        return f"privacy budget: in another round, a client could spend more than ε = {budget:g}"

    def _rounds(self, memory: Mapping[str, Tree]) -> Ints:
        """Return, for each client, the number of past rounds in which the client trained, shape (N,)."""
        rounds: Ints | None = memory.get(ROUNDS)
        return np.zeros(len(self.sizes), dtype=np.int64) if rounds is None else rounds

    def largest(self, rounds: Ints) -> float:
        """Return the largest ε of all clients.

        Args:
            rounds: For each client, the number of rounds in which the client trained, shape (N,).
        """
        draws = map(self._training.poisson, self.sizes.tolist())
        spent = {
            (rate, steps * times) for (rate, steps), times in zip(draws, rounds.tolist(), strict=True) if rate and times
        }
        return max((self._epsilon(rate, steps) for rate, steps in spent), default=0.0)

    def _epsilon(self, rate: float, steps: int) -> float:
        divergence = steps * divergences(self._dp.noise, rate)
        epsilon, _ = self._library.rdp.compute_epsilon(ORDERS, divergence, self._dp.delta)
        return float(epsilon)
