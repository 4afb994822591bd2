"""Compute the ε of clients with ``privacy.dp``, by Rényi differential privacy (Mironov et al. 2019)."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from fedstrata.base.arrays import Ints
from fedstrata.base.errors import ExtraMissingError
from fedstrata.federation.settings import DPSGD, Training

ORDERS = [*range(2, 65), 80, 96, 128, 192, 256, 512]
"""The orders of the Rényi divergences. The orders are whole numbers, because the sum for other orders may not
converge."""


class Accountant:
    """Computes the ε of clients from the number of rounds in which they trained.

    The random choice of clients does not reduce ε, because the server knows which clients take part. Each step of a
    client is a Gaussian mechanism on a Poisson sample of its data. The Rényi divergences of all steps are added.

    Args:
        dp: The settings of differential privacy, which contain the noise and δ.
        training: The settings of local training, which determine the number of steps in a round.
        sizes: Number of samples of each client, shape (N,). The numbers of samples are assumed to be public.

    Raises:
        ExtraMissingError: The extra ``dp`` is not installed.
    """

    def __init__(self, dp: DPSGD, training: Training, sizes: Ints) -> None:
        try:
            from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, rdp
        except ImportError:
            raise ExtraMissingError("privacy.dp", "dp") from None
        self._delta, self._rdp = dp.delta, rdp
        self._draws = [training.poisson(size) for size in sizes.tolist()]

        @cache
        def differences(rate: float) -> Any:
            """Return the Rényi divergence of one step for each order."""
            accountant = rdp.RdpAccountant(ORDERS)
            accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(dp.noise)))
            return accountant.rdp

        self._differences = differences

    def largest(self, rounds: Ints) -> float:
        """Return the largest ε of all clients.

        Args:
            rounds: Number of rounds in which each client trained, shape (N,).
        """
        spent = {
            (rate, steps * times)
            for (rate, steps), times in zip(self._draws, rounds.tolist(), strict=True)
            if rate and times
        }
        return max((self._epsilon(rate, steps) for rate, steps in spent), default=0.0)

    def _epsilon(self, rate: float, steps: int) -> float:
        epsilon, _ = self._rdp.compute_epsilon(ORDERS, np.multiply(steps, self._differences(rate)), self._delta)
        return float(epsilon)
