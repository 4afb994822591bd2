"""How many samples the clients hold: asked plainly, or under local differential privacy (FedSTaS §2.4)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedstrata.base.records import record
from fedstrata.federation.allowed import Allowed
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import Phase
from fedstrata.sampling.messages import SizeReport

Epsilon = Annotated[float, Field(ge=1e-6)]
"""ε of local differential privacy; with less the truth would be told so rarely that estimates divide by zero."""


@record("Sizes")
class Sizes:
    """Who holds how much.

    Args:
        known: Clients that answered and hold something, ascending, int64.
        samples: n_k of each, int64.
    """

    known: NDArray[np.int64]
    samples: NDArray[np.int64]

    @classmethod
    def ask(cls, federation: Federation) -> Sizes:
        """Ask every client for its plain n_k; who holds nothing or does not answer is never drawn."""
        sizes, _, _ = ask_sizes(federation, federation.candidates().tolist())
        held = {client: samples for client, samples in sizes.items() if samples}
        return cls(np.fromiter(held, dtype=np.int64), np.fromiter(held.values(), dtype=np.int64))

    def among(self, candidates: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The candidates that are known, and their sizes."""
        there = np.isin(self.known, candidates)
        return self.known[there], self.samples[there]


def ask_sizes(
    federation: Federation, clients: Iterable[int], epsilon: float | None = None, bound: int = 0
) -> tuple[dict[int, int], int, float]:
    """Ask clients how many samples they hold, under ε-LDP where there is an ε.

    Returns:
        The answers of those who answered, and the M and α that turn them into an estimate (0 and 1 without an ε).
    """
    bound = bound if epsilon is not None else 0
    alpha = truth_probability(epsilon, bound) if epsilon is not None else 1.0
    request = SizeReport(federation.round, bound, alpha)
    replies = federation.ask(clients, request)
    return {client: reply.samples for client, reply in replies.items()}, bound, alpha


def allowed_sizes(
    epsilon: float | None = None, bound: int = 0, *, phase: Phase = "round", per: Literal["phase", "run"] = "phase"
) -> Allowed:
    """Return the declaration of ``ask_sizes`` and ``Sizes.ask``, for ``allowed`` of a sampler.

    Args:
        epsilon: ε; None if clients answer plainly.
        bound: M.
        phase: When clients are asked.
        per: Whether a client is asked once per phase or once per run.
    """
    rule = replace(SizeReport.rule, phase=phase)
    if epsilon is None:
        return Allowed(SizeReport, where={"bound": 0, "alpha": 1.0}, per=per, rule=rule)
    description = f"{rule.description}, as a random answer below {bound} that hides it (ε = {epsilon:g})"
    rule = replace(rule, description=description, discloses=frozenset(), epsilon=epsilon)
    return Allowed(SizeReport, where={"bound": bound, "alpha": truth_probability(epsilon, bound)}, per=per, rule=rule)


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
    """ñ = (Σ r_k − (1 − α) M m / 2) / α, at least 1 (FedSTaS, Eq. 7).

    Unbiased before it is held above 1, where no n_k exceeds M − 1. Where noise is large the bound of 1 is often met,
    and the estimate is then too large on average: 107 for a true total of 87 at ε = 1.3, M = 20 and m = 10
    (``fedstrata.papers.readings``).

    >>> estimated_total([10, 20], bound=100, alpha=1.0)
    30.0
    """
    m = len(responses)
    return max(1.0, (sum(responses) - (1 - alpha) * bound * m / 2) / alpha)
