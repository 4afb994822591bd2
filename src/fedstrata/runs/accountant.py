"""The ε that clients spend with ``privacy.dp``, by Rényi differential privacy (Mironov et al. 2019)."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from fedstrata.base.arrays import Ints
from fedstrata.base.errors import ExtraMissingError
from fedstrata.federation.settings import DPSGD, Training

ORDERS = [*range(2, 65), 80, 96, 128, 192, 256, 512]
"""The orders of the Rényi differences. Whole numbers, because the sum for other orders may not converge."""


class Accountant:
    """Computes ε of the clients from the number of rounds in which they trained.

    The sampling of clients does not count, because the server knows who takes part. Each step of a client is a
    Gaussian mechanism over a Poisson sample of its data; Rényi differences add up over steps.

    Args:
        dp: The settings, which give the noise and δ.
        training: The settings of local training, which give the steps of a round.
        sizes: Number of samples of every client, shape (N,). They count as public.

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
            """The Rényi differences of one step, for each order."""
            accountant = rdp.RdpAccountant(ORDERS)
            accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(dp.noise)))
            return accountant.rdp

        self._differences = differences

    def largest(self, rounds: Ints) -> float:
        """Return the largest ε of a client.

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
