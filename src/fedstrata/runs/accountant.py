"""Compute the ε of clients with ``privacy.dp``, by Rényi differential privacy (Mironov et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstrata.base.arrays import Ints
from fedstrata.base.errors import ExtraMissingError
from fedstrata.federation.federation import Listener
from fedstrata.federation.messages import ClientId
from fedstrata.federation.settings import DPSGD, Training

ORDERS = [*range(2, 65), 80, 96, 128, 192, 256, 512]
"""The orders of the Rényi divergences. The orders are whole numbers, because the sum for other orders may not
converge."""


def dp_accounting() -> ModuleType:
    """Return the library that computes privacy.

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
    """Return the Rényi divergence of one step for each of ``ORDERS``.

    Args:
        noise: Standard deviation of the noise, as a multiple of the largest norm of a gradient.
        rate: Probability with which each sample is in the step.
    """
    library = dp_accounting()
    accountant = library.rdp.RdpAccountant(ORDERS)
    accountant.compose(library.PoissonSampledDpEvent(rate, library.GaussianDpEvent(noise)))
    return np.asarray(accountant.rdp, dtype=np.float64)


class Accountant:
    """Computes the ε of clients from the number of rounds in which they trained.

    The random choice of clients does not reduce ε, because the server knows which clients take part. Each step of a
    client is a Gaussian mechanism on a Poisson sample of its data. The Rényi divergences of all steps are added.

    Args:
        dp: The settings of differential privacy, which contain the noise and δ.
        training: The settings of local training, which determine the number of steps in a round.
        sizes: Number of samples of each client, shape (N,), or 0 until it is known. The numbers of samples are assumed
            to be public.

    Raises:
        ExtraMissingError: The extra ``dp`` is not installed.
    """

    def __init__(self, dp: DPSGD, training: Training, sizes: Ints) -> None:
        self._library, self._dp, self._training, self.sizes = dp_accounting(), dp, training, sizes

    def listening(self, listener: Listener | None) -> Listener:
        """Return a listener that learns the sizes from clients' replies, and then calls another listener.

        Args:
            listener: The other listener, if there is one.
        """

        def listen(round: int, replies: Mapping[ClientId, Any]) -> None:
            for client, reply in replies.items():
                self.sizes[client] = min(reply.samples, np.iinfo(np.int64).max)  # a site may send any number
            if listener is not None:
                listener(round, replies)

        return listen

    def largest(self, rounds: Ints) -> float:
        """Return the largest ε of all clients.

        Args:
            rounds: Number of rounds in which each client trained, shape (N,).
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
