"""Sample data as in FedSTaS: clients use part of their samples, and can hide their sizes (FedSTaS §2.4)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from pydantic import Field, PositiveInt

from fedstrata.base.records import Tree, record
from fedstrata.federation.allowed import Agreed, Allowed
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation
from fedstrata.sampling.base import DataSampler, KeepResult
from fedstrata.sampling.client_sizes import Epsilon, allowed_sizes, ask_sizes, estimated_total


@record("FedSTaSDataState")
class FedSTaSDataState:
    """The running mean of the estimated total number of samples of a round's participants.

    Args:
        total: The sum of the estimates so far.
        rounds: The number of estimates so far.
    """

    total: float
    rounds: int


class FedSTaSData(DataSampler):
    """Each participant uses each sample with the same probability, chosen to reach a requested total number of samples.

    The probability is n*/ñ, where n* is the requested number of samples. The server's estimate of the participants'
    total number of samples is ñ.

    Args:
        fraction: Fraction of the participants' samples that a round uses. The requested number n* is this fraction
            times the mean of the estimates ñ of all rounds so far.
        samples: Total number n* of samples that the participants of a round use on average. Default: computed from
            ``fraction``.
        epsilon: Privacy parameter ε of local differential privacy for the clients' reported numbers of samples. A
            smaller value means more noise. A client spends the privacy budget ε in each round in which it takes part.
            Default: clients report exact numbers.
        bound: Public upper bound M for the reported numbers of samples. Used only if ``epsilon`` is set. Numbers ≥ M
            are reported as M − 1. Clients then use more samples than requested.
    """

    needs_replies = "asks each client for its number of samples"

    fraction: float = Field(default=0.1, gt=0, le=1)
    samples: PositiveInt | None = None
    epsilon: Epsilon | None = None
    bound: int = Field(default=100, gt=1)

    @property
    def private(self) -> bool:
        """Whether clients keep their numbers of samples private. This is the case if ``epsilon`` is set."""
        return self.epsilon is not None

    def check(self, config: FederationConfig) -> None:
        """Warn if a client has more samples than it may report with the bound M."""
        if self.epsilon is not None and config.sizes is not None and (config.sizes >= self.bound).any():
            clipped = int((config.sizes >= self.bound).sum())
            warnings.warn(
                f"method.bound = {self.bound}: clips the sizes of {clipped} of {config.clients} clients (up to "
                f"{int(config.sizes.max())} samples). The estimated total is therefore too low, and clients use more "
                "samples than requested. A larger bound avoids this, but adds noise.",
                stacklevel=2,
            )

    def allowed(self, agreed: Agreed) -> list[Allowed]:
        """Return the request for the participants' sizes, which the sampler sends in every round."""
        return [allowed_sizes(self.epsilon, self.bound)]

    def init(self, federation: Federation) -> Tree:
        """Return a state without estimates."""
        return FedSTaSDataState(0.0, 0)

    def keep(self, federation: Federation, state: Tree, clients: Sequence[int]) -> KeepResult:
        """Ask for the participants' sizes. Return the requested number of samples, divided by the estimated total."""
        sizes, bound, alpha = ask_sizes(federation, clients, self.epsilon, self.bound)
        if not sizes:
            return self.fraction, state, {}
        estimate = estimated_total(list(sizes.values()), bound, alpha)
        state = FedSTaSDataState(state.total + estimate, state.rounds + 1)
        wanted = float(self.samples) if self.samples is not None else self.fraction * state.total / state.rounds
        keep = min(1.0, wanted / estimate)
        metrics = {"estimated_samples": estimate, "requested_samples": wanted, "keep": keep}
        if (true_sizes := federation.config.sizes) is not None:
            # The true sizes are known only in simulations. Record the expected number of used samples, so that methods
            # can be compared at equal numbers. This number exceeds n* slightly, because 1/ñ is convex. It exceeds n* by
            # far if M clips sizes.
            metrics["expected_samples"] = keep * float(true_sizes[list(sizes)].sum())
        return keep, state, metrics
