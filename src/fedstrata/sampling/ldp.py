"""Choose samples as in FedSTaS: clients use some of their samples, and can hide how many they have (FedSTaS §2.4)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator
from typing_extensions import override

from fedstrata.base.errors import SpecError
from fedstrata.base.records import Tree, record
from fedstrata.federation.allowed import Agreed, Allowed
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.sampling.base import DataSampler, KeepResult
from fedstrata.sampling.client_sizes import (
    AnswersState,
    Epsilon,
    allowed_sizes,
    ask_new_sizes,
    unbiased_total,
)

Estimates = Literal["round", "pooled"]
"""The estimate that a round uses: the round's own estimate, or the mean of all estimates up to this round."""


@record("FedSTaSDataState")
class FedSTaSDataState:
    """The running mean, over rounds, of the participants' estimated total number of samples.

    Args:
        total: The sum of the estimates of all past rounds.
        rounds: The number of past rounds with an estimate.
    """

    total: float
    rounds: int


@record("FedSTaSAnswersState")
class FedSTaSAnswersState(FedSTaSDataState):
    """The running mean of the estimates, and the clients' reported numbers of samples, which later rounds use again.

    Args:
        total: The sum of the estimates of all past rounds.
        rounds: The number of past rounds with an estimate.
        answered: The numbers of samples that clients have reported.
    """

    answered: AnswersState


class FedSTaSData(DataSampler):
    """Each participant uses each sample with equal probability, so that a round uses the requested number on average.

    The probability is the requested number of samples, divided by the server's estimate of the participants' total
    number of samples. The settings ``share``, ``estimates`` and ``reuse`` are not in the paper.

    Args:
        fraction: Mean fraction of the participants' samples that a round uses.
        samples: Mean number n* of samples that a round uses. Default: computed from ``fraction``.
        epsilon: Parameter ε of local differential privacy, which protects each client's reported number of samples. A
            client spends ε per report. Default: clients report exact numbers.
        bound: Public upper bound M on reported numbers of samples, if ``epsilon`` is set. A client with M or more
            samples reports at most M − 1.
        share: Fixed probability with which a client uses each of its samples. If set, clients do not reveal their
            numbers of samples, and ``fraction`` and ``bound`` have no effect.
        estimates: Estimate of the participants' total number of samples. ``round``: from the replies of the current
            round, as in the paper. ``pooled``: the mean of all estimates up to the current round. Default: ``round``.
        reuse: Whether each client reports its number of samples, and spends ε, only once. Default: false.
    """

    needs_replies = "asks each client for its number of samples, or hides this number"

    fraction: float = Field(default=0.1, gt=0, le=1)
    samples: PositiveInt | None = None
    epsilon: Epsilon | None = None
    bound: int = Field(default=100, gt=1)
    share: float | None = Field(default=None, gt=0, le=1)
    estimates: Estimates | None = None
    reuse: bool | None = None

    @model_validator(mode="after")
    def _check_share(self) -> Self:
        """Raise ``SpecError`` if ``share`` is set together with settings that only affect the clients' reports."""
        for key in ("samples", "epsilon", "estimates", "reuse"):
            if self.share is not None and (value := getattr(self, key)) is not None:
                problem = "has no effect with share, because clients do not report their numbers of samples. Remove"
                raise SpecError(key, f"{problem} {key} or share.", value)
        return self

    @property
    @override
    def fixed_share(self) -> float | None:
        return self.share

    @property
    def private(self) -> bool:
        """Whether clients keep their numbers of samples private: True with ``epsilon`` or ``share``."""
        return self.epsilon is not None or self.share is not None

    def check(self, config: FederationConfig) -> None:
        """Warn if a client has more samples than the bound M allows."""
        if self.epsilon is not None and config.sizes is not None and (config.sizes >= self.bound).any():
            clipped = int((config.sizes >= self.bound).sum())
            warnings.warn(
                f"method.bound = {self.bound}: clips the sizes of {clipped} of {config.clients} clients (the largest "
                f"client has {int(config.sizes.max())} samples). The estimated total is therefore too low, and clients "
                "use more samples than requested. A larger bound avoids this, but adds noise.",
                stacklevel=2,
            )

    def allowed(self, agreed: Agreed) -> list[Allowed]:
        """Return the request for the participants' numbers of samples. With ``share``, return an empty list."""
        if self.share is not None:
            return []
        return [allowed_sizes(self.epsilon, self.bound, per="run" if self.reuse else "phase")]

    def init(self, federation: Federation) -> Tree:
        """Return a state without estimates and without reported numbers."""
        return FedSTaSAnswersState(0.0, 0, AnswersState.empty()) if self.reuse else FedSTaSDataState(0.0, 0)

    def keep(self, federation: Federation, state: Tree, clients: Sequence[int]) -> KeepResult:
        """Ask for unknown numbers of samples. Return the requested number, divided by the estimated total number."""
        if self.share is not None:
            return self.share, state, {"keep": self.share, **_expected(federation, self.share, clients)}
        known = state.answered if self.reuse else None
        answered = ask_new_sizes(federation, known, clients, self.epsilon, self.bound)
        if not answered.responses:
            return self.fraction, state, {}
        responses, bound, alpha = answered.responses, answered.bound, answered.alpha
        pooled = self.estimates == "pooled"
        estimate = unbiased_total(sum(responses), len(responses), bound, alpha)
        if not pooled:
            # A pooled estimate is a mean over rounds. Errors in both directions average out only if the estimate of
            # each round has no lower limit.
            estimate = max(1.0, estimate)
        state = replace(state, total=state.total + estimate, rounds=state.rounds + 1)
        if self.reuse:
            state = replace(state, answered=answered.state)
        used = max(1.0, state.total / state.rounds) if pooled else estimate
        part = self.fraction * used if pooled else self.fraction * state.total / state.rounds
        wanted = part if self.samples is None else float(self.samples)
        keep = self.fraction if pooled and self.samples is None else min(1.0, wanted / used)
        metrics = {"estimated_samples": used, "requested_samples": wanted, "keep": keep}
        return keep, state, metrics | _expected(federation, keep, answered.participants)


def _expected(federation: Federation, keep: float, clients: Sequence[int]) -> dict[str, float]:
    """In a simulation, return the expected number of samples that clients use; otherwise, an empty mapping.

    Only simulations know how many samples each client has. With the expected number, methods can be compared at equal
    numbers of samples. With an estimate from a single round, the expected number is slightly larger than n*. If clients
    have more samples than the bound M, the expected number is much larger than n*.
    """
    sizes = federation.config.sizes
    return {} if sizes is None else {"expected_samples": keep * float(sizes[list(clients)].sum())}
