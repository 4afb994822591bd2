"""Data-level sampling with a requested number of samples, under local differential privacy (FedSTaS §2.4)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt

from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.records import Tree, record
from fedstrata.sampling.base import DataSampler
from fedstrata.sampling.messages import SizeReport


def truth_probability(epsilon: float, bound: int) -> float:
    """α = (e^ε − 1) / (e^ε + M − 2), with which the randomised response is ε-LDP (FedSTaS, Lemma 2.4, Eq. 11).

    >>> round(truth_probability(3.0, 100), 4)
    0.1616
    """
    # Both sides divided by e^ε, which overflows where ε is large.
    return -math.expm1(-epsilon) / (1 + (bound - 2) * math.exp(-epsilon))


def randomised_size(size: int, bound: int, alpha: float, generator: np.random.Generator) -> int:
    """R = min(n, M − 1) with probability α, else uniform on {1, …, M − 1}.

    Args:
        size: n_k, the true number of samples.
        bound: M.
        alpha: α.
        generator: Randomness.
    """
    truthful, other = generator.random() < alpha, int(generator.integers(1, bound))
    # The response's range is {1, …, M − 1}: a client without data answers 1, or ε-LDP would not hold for it.
    return max(1, min(size, bound - 1)) if truthful else other


def estimated_total(responses: Sequence[int], bound: int, alpha: float) -> float:
    """ñ = (Σ r_k − (1 − α) M m / 2) / α, at least 1: unbiased where no n_k exceeds M − 1 (FedSTaS, Eq. 7).

    >>> estimated_total([10, 20], bound=100, alpha=1.0)
    30.0
    """
    m = len(responses)
    return max(1.0, (sum(responses) - (1 - alpha) * bound * m / 2) / alpha)


def ask_sizes(
    federation: Federation, clients: Iterable[int], epsilon: float | None, bound: int
) -> tuple[dict[int, int], int, float]:
    """Ask clients how many samples they hold, under ε-LDP where there is an ε.

    Returns:
        The answers of those who answered, and the M and α that turn them into an estimate (0 and 1 without an ε).
    """
    bound = bound if epsilon is not None else 0
    alpha = truth_probability(epsilon, bound) if epsilon is not None else 1.0
    request = SizeReport(federation.round, bound, alpha)
    replies = federation.ask({int(client): request for client in clients})
    return {client: reply.samples for client, reply in replies.items()}, bound, alpha


@record
class FedSTaSDataState:
    """The running mean of the estimates ñ.

    Args:
        total: Sum of the estimates so far.
        rounds: How many there were.
    """

    total: float
    rounds: int


class FedSTaSData(DataSampler):
    """The server wants n* samples a round; each participant keeps each of its own with probability n*/ñ.

    Args:
        fraction: q. Unless ``samples`` is given, n* is q times the mean of the estimates ñ so far, so that a round
            trains on about the same number of samples whoever takes part.
        samples: n*, a fixed number instead.
        epsilon: ε of local differential privacy for the clients' sizes; none by default: they answer plainly. It is
            spent anew in every round in which a client takes part: r rounds cost it r ε.
        bound: M, the public bound on a client's size under privacy. Larger sizes are reported as M − 1 at most, which
            biases ñ downwards and keeps more data than requested.
    """

    fraction: float = Field(default=0.1, gt=0, le=1)
    samples: PositiveInt | None = None
    epsilon: PositiveFloat | None = None
    bound: int = Field(default=100, gt=1)

    @property
    def private(self) -> bool:
        """Under ε."""
        return self.epsilon is not None

    def check(self, config: FederationConfig) -> None:
        """Warn where M clips."""
        if self.epsilon is not None and config.sizes is not None and (config.sizes >= self.bound).any():
            clipped = int((config.sizes >= self.bound).sum())
            warnings.warn(
                f"method.bound M = {self.bound} clips {clipped} of {config.clients} clients, which hold up to "
                f"{int(config.sizes.max())} samples: the estimate of the total is biased downwards and more samples "
                "are kept than requested; a larger M avoids that and adds noise",
                stacklevel=2,
            )

    def init(self, federation: Federation) -> Tree:
        """No estimate yet."""
        return FedSTaSDataState(0.0, 0)

    def keep(
        self, federation: Federation, state: Tree, clients: Sequence[int]
    ) -> tuple[float, Tree, Mapping[str, Any]]:
        """Ask the participants for their sizes and divide."""
        sizes, bound, alpha = ask_sizes(federation, clients, self.epsilon, self.bound)
        if not sizes:
            return self.fraction, state, {}
        estimate = estimated_total(list(sizes.values()), bound, alpha)
        state = FedSTaSDataState(state.total + estimate, state.rounds + 1)
        wanted = float(self.samples) if self.samples is not None else self.fraction * state.total / state.rounds
        keep = min(1.0, wanted / estimate)
        return keep, state, {"estimated_samples": estimate, "requested_samples": wanted, "keep": keep}
